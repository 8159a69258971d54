"""Compressed collectives against jax.lax: its own program where nothing is compressed, its shapes, types and trees."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import spelled_out
from helpers import make_mesh
from hlo import collectives, program
from jax import lax
from jax.sharding import PartitionSpec as P
from shards import per_rank

import taco_jax
from taco_jax.collectives import comm_log

LAX = {
    "psum": (lambda x, **kw: spelled_out.psum(x, "tp", **kw), lambda x: lax.psum(x, "tp")),
    "psum_scatter": (
        lambda x, **kw: spelled_out.psum_scatter(x, "tp", tiled=True, **kw),
        lambda x: lax.psum_scatter(x, "tp", tiled=True),
    ),
    "psum_scatter_untiled": (
        lambda x, **kw: spelled_out.psum_scatter(x, "tp", scatter_dimension=0, **kw),
        lambda x: lax.psum_scatter(x, "tp", scatter_dimension=0),
    ),
    "all_gather": (
        lambda x, **kw: spelled_out.all_gather(x, "tp", axis=1, **kw),
        lambda x: lax.all_gather(x, "tp", axis=1),
    ),
    "all_gather_invarying": (
        lambda x, **kw: spelled_out.all_gather(x, "tp", tiled=True, to="invarying", **kw),
        lambda x: lax.all_gather(x, "tp", tiled=True, to="invarying"),
    ),
    "all_to_all": (
        lambda x, **kw: spelled_out.all_to_all(x, "tp", 0, 1, tiled=True, **kw),
        lambda x: lax.all_to_all(x, "tp", 0, 1, tiled=True),
    ),
    "all_to_all_untiled": (
        lambda x, **kw: spelled_out.all_to_all(x, "tp", 0, 1, **kw),
        lambda x: lax.all_to_all(x, "tp", 0, 1),
    ),
    "ppermute": (
        lambda x, **kw: spelled_out.ppermute(x, "tp", [(0, 3), (3, 1)], **kw),
        lambda x: lax.ppermute(x, "tp", [(0, 3), (3, 1)]),
    ),
}
SAME_EVERYWHERE = ("psum", "all_gather_invarying")


@pytest.mark.parametrize("name", LAX)
def test_below_min_bytes_and_codec_none_are_jax_lax(name):
    ours, theirs = LAX[name]
    invarying = name in SAME_EVERYWHERE
    x_P = np.random.default_rng(0).normal(size=(4, 4, 10)).astype(np.float32)
    size = x_P[0].nbytes * (4 if name.startswith("all_gather") else 1)  # a gather's message is its result
    reference = per_rank(theirs, 4, invarying_out=invarying)
    small = per_rank(lambda x: ours(x, codec="taco", min_bytes=size + 1), 4, invarying_out=invarying)
    exact = per_rank(lambda x: ours(x, codec="none"), 4, invarying_out=invarying)
    expected = reference.lower(x_P)
    for f in (small, exact):
        lowered = f.lower(x_P)
        assert lowered.as_text() == expected.as_text()
        assert program(lowered) == program(expected)
    compressed = per_rank(lambda x: ours(x, codec="int8h", min_bytes=size), 4, invarying_out=invarying)
    assert {dtype for _, dtype, _ in collectives(compressed.lower(x_P).compile())} == {"uint8"}
    y, expected = np.asarray(compressed(x_P)), np.asarray(reference(x_P))
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, atol=0.1)


# Forms of a collective differ in the last step, not in what is done with trees and types.
FORMS = ("psum_scatter_untiled", "all_gather_invarying", "all_to_all_untiled")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in FORMS else name for name in LAX]


@pytest.mark.parametrize("name", NAMES)
def test_trees_and_integers(name):
    ours, theirs = LAX[name]
    invarying = name in SAME_EVERYWHERE
    rng = np.random.default_rng(0)
    floats = rng.normal(size=(4, 4, 10)).astype(np.float32)
    tree = {
        "float": floats,
        "nested": (rng.integers(0, 10**6, (4, 4, 3)).astype(np.int32), floats.astype(ml_dtypes.bfloat16)),
        "mask": floats[..., :3] > 0 if name not in ("psum", "psum_scatter", "psum_scatter_untiled") else None,
    }
    both = lambda x: (ours(x, codec="int8h", site="tree"), jax.tree.map(theirs, x))
    with comm_log.record() as table:
        y, expected = per_rank(both, 4, invarying_out=invarying)(tree)
    assert jax.tree.structure(y) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(y), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(np.float32(a), np.float32(b), atol=0.1)
        else:
            np.testing.assert_array_equal(a, b)
    assert {row.site for row in table.rows()} >= {"tree/float", "tree/nested/0", "tree/nested/1"}


@pytest.mark.parametrize("name", [n for n in LAX if "untiled" not in n and n != "ppermute"])
def test_one_rank_is_untouched(name):
    x_P = np.random.default_rng(0).normal(size=(1, 4, 10)).astype(np.float32)
    f = per_rank(lambda x: LAX[name][0](x, codec="int4h"), 1, invarying_out=name in SAME_EVERYWHERE)
    y = np.asarray(f(x_P))
    np.testing.assert_array_equal(y.reshape(4, 10), x_P[0])
    # Only jax.lax's own collective is left, over one device; it adjusts the type.
    reference = per_rank(LAX[name][1], 1, invarying_out=name in SAME_EVERYWHERE)
    assert program(f.lower(x_P)) == program(reference.lower(x_P))


def test_one_rank_permutes_to_itself():
    x_P = np.random.default_rng(0).normal(size=(1, 33)).astype(np.float32)
    f = per_rank(lambda x: taco_jax.ppermute(x, "tp", [(0, 0)], compression="int4h"), 1)
    np.testing.assert_array_equal(f(x_P), x_P)


@pytest.mark.parametrize("name", LAX)
def test_an_empty_array_sends_nothing(name):
    x_P = np.ones((4, 4, 0), np.float32)
    f = per_rank(lambda x: LAX[name][0](x, codec="taco"), 4, invarying_out=name in SAME_EVERYWHERE)
    theirs = per_rank(LAX[name][1], 4, invarying_out=name in SAME_EVERYWHERE)
    y, full = f(x_P), jax.eval_shape(theirs, np.ones((4, 4, 4), np.float32))
    empty = [n == 0 for n in y.shape]
    assert sum(empty) == 1 and y.ndim == full.ndim and y.dtype == full.dtype
    assert not collectives(f.lower(x_P).compile())
    sum_of = lambda x: jnp.sum(LAX[name][0](x, codec="taco"))
    assert per_rank(jax.grad(sum_of), 4)(x_P).shape == x_P.shape


@pytest.mark.parametrize("codec", ["taco", "taco_paper"])
def test_a_rank_that_nobody_sends_to_has_zeros(codec):
    """It receives a wire of zeros, in which taco_paper would read 0 / 0."""
    x_P = np.ones((4, 300), np.float32)
    y = np.asarray(per_rank(lambda x: taco_jax.ppermute(x, "tp", [(0, 2)], compression=codec), 4)(x_P))
    np.testing.assert_allclose(y, [[0] * 300, [0] * 300, [1] * 300, [0] * 300], atol=0.05)
    assert not y[[0, 1, 3]].any()


def test_scalars():
    f = per_rank(lambda x: taco_jax.psum({"a": x[0], "b": 2.0}, "tp", compression="int8h"), 4, invarying_out=True)
    y = f(np.ones((4, 1), np.float32))
    assert y["a"].shape == y["b"].shape == () and abs(y["a"] - 4) < 0.1 and abs(y["b"] - 8) < 0.1


# jax.lax's own gradient of an untiled all_to_all fails here: its transpose keeps the cotangent's shape.
@pytest.mark.parametrize("name", [n for n in LAX if n != "all_to_all_untiled"])
def test_a_value_that_is_the_same_on_all_ranks_counts_as_varying(name):
    """As in jax.lax, where the cast is implicit; the type system must accept the gradient too."""
    ours, theirs = LAX[name]
    x = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32)

    def gradient(f, x):
        def loss(x):
            y = f(x)
            w = jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape) / y.size
            return jnp.sum(w * y) if name in SAME_EVERYWHERE else lax.psum(jnp.sum(w * y), "tp")

        return jax.grad(loss)(x)

    all_three = theirs, lambda x: ours(x, codec="none"), lambda x: ours(x, codec="int8h")
    local = lambda x: [gradient(f, x) for f in all_three]
    run = jax.jit(jax.shard_map(local, mesh=make_mesh(tp=4), in_specs=P(), out_specs=P()))
    expected, exact, compressed = map(np.asarray, run(x))
    np.testing.assert_allclose(exact, expected, rtol=1e-6)
    np.testing.assert_allclose(compressed, expected, atol=0.02 * np.abs(expected).max())
