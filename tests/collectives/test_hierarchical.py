"""Collectives in levels: values against a numpy model, bytes and groups against compiled HLO, equal bits on ranks."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spelled_out
from covers import cover
from helpers import make_mesh
from hlo import collectives, groups, program
from jax.sharding import PartitionSpec as P
from reference_codec import REFERENCES, snr_db
from reference_collectives import DTYPES, model_hierarchical, model_hierarchical_gather, model_hierarchical_scatter
from shards import bits_of_every_device, per_rank

import taco_jax
from pallas_kernels import KernelUnavailableError
from taco_jax import CODECS, Codec, Compression, SiteScales
from taco_jax.collectives import comm_log, topology
from taco_jax.collectives.message import in_units_of
from taco_jax.compression import tuned

scatter = functools.partial(spelled_out.psum_scatter, scatter_dimension=1, tiled=True)
gather = functools.partial(spelled_out.all_gather, axis=-2, tiled=True)
OPERATIONS = {
    "psum": (model_hierarchical, spelled_out.psum),
    "psum_scatter": (model_hierarchical_scatter, scatter),
    "all_gather": (model_hierarchical_gather, gather),
    "all_gather_invarying": (model_hierarchical_gather, functools.partial(gather, to="invarying")),
}
INVARYING = ("psum", "all_gather_invarying")
GRID = {
    "operation": tuple(OPERATIONS),
    "codecs": (("taco", "int4h"), ("mxfp4", "e5m2"), ("e5m2", None)),
    "shape": ((8, 4), (8, 2), (4, 2)),  # ranks, of which so many on a host
    "dtype": tuple(DTYPES),
}
LEVELS = {"algorithm": "hierarchical"}


@functools.cache
def build(name, ranks, local, codec="taco", between=None, **options):
    options |= {"codec": codec, "between_hosts": between, "ranks_per_host": local, **LEVELS}
    f = lambda x: OPERATIONS[name][1](x, "tp", **options)
    return per_rank(f, ranks, invarying_out=name in INVARYING)


@functools.cache
def flat(codec):
    """The sum of eight ranks in one level."""
    return per_rank(lambda x: taco_jax.psum(x, "tp", compression=codec), 8, invarying_out=True)


def traced(f, *args):
    with comm_log.record() as table:
        lowered = f.lower(*args)
    return lowered.compile(), table.rows()


def rows_of(f, *args):
    """The rows alone: nothing is compiled."""
    with comm_log.record() as table:
        f.lower(*args)
    return table.rows()


@pytest.mark.parametrize(
    "operation,codecs,shape,dtype",
    [
        *cover(2, **{**GRID, "operation": ("psum", "psum_scatter", "all_gather")}),
        ("all_gather_invarying", ("taco", "int4h"), (8, 2), "bfloat16"),
    ],
)
def test_values_bytes_and_bits(operation, codecs, shape, dtype):
    model, _ = OPERATIONS[operation]
    (codec, between), (ranks, local) = codecs, shape
    exponent = -6 if codec == "taco" else None
    scales = None if exponent is None else SiteScales(exponents=np.array([exponent, 3], np.int32))
    rng = np.random.default_rng(ranks)
    x_P = (rng.normal(size=(ranks, 3, 136)) * np.exp2(rng.integers(-3, 4, (ranks, 3, 1)))).astype(DTYPES[dtype])
    f = build.__wrapped__(operation, ranks, local, codec, between, scales=scales)
    compiled, (row,) = traced(f, x_P)

    inner, outer = REFERENCES[codec], REFERENCES[between or codec]
    expected, inside, outside = model(inner, outer, x_P.astype(np.float32), local, exponent)
    assert collectives(compiled) == sorted((opcode, "uint8", n) for opcode, n in inside + outside)
    assert sorted(row.hlo) == collectives(compiled)
    # What each level sends, and among whom.
    sent = lambda hops, n: sum(size for _, size in hops) * (n - 1) / n
    wanted = [("inside", local, codec, sent(inside, local))]
    wanted += [("between", ranks // local, between or codec, sent(outside, ranks // local))]
    assert [dataclasses.astuple(level) for level in row.levels] == wanted
    assert row.bytes == pytest.approx(wanted[0][3] + wanted[1][3])
    of = lambda group: tuple(map(tuple, group.of(ranks)))
    levels = ((inside, of(topology.inside(local))), (outside, of(topology.between(ranks, local))))
    assert groups(compiled) == sorted((opcode, "uint8", n, g) for hops, g in levels for opcode, n in hops)

    y = f(x_P)
    read = [np.asarray(y)] * ranks if operation in INVARYING else np.asarray(y)
    for rank in range(ranks):
        assert read[rank].shape == expected[rank].shape and read[rank].dtype == x_P.dtype
        near((inner, outer), read[rank], expected[rank].astype(x_P.dtype))
    if operation in INVARYING:
        assert len(set(bits_of_every_device(y))) == 1
    if operation == "all_gather":
        assert all(r.tobytes() == read[0].tobytes() for r in read)


def near(codecs, y, expected):
    """To the bit where nothing is rotated. A rotation sums in another order than the model, so now and then a code is
    its neighbour, and one of these few hundred elements off by as much as that is 42 dB."""
    if all(ref.rotation == "none" for ref in codecs):
        np.testing.assert_array_equal(y, expected)
    else:
        assert snr_db(expected.astype(np.float32), y.astype(np.float32)) > 38


def test_between_hosts_goes_one_share_of_the_message():
    """A flat sum's groups are all ranks; in levels what passes between hosts is 1/local of it, or less."""
    x_P = np.zeros((8, 1 << 18), np.float32)
    assert {g for *_, g in groups(flat("int8h").lower(x_P).compile())} == {(tuple(range(8)),)}
    message = CODECS["int8h"].wire_bytes(1 << 18)
    for local in (2, 4):
        compiled, (row,) = traced(build("psum", 8, local, "int8h"), x_P)
        ranks = 8 // local
        between = [n for _, _, n, group in groups(compiled) if group[0] == tuple(range(0, 8, local))]
        for n in between:  # an exchange gathers the shares of both hosts
            assert n == pytest.approx((2 if ranks == 2 else 1) * message / local, rel=0.05)
        assert row.bytes_of("between") == pytest.approx(2 * (ranks - 1) / ranks * message / local, rel=0.05)
        assert row.bytes_of("inside") == pytest.approx(2 * (local - 1) / local * message, rel=0.05)


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "size,ranks,local",
    [(1, 8, 4), (1000, 6, 2), (8 * 1024 + 3, 8, 4), SLOW(127, 6, 2), SLOW(127, 8, 4), SLOW(1000, 8, 4),
     SLOW(1, 6, 2), SLOW(8 * 1024 + 3, 6, 2)],
)  # fmt: skip
def test_any_size(size, ranks, local):
    x_P = np.random.default_rng(size).normal(size=(ranks, size)).astype(np.float32)
    y = build("psum", ranks, local, "int8h")(x_P)
    assert snr_db(x_P.sum(0, dtype=np.float64), y) > 33 and len(set(bits_of_every_device(y))) == 1


