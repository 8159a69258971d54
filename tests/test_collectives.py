"""Compressed collectives: values against a numpy model, bytes against compiled HLO, equal bits on all ranks."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import make_mesh
from hlo import collectives, program
from jax import lax
from jax.sharding import PartitionSpec as P
from pairs import pairwise
from reference_codec import REFERENCES, snr_db
from shards import bits_of_every_device, per_rank

import taco_jax
from taco_jax import CODECS, Codec, sites

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


# A model of every collective in numpy: rows of x_P are the ranks' inputs. Returns the ranks' outputs and the messages,
# (opcode, uint8 elements of the output on one device).


def model_two_shot(ref, x_P, exponent):
    p, size = len(x_P), x_P[0].size
    n = ref.block * math.ceil(math.ceil(size / ref.block) / p)
    chunks = np.zeros((p, p * n), np.float32)
    chunks[:, :size] = x_P.reshape(p, -1)
    chunks = chunks.reshape(p, p, n)
    parts = []
    for owner in range(p):
        total = model_sum(ref, chunks[:, owner], owner, exponent)
        parts.append(ref.from_blocks(ref.encode_blocks(total, exponent)[1], n))
    y = np.concatenate(parts)[:size].reshape(x_P[0].shape)
    return [y] * p, [("all-to-all", p * ref.wire_bytes(n)), ("all-gather", p * ref.wire_bytes(n))]


def model_sum(ref, terms, owner, exponent):
    total = None
    for rank, term in enumerate(terms):  # float32, in rank order; the owner's own term is not quantised
        z = ref.to_blocks(term)
        z = z if rank == owner else ref.encode_blocks(z, exponent)[1]
        total = z if total is None else total + z
    return total


def model_one_shot(ref, x_P, exponent):
    total = model_sum(ref, x_P, None, exponent)
    y = ref.from_blocks(total, x_P[0].size).reshape(x_P[0].shape)
    return [y] * len(x_P), [("all-gather", len(x_P) * ref.wire_bytes(x_P[0].size))]


def model_psum_scatter(ref, x_P, exponent):
    p = len(x_P)
    pieces = np.stack(np.split(x_P, p, axis=2), 1)  # [rank, owner, R, C / P]
    n = pieces[0, 0].size
    ys = [ref.from_blocks(model_sum(ref, pieces[:, r], r, exponent), n).reshape(pieces[0, 0].shape) for r in range(p)]
    return ys, [("all-to-all", p * ref.wire_bytes(n))]


def model_all_gather(ref, x_P, exponent):
    y = np.concatenate([ref.round_trip(x, exponent) for x in x_P], axis=0)
    return [y] * len(x_P), [("all-gather", len(x_P) * ref.wire_bytes(x_P[0].size))]


def model_all_to_all(ref, x_P, exponent):
    p = len(x_P)
    pieces = np.stack(np.split(x_P, p, axis=2), 1)
    read = [[pieces[s, r] if s == r else ref.round_trip(pieces[s, r], exponent) for s in range(p)] for r in range(p)]
    return [np.concatenate(row, axis=0) for row in read], [("all-to-all", p * ref.wire_bytes(pieces[0, 0].size))]


def model_ppermute(ref, x_P, exponent):
    p = len(x_P)
    zeros = np.zeros_like(x_P[0], dtype=np.float32)
    ys = [ref.round_trip(x_P[r - 1], exponent) if r else zeros for r in range(p)]
    return ys, [("collective-permute", ref.wire_bytes(x_P[0].size))]


def ring(axis):
    """Every rank sends to the next one, the last to nobody."""
    return [(i, i + 1) for i in range(lax.axis_size(axis) - 1)]


OPERATIONS = {
    "two_shot": (model_two_shot, functools.partial(taco_jax.psum, algorithm="two_shot")),
    "one_shot": (model_one_shot, functools.partial(taco_jax.psum, algorithm="one_shot")),
    "psum": (None, taco_jax.psum),
    "psum_scatter": (model_psum_scatter, functools.partial(taco_jax.psum_scatter, scatter_dimension=1, tiled=True)),
    "all_gather": (model_all_gather, functools.partial(taco_jax.all_gather, axis=-2, tiled=True)),
    "all_gather_invarying": (model_all_gather, functools.partial(taco_jax.all_gather, tiled=True, to="invarying")),
    "all_to_all": (model_all_to_all, functools.partial(taco_jax.all_to_all, split_axis=1, concat_axis=0, tiled=True)),
    "ppermute": (model_ppermute, lambda x, axis, **kw: taco_jax.ppermute(x, axis, ring(axis), **kw)),
}  # fmt: skip
INVARYING = ("two_shot", "one_shot", "psum", "all_gather_invarying")
GRID = {
    "operation": tuple(OPERATIONS),
    "codec": ("taco", "int5h", "mxfp4", "e5m2"),
    "ranks": (2, 4, 8),
    "dtype": tuple(DTYPES),
}


def check_operation(operation, codec, ranks, dtype):
    model, run = OPERATIONS[operation]
    if operation == "psum":  # auto: the exchange for two ranks, else two-shot
        model = model_one_shot if ranks == 2 else model_two_shot
    exponent = -8 if codec == "taco" else None
    scales = None if exponent is None else taco_jax.SiteScales(exponents=np.array([exponent, 3], np.int32))
    rng = np.random.default_rng(ranks)
    # 3 x 8 * 17: pieces are no multiple of a block, whatever the number of ranks
    x_P = (rng.normal(size=(ranks, 3, 136)) * np.exp2(rng.integers(-3, 4, (ranks, 3, 1)))).astype(DTYPES[dtype])
    invarying = operation in INVARYING

    def f(x):
        return run(x, "tp", codec=codec, scales=scales, site="here")

    program = per_rank(f, ranks, invarying_out=invarying)
    with sites.record() as table:
        lowered = program.lower(x_P)
    compiled = lowered.compile()

    expected, messages = model(REFERENCES[codec], x_P.astype(np.float32), exponent)
    assert collectives(compiled) == sorted((opcode, "uint8", n) for opcode, n in messages)
    (row,) = table.rows()
    assert sorted(row.hlo) == collectives(compiled)
    sent = sum(n * (1 if opcode == "collective-permute" else (ranks - 1) / ranks) for opcode, n in messages)
    assert row.bytes == pytest.approx(sent)

    y = program(x_P)
    assert y.dtype == x_P.dtype
    read = [np.asarray(y)] * ranks if invarying else np.asarray(y)
    for rank in range(ranks):
        assert read[rank].shape == expected[rank].shape
        close(REFERENCES[codec], read[rank], expected[rank].astype(x_P.dtype))
    if invarying:
        assert len(set(bits_of_every_device(y))) == 1
    assert bits_of_every_device(program(x_P)) == bits_of_every_device(y)


def close(ref, y, expected):
    if ref.rotation == "none":
        np.testing.assert_array_equal(y, expected)
    else:
        # A rotation sums in another order than the model, so now and then a code is its neighbour.
        floor = {"float32": 55, "bfloat16": 44, "float16": 55}[str(y.dtype)]
        assert snr_db(expected.astype(np.float32), y.astype(np.float32)) > floor


@pytest.mark.parametrize("operation,codec,ranks,dtype", pairwise(**GRID))
def test_values_bytes_and_bits(operation, codec, ranks, dtype):
    check_operation(operation, codec, ranks, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("operation,codec,ranks,dtype", list(itertools.product(*GRID.values())))
def test_values_bytes_and_bits_everywhere(operation, codec, ranks, dtype):
    check_operation(operation, codec, ranks, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("preset", REFERENCES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_preset_in_every_collective(operation, preset):
    if preset == "taco_paper" and operation in ("psum_scatter", "all_to_all", "two_shot", "psum"):
        pytest.skip("the padding's blocks have an alpha that only XLA's square root knows")
    check_operation(operation, preset, 4, "float32")


# Noise


@pytest.mark.parametrize("codec", ["taco", "e4m3", "int8h", "int4h"])
def test_what_two_shot_loses(codec):
    """(P-1)/P of the terms are quantised, then the sum: 10 log10(1 + (P-1)/P) dB. One hop loses nothing."""
    rng = np.random.default_rng(0)
    x_P = rng.normal(size=(8, 1 << 14)).astype(np.float32)
    one_hop = {"taco": 31.6, "e4m3": 31.8, "int8h": 43.7, "int4h": 18.6}[codec]
    limits = {(2, "auto"): (-0.3, 0.3), (4, "auto"): (2.2, 2.7), (8, "auto"): (2.5, 3.0), (4, "one_shot"): (-0.3, 0.3)}
    for (ranks, algorithm), (low, high) in limits.items():
        f = per_rank(lambda x, a=algorithm: taco_jax.psum(x, "tp", codec=codec, algorithm=a), ranks, invarying_out=True)
        loss = one_hop - snr_db(x_P[:ranks].sum(0, dtype=np.float64), f(x_P[:ranks]))
        assert low <= loss <= high, (ranks, algorithm, loss)


def test_stochastic_rounding_differs_on_every_rank_and_hop():
    """Equal noise on all ranks would not average out: a sum's error would grow with P instead of its square root."""
    codec = Codec("int4", 128, "none", "bfloat16", "stochastic")
    x_P = np.tile(np.random.default_rng(0).normal(size=4096).astype(np.float32), (8, 1))

    def summed(n, seed):
        f = lambda x: taco_jax.psum(x, "tp", codec=codec, algorithm="one_shot", key=jax.random.key(seed))
        return np.asarray(per_rank(f, n, invarying_out=True)(x_P[:n]))

    one, eight = summed(2, 3), summed(8, 3)
    errors = [np.std(np.asarray(y) - n * x_P[0]) for y, n in ((one, 2), (eight, 8))]
    assert errors[1] / errors[0] == pytest.approx(2, rel=0.1)  # not 4
    assert (summed(2, 4) != one).any()
    with pytest.raises(ValueError, match="needs key="):
        per_rank(lambda x: taco_jax.psum(x, "tp", codec=codec), 2, invarying_out=True)(x_P[:2])


