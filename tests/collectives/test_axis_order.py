"""Collectives over several axes count ranks in the order of the tuple, whatever the order of the mesh."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spelled_out
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from shards import bits_of_every_device

import taco_jax

ORDERS = [("dp", "tp"), ("tp", "dp"), ("tp", "pp", "dp")]
PERM = [(0, 1), (1, 2), (2, 7), (5, 0)]


def over(axes, f, *, invarying_out=False):
    """jit of f on a mesh of (2, 4): row r of the input is that of rank r, counted in the order of `axes`."""
    local = lambda x: f(x[0]) if invarying_out else f(x[0])[None]
    mesh = make_mesh(dp=2, tp=4)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(axes), out_specs=P() if invarying_out else P(axes)))


def draw(*shape):
    return np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
# The first order is the mesh's own, where nothing has to be put in order.
FEW = [("psum", ORDERS[1], 2), ("psum_scatter", ORDERS[2], 1), ("all_to_all", ORDERS[1], 1)]
REST = itertools.product(("psum", "psum_scatter", "all_to_all"), ORDERS, (1, 2))


@pytest.mark.parametrize("name,axes,chunks", [*FEW, *(SLOW(*case) for case in REST if case not in FEW)])
def test_a_ring_is_the_all_to_all(name, axes, chunks):
    x_P = draw(8, 300)
    calls = {
        "psum": lambda x, **kw: spelled_out.psum(x, axes, codec="mxfp6", **kw),
        "psum_scatter": lambda x, **kw: spelled_out.psum_scatter(x, axes, tiled=True, codec="mxfp6", **kw),
        "all_to_all": lambda x, **kw: spelled_out.all_to_all(x, axes, 0, 0, tiled=True, codec="mxfp6", **kw),
    }
    exact = {
        "psum": x_P.sum(0), "psum_scatter": x_P.sum(0)[:, None], "all_to_all": x_P.swapaxes(0, 1),
    }[name]  # fmt: skip
    run = lambda **kw: over(axes, lambda x: calls[name](x, **kw), invarying_out=name == "psum")(x_P)
    y = run(exchange="all_to_all")
    assert np.linalg.norm(y - exact) < 0.1 * np.linalg.norm(exact)
    assert bits_of_every_device(run(exchange="ring", chunks=chunks)) == bits_of_every_device(y)


def permuted(x_P):
    y_P = np.zeros_like(x_P)
    for source, destination in PERM:
        y_P[destination] = x_P[source]
    return y_P


OTHER_ORDERS = [SLOW(ORDERS[0]), *ORDERS[1:]]


@pytest.mark.parametrize("axes", OTHER_ORDERS)
def test_ppermute(axes):
    x_P = draw(300)
    send = lambda codec, x: taco_jax.ppermute(x, axes, PERM, compression=codec)
    both = lambda x: jnp.stack([send("none", x), send("int8h", x)])
    exact, close = over(axes, both)(x_P).swapaxes(0, 1)
    np.testing.assert_array_equal(exact, permuted(x_P))
    np.testing.assert_allclose(close, permuted(x_P), atol=0.05)
    integers = np.arange(8, dtype=np.int32)[:, None]
    np.testing.assert_array_equal(over(axes, lambda x: send("int8h", x))(integers), permuted(integers))


@pytest.mark.parametrize("axes", OTHER_ORDERS)
def test_gradients_go_back_the_way(axes):
    x_P = draw(300)

    def gradients(x):
        weight = jax.lax.axis_index(axes) + 1.0
        loss = lambda x, codec: jnp.sum(weight * taco_jax.ppermute(x, axes, PERM, compression=codec))
        return jnp.stack([jax.grad(loss)(x, codec) for codec in ("none", "int8h")])

    expected = np.zeros((8, 1))
    for source, destination in PERM:
        expected[source] = destination + 1
    for gradient in np.asarray(over(axes, gradients)(x_P)).swapaxes(0, 1):
        np.testing.assert_allclose(gradient, np.broadcast_to(expected, x_P.shape), atol=0.2)
