"""Collectives over several axes, over one of two, and beside an axis of vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from hlo import collectives
from jax import lax
from jax.sharding import PartitionSpec as P
from reference_codec import snr_db
from shards import per_rank

import taco_jax
from taco_jax import CODECS


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather", "all_to_all", "ppermute", "copy"])
def test_tuple_of_axes(name):
    axes = ("dp", "tp")
    x_P = np.random.default_rng(0).normal(size=(8, 8, 40)).astype(np.float32)
    calls = {
        "psum": lambda m, x, **kw: m.psum(x, axes, **kw),
        "psum_scatter": lambda m, x, **kw: m.psum_scatter(x, axes, tiled=True, **kw),
        "all_gather": lambda m, x, **kw: m.all_gather(x, axes, tiled=True, **kw),
        "all_to_all": lambda m, x, **kw: m.all_to_all(x, axes, 0, 1, tiled=True, **kw),
        "ppermute": lambda m, x, **kw: m.ppermute(x, axes, [(7, 0), (0, 7)], **kw),
    }
    if name == "copy":
        mesh = make_mesh(dp=2, tp=4)

        def gradient(x, w):
            return jax.grad(lambda v: jnp.sum(w * taco_jax.copy(v, axes, compression="int8h")))(x)

        f = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P()))
        y = f(x_P[0, :1], x_P[:, 0])
        np.testing.assert_allclose(y[0], x_P[:, 0].sum(0), atol=0.15)
        return
    f, reference = (
        per_rank(lambda x, m=m, kw=kw: calls[name](m, x, **kw), 4, dp=2, invarying_out=name == "psum")
        for m, kw in ((taco_jax, {"compression": "int8h"}), (lax, {}))
    )
    assert snr_db(reference(x_P), f(x_P)) > 38
    found = collectives(f.lower(x_P).compile())
    assert {dtype for _, dtype, _ in found} == {"uint8"}


def test_the_other_axis_stays_apart():
    """dp 2 x tp 4: a sum over tp moves nothing over dp."""
    x_P = np.random.default_rng(0).normal(size=(8, 600)).astype(np.float32)
    f = per_rank(lambda x: taco_jax.psum(x, "tp", compression="int8h"), 4, dp=2)
    y = np.asarray(f(x_P))
    for dp in (0, 1):
        rows = slice(4 * dp, 4 * dp + 4)
        assert snr_db(x_P[rows].sum(0), y[4 * dp]) > 38
        assert (y[rows] == y[4 * dp]).all()
    n = CODECS["int8h"].wire_bytes(256) * 4
    assert collectives(f.lower(x_P).compile()) == [("all-gather", "uint8", n), ("all-to-all", "uint8", n)]


def test_vmap_is_one_message_for_each_example():
    x_P = np.random.default_rng(0).normal(size=(4, 3, 200)).astype(np.float32)
    x_P[:, 1] *= 1e4
    f = per_rank(jax.vmap(lambda x: taco_jax.psum(x, "tp", compression="int8h")), 4, invarying_out=True)
    one = per_rank(lambda x: taco_jax.psum(x, "tp", compression="int8h"), 4, invarying_out=True)
    y = f(x_P)
    for i in range(3):
        np.testing.assert_array_equal(y[i], one(x_P[:, i]))