@pytest.mark.parametrize("make", [jax.random.PRNGKey, functools.partial(jax.random.key, impl="rbg")])
def test_keys_of_every_kind(make):
    x_P, key = np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32), make(0)
    codec = dataclasses.replace(CODECS["int8h"], rounding="stochastic")
    loss = lambda x: jnp.sum(taco_jax.psum(x, "tp", codec=codec, key=key) ** 2) / 2
    np.testing.assert_allclose(per_rank(jax.grad(loss), 2)(x_P)[0], x_P.sum(0), atol=0.2)


@pytest.mark.parametrize("operation", ["two_shot", "one_shot", "psum_scatter", "all_gather"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_one_bad_value_on_one_rank_is_nan_on_all(operation, bad):
    x_P = np.random.default_rng(0).normal(size=(4, 4, 512)).astype(np.float32)
    f = per_rank(
        lambda x: OPERATIONS[operation][1](x, "tp", codec="taco"),
        4,
        invarying_out=operation in ("two_shot", "one_shot"),
    )
    good = np.asarray(f(x_P))
    x_P[2, 1, 300] = bad  # block 256..383 of row 1
    y = np.asarray(f(x_P))
    wrong = np.isnan(y)
    if operation == "psum_scatter":  # columns go to ranks: 300 is column 44 of rank 2's piece of 128
        assert wrong[2, 1].sum() >= 127 and wrong.sum() == wrong[2, 1].sum()
        assert not np.isfinite(y[2, 1]).any()
    elif operation == "all_gather":
        assert wrong[:, 2 * 4 + 1, 256:384].all() and wrong.sum() == 4 * 128
    else:
        assert wrong[1, 256:384].all() and wrong.sum() == 128
    if operation != "psum_scatter":
        np.testing.assert_array_equal(y[~wrong], good[~wrong])


# jax.lax's own program where nothing is to be compressed


LAX = {
    "psum": (lambda x, **kw: taco_jax.psum(x, "tp", **kw), lambda x: lax.psum(x, "tp")),
    "psum_scatter": (
        lambda x, **kw: taco_jax.psum_scatter(x, "tp", tiled=True, **kw),
        lambda x: lax.psum_scatter(x, "tp", tiled=True),
    ),
    "psum_scatter_untiled": (
        lambda x, **kw: taco_jax.psum_scatter(x, "tp", scatter_dimension=0, **kw),
        lambda x: lax.psum_scatter(x, "tp", scatter_dimension=0),
    ),
    "all_gather": (
        lambda x, **kw: taco_jax.all_gather(x, "tp", axis=1, **kw),
        lambda x: lax.all_gather(x, "tp", axis=1),
    ),
    "all_gather_invarying": (
        lambda x, **kw: taco_jax.all_gather(x, "tp", tiled=True, to="invarying", **kw),
        lambda x: lax.all_gather(x, "tp", tiled=True, to="invarying"),
    ),
    "all_to_all": (
        lambda x, **kw: taco_jax.all_to_all(x, "tp", 0, 1, tiled=True, **kw),
        lambda x: lax.all_to_all(x, "tp", 0, 1, tiled=True),
    ),
    "all_to_all_untiled": (
        lambda x, **kw: taco_jax.all_to_all(x, "tp", 0, 1, **kw),
        lambda x: lax.all_to_all(x, "tp", 0, 1),
    ),
    "ppermute": (
        lambda x, **kw: taco_jax.ppermute(x, "tp", [(0, 3), (3, 1)], **kw),
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


@pytest.mark.parametrize("name", LAX)
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
    with sites.record() as table:
        f = per_rank(lambda x: ours(x, codec="int8h", site="tree"), 4, invarying_out=invarying)
        y = f(tree)
    expected = per_rank(lambda x: jax.tree.map(theirs, x), 4, invarying_out=invarying)(tree)
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
    f = per_rank(lambda x: taco_jax.ppermute(x, "tp", [(0, 0)], codec="int4h"), 1)
    np.testing.assert_array_equal(f(x_P), x_P)


@pytest.mark.parametrize("name", LAX)
def test_an_empty_array_sends_nothing(name):
    x_P = np.ones((4, 4, 0), np.float32)
    f = per_rank(lambda x: LAX[name][0](x, codec="taco"), 4, invarying_out=name in SAME_EVERYWHERE)
    y, full = f(x_P), per_rank(LAX[name][1], 4, invarying_out=name in SAME_EVERYWHERE)(np.ones((4, 4, 4), np.float32))
    empty = [n == 0 for n in y.shape]
    assert sum(empty) == 1 and y.ndim == full.ndim and y.dtype == full.dtype
    assert not collectives(f.lower(x_P).compile())
    sum_of = lambda x: jnp.sum(LAX[name][0](x, codec="taco"))
    assert per_rank(jax.grad(sum_of), 4)(x_P).shape == x_P.shape


@pytest.mark.parametrize("codec", ["taco", "taco_paper"])
def test_a_rank_that_nobody_sends_to_has_zeros(codec):
    """It receives a wire of zeros, in which taco_paper would read 0 / 0."""
    x_P = np.ones((4, 300), np.float32)
    y = np.asarray(per_rank(lambda x: taco_jax.ppermute(x, "tp", [(0, 2)], codec=codec), 4)(x_P))
    np.testing.assert_allclose(y, [[0] * 300, [0] * 300, [1] * 300, [0] * 300], atol=0.05)
    assert not y[[0, 1, 3]].any()


def test_scalars():
    f = per_rank(lambda x: taco_jax.psum({"a": x[0], "b": 2.0}, "tp", codec="int8h"), 4, invarying_out=True)
    y = f(np.ones((4, 1), np.float32))
    assert y["a"].shape == y["b"].shape == () and abs(y["a"] - 4) < 0.1 and abs(y["b"] - 8) < 0.1


# jax.lax's own gradient of an untiled all_to_all fails here: its transpose keeps the cotangent's shape.
@pytest.mark.parametrize("name", [n for n in LAX if n != "all_to_all_untiled"])
def test_a_value_that_is_the_same_on_all_ranks_counts_as_varying(name):
    """As in jax.lax, where the cast is implicit; the type system must accept the gradient too."""
    ours, theirs = LAX[name]
    x = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32)

    def gradient(f):
        def local(x):
            def loss(x):
                y = f(x)
                w = jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape) / y.size
                return jnp.sum(w * y) if name in SAME_EVERYWHERE else lax.psum(jnp.sum(w * y), "tp")

            return jax.grad(loss)(x)

        return jax.jit(jax.shard_map(local, mesh=make_mesh(tp=4), in_specs=P(), out_specs=P()))(x)

    expected = gradient(theirs)
    np.testing.assert_allclose(gradient(lambda x: ours(x, codec="none")), expected, rtol=1e-6)
    np.testing.assert_allclose(gradient(lambda x: ours(x, codec="int8h")), expected, atol=0.02 * np.abs(expected).max())


# Axes


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
            return jax.grad(lambda v: jnp.sum(w * taco_jax.copy(v, axes, codec="int8h")))(x)

        f = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P()))
        y = f(x_P[0, :1], x_P[:, 0])
        np.testing.assert_allclose(y[0], x_P[:, 0].sum(0), atol=0.15)
        return
    f, reference = (
        per_rank(lambda x, m=m, kw=kw: calls[name](m, x, **kw), 4, dp=2, invarying_out=name == "psum")
        for m, kw in ((taco_jax, {"codec": "int8h"}), (lax, {}))
    )
    assert snr_db(reference(x_P), f(x_P)) > 38
    found = collectives(f.lower(x_P).compile())
    assert {dtype for _, dtype, _ in found} == {"uint8"}