SHAPES = ((8, 4), (8, 2), (4, 2))
FEW = [("e4m3h", 8, 4), ("int4h", 8, 2), ("int8h", 4, 2)]


@pytest.mark.parametrize(
    "codec,ranks,local",
    [*FEW, *(SLOW(c, *s) for c in ("e4m3h", "int8h", "int4h") for s in SHAPES if (c, *s) not in FEW)],
)
def test_what_levels_lose(codec, ranks, local):
    """In units of one hop of the whole sum: what is encoded of the terms, of the hosts' sums, and of the sum.

    Of L ranks L-1 are quantised inside; two-shot quantises (H-1)/H of the hosts' sums, the exchange all; then the sum:
    10 log10((L-1)/L + (H-1)/H + 1) dB, and for two hosts 10 log10((L-1)/L + 2). Codecs whose noise does not depend on
    how large values are: taco without calibration has scales that are powers of two.
    """
    x_P = np.random.default_rng(0).normal(size=(8, 1 << 14)).astype(np.float32)
    one_hop = {"e4m3h": 31.8, "int8h": 43.7, "int4h": 18.6}[codec]
    n = ranks // local
    expected = 10 * np.log10((local - 1) / local + (2 if n == 2 else 1 + (n - 1) / n))
    y = build("psum", ranks, local, codec)(x_P[:ranks])
    loss = one_hop - snr_db(x_P[:ranks].sum(0, dtype=np.float64), y)
    assert loss == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("between,most", [("int4h", 0.2), SLOW("int6h", 0.3)])
