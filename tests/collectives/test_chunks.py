"""Chunks and the ring: the same values as one all_to_all, and what compiled programs then send."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spelled_out
from hlo import collectives, counts
from reference_codec import snr_db
from shards import bits_of_every_device, per_rank

import taco_jax
from pallas_kernels import Geometry
from taco_jax import CODECS, Codec, Compression
from taco_jax.collectives import comm_log
from taco_jax.collectives.transport import ROW_ELEMENTS, TILE_ELEMENTS, chunk_elements, cut

OPERATIONS = {
    "two_shot": lambda x, **kw: spelled_out.psum(x, "tp", algorithm="two_shot", **kw),
    "one_shot": lambda x, **kw: spelled_out.psum(x, "tp", algorithm="one_shot", **kw),
    "psum_scatter": lambda x, **kw: spelled_out.psum_scatter(x, "tp", tiled=True, **kw),
    "all_gather": lambda x, **kw: spelled_out.all_gather(x, "tp", tiled=True, **kw),
    "all_to_all": lambda x, **kw: spelled_out.all_to_all(x, "tp", 0, 1, tiled=True, **kw),
    "ppermute": lambda x, **kw: spelled_out.ppermute(x, "tp", [(0, 1), (1, 2)], **kw),
}
SHOTS = ("two_shot", "one_shot")


@pytest.mark.parametrize("codec", ["taco", "int5h", "mxfp4"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_share_is_whole_blocks_and_in_large_messages_whole_tiles(codec, ranks):
    codec = CODECS[codec]
    for size in (1, 127, 128, 129, 8191, 8193, 1 << 20, (1 << 20) + 8):
        n = chunk_elements(codec, size, ranks)
        assert n % codec.block == 0 and 0 <= n * ranks - size
        least = codec.block * -(-codec.n_blocks(size) // ranks)
        assert n == least or (n % ROW_ELEMENTS == 0 and codec.wire_bytes(n) <= 1.01 * codec.wire_bytes(least))
    for size in (1 << 26, (1 << 26) + 8, 100_000_001):
        n = chunk_elements(codec, size, ranks)
        least = codec.block * -(-codec.n_blocks(size) // ranks)
        assert n % TILE_ELEMENTS == 0 and codec.wire_bytes(least) <= codec.wire_bytes(n) <= 1.001 * codec.wire_bytes(
            least
        )


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("n", [1, 128, 1000, 4 * TILE_ELEMENTS, 5 * TILE_ELEMENTS, 100 * TILE_ELEMENTS])
def test_chunks_cover_every_share_once(n, chunks):
    share = Geometry(4 * n - n // 2, 4, n)
    pieces = cut(share, chunks, 128)
    assert 1 <= len(pieces) <= chunks
    assert sum(g.per_message for g in pieces) == n
    start = 0
    for piece in pieces:
        assert (piece.offset, piece.distance, piece.elements, piece.messages) == (start, n, share.elements, 4)
        start += piece.per_message
    assert all(g.per_message % (TILE_ELEMENTS if n >= chunks * TILE_ELEMENTS else 128) == 0 for g in pieces[:-1])
    if chunks == 1:
        assert pieces == [share]


@functools.cache
def build(name, ranks, **options):
    # Without a rotation, in which XLA may sum in another order from program to program.
    options = {"codec": "mxfp6", **options}
    return per_rank(lambda x: OPERATIONS[name](x, **options), ranks, invarying_out=name in SHOTS)


def draw(ranks, dtype=np.float32):
    """One shape, so that the programs without chunks are shared."""
    return np.random.default_rng(0).normal(size=(ranks, 24, 150)).astype(dtype)


def sent(program, x_P):
    with comm_log.record() as table:
        compiled = program.lower(x_P).compile()
    (row,) = table.rows()
    assert sorted(row.hlo) == collectives(compiled)  # the site table says what the program does
    return row, counts(compiled)


@functools.cache
def in_one_piece(name, ranks, dtype):
    """(row, counts, bits of every device) of a message that is sent as it is."""
    program, x_P = build(name, ranks), draw(ranks, dtype)
    return *sent(program, x_P), bits_of_every_device(program(x_P))


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
# 4 chunks of a share of one_shot's 29 blocks have 8, 8, 8 and 5, and so have others.
CHANGED = [
    ("two_shot", np.float32, 2), ("one_shot", jnp.bfloat16, 4), ("psum_scatter", np.float32, 4),
    ("all_gather", jnp.bfloat16, 2), ("all_to_all", np.float32, 2), ("ppermute", jnp.bfloat16, 4),
]  # fmt: skip
OTHERS = [
    case for case in itertools.product(OPERATIONS, (np.float32, jnp.bfloat16), (2, 4)) if case not in CHANGED
]  # fmt: skip


@pytest.mark.parametrize("name,dtype,chunks", [*CHANGED, *(SLOW(*case) for case in OTHERS)])
def test_chunks_change_no_bit(name, dtype, chunks):
    x_P = draw(4, dtype)
    row, _, expected = in_one_piece(name, 4, dtype)
    program = build(name, 4, chunks=chunks)
    chunked, number = sent(program, x_P)
    assert bits_of_every_device(program(x_P)) == expected
    assert set(number.values()) == {chunks}
    assert row.bytes <= chunked.bytes <= row.bytes + chunks * len(number) * 1024 * 4


RINGS = [("two_shot", 4, 2), ("two_shot", 3, 1), ("psum_scatter", 4, 1), ("all_to_all", 4, 1)]
OTHER_RINGS = [
    case
    for case in itertools.product(("two_shot", "psum_scatter", "all_to_all"), (2, 3, 4, 8), (1, 2))
    if case not in RINGS
]


@pytest.mark.parametrize("name,ranks,chunks", [*RINGS, *(SLOW(*case) for case in OTHER_RINGS)])
def test_a_ring_changes_no_bit_and_no_byte(name, ranks, chunks):
    x_P = draw(ranks)
    row, number, expected = in_one_piece(name, ranks, np.float32)
    assert number["all-to-all"] == 1
    program = build(name, ranks, exchange="ring", chunks=chunks)
    ring, number = sent(program, x_P)
    assert bits_of_every_device(program(x_P)) == expected
    assert number["collective-permute"] == (ranks - 1) * chunks and "all-to-all" not in number
    if chunks == 1:
        assert ring.bytes == pytest.approx(row.bytes)
        assert {dtype for _, dtype, _ in ring.hlo} == {"uint8"}


@pytest.mark.parametrize(
    "name,options",
    [
        ("two_shot", {"chunks": 2, "exchange": "ring"}),
        SLOW("psum_scatter", {"chunks": 3}),
        *(SLOW("two_shot", o) for o in ({"chunks": 3}, {"exchange": "ring"})),
        *(SLOW("psum_scatter", o) for o in ({"exchange": "ring"}, {"chunks": 2, "exchange": "ring"})),
    ],
)
def test_rotated_values_agree_to_rounding(name, options):
    x_P = draw(4)
    expected = np.asarray(build(name, 4, codec="taco")(x_P))
    assert snr_db(expected, np.asarray(build(name, 4, codec="taco", **options)(x_P))) > 55


def test_large_messages_have_shares_of_whole_tiles():
    size = 4 * 64 * TILE_ELEMENTS - 1000  # blocks alone would give a share that no tile divides
    n = chunk_elements(CODECS["taco"], size, 4)
    assert n == 64 * TILE_ELEMENTS
    x_P = np.random.default_rng(0).normal(size=(4, size)).astype(np.float32)
    program = per_rank(
        lambda x: taco_jax.psum(x, "tp", compression=Compression("taco", chunks=2)), 4, invarying_out=True
    )
    row, _ = sent(program, x_P)
    wire = 4 * CODECS["taco"].wire_bytes(n // 2)
    assert sorted(row.hlo) == sorted([("all-to-all", "uint8", wire), ("all-gather", "uint8", wire)] * 2)
    error = np.asarray(program(x_P)) - x_P.sum(0)
    assert np.linalg.norm(error) < 0.05 * np.linalg.norm(x_P.sum(0))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_one_bad_value_stays_in_its_block(bad):
    x_P = np.random.default_rng(0).normal(size=(4, 4096)).astype(np.float32)
    x_P[2, 700] = bad
    y = np.asarray(build("two_shot", 4, codec="taco", chunks=4, exchange="ring")(x_P))
    assert not np.isfinite(y[640:768]).any() and np.isfinite(np.delete(y, range(640, 768))).all()


@pytest.mark.slow
def test_measures_of_chunks_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    x_P = (rng.normal(size=(4, 4096)) * np.exp2(rng.integers(-3, 4, (4, 1)))).astype(np.float32)
    slots = np.zeros((4, 2, 6), np.float32)

    def measured(**options):
        def local(x, slot):
            loss = lambda slot, x: jnp.sum(
                spelled_out.psum(x, "tp", codec="taco", scales=taco_jax.SiteScales(None, slot), **options)
            )
            return jax.grad(loss)(slot, x)

        return np.asarray(per_rank(local, 4)(x_P, slots))

    np.testing.assert_allclose(measured(chunks=3, exchange="ring"), measured(), rtol=1e-5)


def test_gradients_go_in_chunks_too():
    x_P = np.random.default_rng(0).normal(size=(4, 4000)).astype(np.float32)
    options = {"codec": "int8h", "chunks": 2, "exchange": "ring"}

    def local(x):
        return jax.grad(lambda x: jnp.sum(spelled_out.all_gather(x, "tp", tiled=True, **options) ** 2) / 2)(x)

    program = per_rank(local, 4)
    np.testing.assert_allclose(program(x_P), 4 * x_P, atol=0.3)
    number = counts(program.lower(x_P).compile())
    assert number == {"all-gather": 2, "collective-permute": 2 * 3}  # backward: psum_scatter


def test_chunks_round_with_noise_of_their_own():
    codec = Codec("int4", 128, "none", "bfloat16", "stochastic")
    x_P = np.tile(np.random.default_rng(0).normal(size=512).astype(np.float32), (2, 4))
    f = lambda x: taco_jax.psum(
        x, "tp", compression=Compression(codec, algorithm="one_shot", chunks=4), key=jax.random.key(0)
    )
    y = np.asarray(per_rank(f, 2, invarying_out=True)(x_P)).reshape(4, 512)
    assert all((a != b).any() for i, a in enumerate(y) for b in y[:i])


def test_a_layer_passes_them_on():
    x_P = np.random.default_rng(0).normal(size=(4, 4096)).astype(np.float32)
    compression = taco_jax.Compression("int8h", min_bytes=0, chunks=2, exchange="ring")
    f = per_rank(lambda x: taco_jax.tensor_parallel.reduce_from_tp(x, "tp", compression), 4, invarying_out=True)
    assert counts(f.lower(x_P).compile()) == {"all-gather": 2, "collective-permute": 6}
    assert dataclasses.replace(compression, chunks=None, exchange="auto").chunks is None