def test_the_other_axis_stays_apart():
    """dp 2 x tp 4: a sum over tp moves nothing over dp."""
    x_P = np.random.default_rng(0).normal(size=(8, 600)).astype(np.float32)
    f = per_rank(lambda x: taco_jax.psum(x, "tp", codec="int8h"), 4, dp=2)
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
    f = per_rank(jax.vmap(lambda x: taco_jax.psum(x, "tp", codec="int8h")), 4, invarying_out=True)
    one = per_rank(lambda x: taco_jax.psum(x, "tp", codec="int8h"), 4, invarying_out=True)
    y = f(x_P)
    for i in range(3):
        np.testing.assert_array_equal(y[i], one(x_P[:, i]))


def test_equal_codecs_share_one_program():
    traces = []

    @functools.partial(jax.jit, static_argnums=1)
    def f(x, codec):
        traces.append(codec)
        local = lambda x: taco_jax.psum(x, "tp", codec=codec)
        return jax.shard_map(local, mesh=make_mesh(tp=2), in_specs=P("tp"), out_specs=P())(x)

    x = np.ones((2, 16), np.float32)
    f(x, CODECS["taco"])
    f(2 * x, Codec("e4m3", 128, "hadamard", "ue5m3"))
    assert len(traces) == 1
    f(x, CODECS["int8h"])
    assert len(traces) == 2


@pytest.mark.parametrize("name", ["psum", "copy", "psum_scatter", "all_gather", "all_to_all"])
def test_without_jit_the_values_are_those_with_it(name):
    def local(x):
        options = {"codec": "taco", "chunks": 2}
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