def test_a_coarse_codec_between_two_hosts_costs_one_hop(between, most):
    """Both hosts' sums are quantised once, and nothing after that in so few bits."""
    x_P = np.random.default_rng(0).normal(size=(8, 1 << 14)).astype(np.float32)
    one_hop = {"int4h": 18.6, "int6h": 31.5}[between]
    y = build("psum", 8, 4, "int8h", between)(x_P)
    assert one_hop - snr_db(x_P.sum(0, dtype=np.float64), y) == pytest.approx(0, abs=most + 0.3)


@pytest.mark.parametrize("codec, between", [("tah4", None), ("int4h", "tah4")])
def test_blocks_that_choose_their_bits_go_in_levels(codec, between):
    """Three hops of 3 and 4 bits, and a measure in the units of the codec inside hosts."""
    x = np.random.default_rng(0).normal(size=(8, 8, 128)).astype(np.float32)
    y = np.asarray(build("psum", 8, 4, codec, between)(x))
    assert snr_db(x.sum(0), y.reshape(-1, 8, 128)[0]) > 10
    assert in_units_of(CODECS["int4h"], CODECS["tah4"], jnp.full(1, 3.0)) == 3.0


@pytest.mark.parametrize("operation", ["psum", "psum_scatter", "all_gather"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_one_bad_value_is_nan_on_all(operation, bad):
    x_P = np.random.default_rng(0).normal(size=(8, 4, 1024)).astype(np.float32)
    f = build(operation, 8, 4, between="int4h")
    good = np.asarray(f(x_P))
    x_P[5, 1, 300] = bad
    y = np.asarray(f(x_P))
    wrong = np.isnan(y)
    if operation == "psum":
        assert wrong[1, 256:384].all() and wrong.sum() == 128
    elif operation == "all_gather":
        assert wrong[:, 5 * 4 + 1, 256:384].all() and wrong.sum() == 8 * 128
    else:  # columns go to ranks: 300 is column 44 of rank 2's piece of 128
        assert wrong[2, 1].all() and wrong.sum() == 128
    np.testing.assert_array_equal(y[~wrong], good[~wrong])


CHUNKS, RING = {"chunks": 3}, {"exchange": "ring", "chunks": 2}
CASES = [("all_gather", 4, CHUNKS)]
REST = [
    case
    for case in itertools.product(("psum", "psum_scatter", "all_gather"), (2, 4), (CHUNKS, RING))
    if case not in CASES
]


@pytest.mark.parametrize("operation,local,options", [*CASES, *(SLOW(*case) for case in REST)])
def test_chunks_and_a_ring_change_no_bit(operation, local, options):
    x_P = np.random.default_rng(0).normal(size=(8, 8, 456)).astype(jnp.bfloat16)
    # Without a rotation, in which XLA may sum in another order from program to program.
    expected = bits_of_every_device(build(operation, 8, local, "mxfp6", "mxfp8")(x_P))
    f = build(operation, 8, local, "mxfp6", "mxfp8", **options)
    compiled, (row,) = traced(f, x_P)
    assert sorted(row.hlo) == collectives(compiled)
    assert bits_of_every_device(f(x_P)) == expected
    sent = sum(level.bytes for level in row.levels)
    assert row.bytes == pytest.approx(sent)


@pytest.mark.slow  # the same calls under jit and over one axis are above
def test_without_jit_and_over_two_axes():
    x_P = np.random.default_rng(0).normal(size=(8, 500)).astype(np.float32)
    options = {"codec": "mxfp8", "ranks_per_host": 4, **LEVELS}
    f = per_rank(lambda x: spelled_out.psum(x, ("dp", "tp"), **options), 4, dp=2, invarying_out=True)
    expected = build("psum", 8, 4, "mxfp8")(x_P)
    np.testing.assert_array_equal(f(x_P), expected)
    with jax.disable_jit():
        np.testing.assert_array_equal(build("psum", 8, 4, "mxfp8")(x_P), expected)


@pytest.mark.parametrize("ranks,local", [(8, 4), pytest.param(8, 2, marks=pytest.mark.slow)])
def test_noise_of_stochastic_rounding(ranks, local):
    """Equal on all ranks where they hold the same, else its error would grow with P instead of its square root."""
    codec = Codec("int4", 128, "none", "bfloat16", "stochastic")
    x_P = np.tile(np.random.default_rng(0).normal(size=4096).astype(np.float32), (ranks, 1))
    options = {"codec": codec, "ranks_per_host": local, **LEVELS}
    # The seed is the same on all ranks, and data: one program for all of them.
    f = lambda x, seed: spelled_out.psum(x[0], "tp", key=jax.random.key(seed), **options)
    f = jax.jit(jax.shard_map(f, mesh=make_mesh(tp=ranks), in_specs=(P("tp"), P()), out_specs=P()))
    summed = lambda seed: f(x_P, seed)
    y, other = summed(1), summed(2)
    assert len(set(bits_of_every_device(y))) == 1 and (np.asarray(y) != np.asarray(other)).any()
    mean = np.mean([np.asarray(summed(seed)) for seed in range(3, 19)], axis=0)
    # The mean of 16 has a quarter of the error: rounding is unbiased on every hop.
    errors = [np.std(z - ranks * x_P[0]) for z in (np.asarray(y), mean)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)


def test_one_host_and_one_rank_a_host_are_flat():
    x_P = np.zeros((8, 2000), np.float32)
    int8h, int4h = (program(flat(codec).lower(x_P)) for codec in ("int8h", "int4h"))
    assert program(build("psum", 8, 8, "int8h", "int4h").lower(x_P)) == int8h
    assert program(build("psum", 8, 1, "int8h", "int4h").lower(x_P)) == int4h
    assert program(build("psum", 8, 1, "int8h").lower(x_P)) == int8h
    # As nothing says what shares a host, one process is one.
    assert program(build("psum", 8, None, "int8h").lower(x_P)) == int8h


def test_exact_messages_are_those_of_lax():
    x_P = np.zeros((8, 2000), np.float32)
    lax_psum = program(per_rank(lambda x: jax.lax.psum(x, "tp"), 8, invarying_out=True).lower(x_P))
    assert program(build("psum", 8, 4, "none").lower(x_P)) == lax_psum
    assert program(build("psum", 8, 4, "taco", "int4h", min_bytes=8001).lower(x_P)) == lax_psum


def test_auto_goes_in_levels_where_an_axis_spans_hosts(monkeypatch):
    x_P = np.zeros((8, 2000), np.float32)
    f = lambda **kw: rows_of(
        per_rank(lambda x: spelled_out.psum(x, "tp", codec="int8h", **kw), 8, invarying_out=True), x_P
    )
    levels = lambda **kw: [(level.name, level.ranks, level.codec) for level in f(**kw)[0].levels]
    assert levels() == []
    monkeypatch.setattr(topology, "_host", lambda device: device.id // 4)
    assert levels(between_hosts="int4h") == [("inside", 4, "int8h"), ("between", 2, "int4h")]
    assert levels(algorithm="two_shot") == levels(ranks_per_host=8) == []
    monkeypatch.setattr(tuned, "hierarchical_min_bytes", lambda: 8001)
    assert levels() == [] and levels(algorithm="hierarchical") == [("inside", 4, "int8h"), ("between", 2, "int8h")]
    # A mesh of fewer devices than there are may be of any.
    g = per_rank(
        lambda x: taco_jax.psum(x, "tp", compression=Compression("int8h", algorithm="hierarchical")),
        4,
        invarying_out=True,
    )
    assert rows_of(g, x_P[:4])[0].levels == ()


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"ranks_per_host": 3}, ValueError, "psum: ranks_per_host=3: must divide the 8 ranks of axis 'tp': 1, 2, 4, 8"),
        ({"ranks_per_host": 0}, ValueError, "ranks_per_host=0: must be an integer of at least 1, or None"),
        ({"ranks_per_host": 2.0}, TypeError, "ranks_per_host=2.0: is of type float; must be an integer"),
        ({"between_hosts": "int4"}, ValueError, r"between_hosts='int4' is unknown: did you mean 'int4h'\?"),
        ({"between_hosts": "none"}, ValueError, "between_hosts='none': must be a codec that compresses, such as"),
        (
            {"between_hosts": "int4h", "algorithm": "two_shot"},
            ValueError,
            "between_hosts='int4h': algorithm='two_shot' sends everything in one codec; use 'auto' or 'hierarchical'",
        ),
        (
            {"link": "nvlink", "ranks_per_host": 4},
            KernelUnavailableError,
            "link 'nvlink' cannot all_reduce codec 'taco'",
        ),
    ],
)
def test_what_is_refused(options, error, message):
    f = per_rank(lambda x: spelled_out.psum(x, "tp", codec="taco", **(LEVELS | options)), 8, invarying_out=True)
    with pytest.raises(error, match=message):
        f.lower(np.zeros((8, 2000), np.float32))
