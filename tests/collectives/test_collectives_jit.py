"""Collectives and jit: one program for equal codecs, and the same values without it."""

import functools

import jax
import numpy as np
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax import CODECS, Codec, Compression


def test_equal_codecs_share_one_program():
    traces = []

    @functools.partial(jax.jit, static_argnums=1)
    def f(x, codec):
        traces.append(codec)
        local = lambda x: taco_jax.psum(x, "tp", compression=codec)
        return jax.shard_map(local, mesh=make_mesh(tp=2), in_specs=P("tp"), out_specs=P())(x)

    x = np.ones((2, 16), np.float32)
    f(x, CODECS["taco"])
    f(2 * x, Codec("e4m3", 128, "hadamard", "ue5m3"))
    assert len(traces) == 1
    f(x, CODECS["int8h"])
    assert len(traces) == 2


# Each operation is compiled by itself, which takes its time. .ci/smoke.py has psums without jit.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["psum_scatter", "psum", "all_gather", "copy", "all_to_all"])
def test_without_jit_the_values_are_those_with_it(name):
    def local(x):
        options = {"compression": Compression("taco", chunks=2)}
        if name == "copy":
            return jax.grad(
                lambda x: lax.psum((taco_jax.copy(x, "tp", **options) * (1 + lax.axis_index("tp"))).sum(), "tp")
            )(x)
        dims = (0, 0) if name == "all_to_all" else ()
        options |= {} if name == "psum" else {"tiled": True}
        return getattr(taco_jax, name)(x, "tp", *dims, **options)

    x = np.random.default_rng(0).standard_normal((8, 2048), np.float32)
    rows = P() if name == "copy" else P("tp")
    out = P() if name in ("psum", "copy") else P("tp")
    f = jax.shard_map(local, mesh=make_mesh(tp=2), in_specs=rows, out_specs=out)
    np.testing.assert_allclose(f(x), jax.jit(f)(x), rtol=1e-5, atol=1e-6)
