"""tah4: tiles of 3 or 4 bits whose largest element is sent by itself, against a numpy reading of its description."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import spelled_out
from codec_programs import encode_decode, gaussian, round_trip
from gradients import relative
from hlo import collectives
from reference_codec import Reference, snr_db
from shards import per_rank

import taco_jax
from pallas_kernels import KernelUnavailableError
from taco_jax import CODECS, Codec
from taco_jax.compression import dispatch

TAH4 = CODECS["tah4"]
INT3H = dataclasses.replace(CODECS["int4h"], element="int3")
SIZES = (1, 7, 127, 128, 129, 640, 8193)
FEW = {np.float32: (1, 8193), ml_dtypes.bfloat16: (127, 640), np.float16: (129,)}
SIZE = 1 << 17  # of all messages that need no other: each codec is compiled once
SLOW = pytest.mark.slow


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def lengths(n: int, block: int = 128) -> tuple[int, int]:
    """(tiles, those of 4 bits) of n elements."""
    tiles = -(-n // block)
    return tiles, -(-4 * tiles // 5)


def wire_bytes(n: int, block: int = 128) -> int:
    tiles, high = lengths(n, block)
    end = 0
    for section in (high * block // 2, (tiles - high) * block * 3 // 8, *[tiles] * 5):
        end = up(end + section, 128) if section else end
    return up(end, 1024)


def read(message: np.ndarray, n: int, block: int = 128):
    """(x, which tiles have 4 bits, scales, places and values of the largest) as the description says it."""
    tiles, high = lengths(n, block)
    packed = [Reference("int4", block, "hadamard", "bfloat16"), Reference("int3", block, "hadamard", "bfloat16")]
    start, codes = 0, []
    for reference, count in zip(packed, (high, tiles - high)):
        size = count * block * reference.bits // 8
        codes.append(reference.values(reference.unpack(message[start : start + size], count)) if count else None)
        start = up(start + size, 128)
    planes = []
    for _ in range(5):
        planes.append(message[start : start + tiles].astype(np.uint32))
        start = up(start + tiles, 128)
    d, v = planes[0], (planes[1] | planes[2] << 8) << 16
    word = planes[3] | planes[4] << 8
    has_high, s = word < 0x8000, ((word & 0x7FFF) << 16).view(np.float32)
    assert has_high.sum() == high
    q = np.zeros((tiles, block), np.float32)
    q[has_high] = codes[0]
    if tiles > high:
        q[~has_high] = codes[1]
    x = (q * s[:, None]).astype(np.float64) @ packed[0].matrix().T / np.sqrt(block)
    x[np.arange(tiles), d] = v.view(np.float32)
    return x.ravel()[:n], has_high, s, d, v.view(np.float32)


def outliers(tokens=SIZE // 1024, width=1024, seed=3):
    """Tokens with a few channels that are large in all of them, as activations have."""
    x = np.random.default_rng(seed).normal(size=(tokens, width))
    x[:, [c for c in (3, 77, 500, 811) if c < width]] *= 60
    return x.astype(np.float32)


# Layout


@pytest.mark.parametrize("dtype,sizes", [*FEW.items(), *(pytest.param(d, SIZES, marks=SLOW) for d in FEW)])
def test_messages_are_what_the_description_says(dtype, sizes):
    xs = [gaussian(n, seed=n).astype(dtype) for n in sizes]
    for x, message, y in zip(xs, *encode_decode(TAH4, xs)):
        message = np.asarray(message)
        assert message.size == TAH4.wire_bytes(x.size) == wire_bytes(x.size)
        expected, has_high, s, d, v = read(message, x.size)
        assert y.dtype == x.dtype
        np.testing.assert_allclose(np.float64(y), expected, rtol=float(jnp.finfo(dtype).eps), atol=1e-5)
        # The largest of each tile, by itself; its bits for those with the largest rest; scales that clip nothing.
        tiles = np.zeros((len(s), 128))
        tiles.ravel()[: x.size] = x
        np.testing.assert_array_equal(np.abs(tiles).argmax(1), d)
        np.testing.assert_array_equal(tiles.astype(ml_dtypes.bfloat16)[np.arange(len(d)), d], v)
        tiles[np.arange(len(d)), d] = 0
        rest = np.abs(tiles @ Reference("int4", 128, "hadamard", "bfloat16").matrix() / np.sqrt(128)).max(1)
        assert rest[has_high].min() >= rest[~has_high].max(initial=0) * (1 - 1e-5)
        step = rest / np.where(has_high, 7, 3)
        assert (s >= step * (1 - 1e-6)).all() and (s <= step * (1 + 2**-7) + 2**-90).all()


def test_bytes_by_hand():
    # 1,024 tiles: 820 of 64 bytes, 204 of 48, five planes of 1,024.
    assert TAH4.wire_bytes(128 * 1024) == up(820 * 64 + up(204 * 48, 128) + 5 * 1024, 1024) == 67584
    assert TAH4.wire_bytes(0) == 0 and TAH4.wire_bytes(1) == 1024
    for n in (*range(1, 3000, 117), 1 << 20, (1 << 20) + 1):
        for block in (32, 64, 256):
            assert dataclasses.replace(TAH4, block=block).wire_bytes(n) == wire_bytes(n, block)
    assert dataclasses.replace(TAH4, block=64).bits == 3.8 + 0.625  # the paper's 4.41 and a bit a tile


@pytest.mark.parametrize(
    "block, rotation",
    [(32, "signed_hadamard"), (256, "none"), *(pytest.param(b, "hadamard", marks=SLOW) for b in (8, 64))],
)
def test_other_tiles_and_rotations(block, rotation):
    codec = dataclasses.replace(TAH4, block=block, rotation=rotation)
    x = gaussian(5000, seed=1)
    assert snr_db(x, round_trip(codec, x)) > 14.5


# Error


def test_snr_beside_whole_tiles_of_three_and_four_bits():
    """On Gaussian data between the two; where a few channels are large, far above both, at the bytes of int4h."""
    bits = {name: codec.bits for name, codec in (("int3h", INT3H), ("tah4", TAH4), ("int4h", CODECS["int4h"]))}
    assert bits == {"int3h": 3.125, "tah4": 4.1125, "int4h": 4.125}
    found = {}
    for kind, x in (("gaussian", gaussian(SIZE)), ("outliers", outliers().ravel())):
        found[kind] = [snr_db(x, round_trip(codec, x)) for codec in (INT3H, TAH4, CODECS["int4h"])]
    assert found["gaussian"] == pytest.approx([11.3, 16.8, 18.6], abs=0.3)
    three, ours, four = found["outliers"]
    assert ours > four + 3.5 and ours > three + 10


def test_the_choice_of_tiles_is_worth_more_than_chance():
    """Tiles of different sizes: 4 bits where they take most off the error, as much as any choice of as many tiles."""
    tiles = SIZE // 128
    x = gaussian(SIZE).reshape(tiles, 128) * np.exp(np.random.default_rng(5).normal(size=(tiles, 1))).astype("f4")
    errors = {}
    for codec in (CODECS["int4h"], INT3H):
        y = np.asarray(round_trip(codec, x.ravel())).reshape(x.shape)
        errors[codec.element] = ((x - y) ** 2).sum(1)
    gain = np.sort(errors["int3"] - errors["int4"])[::-1]
    high = lengths(SIZE)[1]
    best = errors["int3"].sum() - gain[:high].sum()
    chance = errors["int3"].sum() - high * gain.mean()
    ours = ((x.ravel() - np.asarray(round_trip(TAH4, x.ravel()))) ** 2).sum()
    assert ours < 1.05 * best and ours < 0.7 * chance


# Edge values


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tiles", [1, 6, 700])
def test_a_tile_that_is_not_finite_is_nan_and_no_other(value, tiles):
    x = gaussian(tiles * 128 - 5, seed=tiles)
    x[(tiles // 2) * 128 + 17] = value
    y, largest = (np.asarray(a) for a in _with_largest(x))
    hit = np.arange(x.size) // 128 == tiles // 2
    assert np.isnan(y[hit]).all() and np.isfinite(y[~hit]).all() and np.isnan(largest)
    if tiles > 1:
        assert snr_db(x[~hit], y[~hit]) > 14


@jax.jit
def _with_largest(x):
    message, largest = TAH4.encode_blocks(TAH4.to_blocks(x))
    return TAH4.from_blocks(TAH4.decode_blocks(message, TAH4.n_blocks(x.size)), x.size, x.dtype), largest


def test_zeros_and_extremes():
    x = gaussian(SIZE, seed=2)
    most = np.finfo(np.float32).max * np.eye(1, SIZE, 7)[0]
    cases = {"zero": 0 * x, "one": 3 * np.eye(1, SIZE, 5)[0], "tiny": 1e-30 * x, "huge": 1e30 * x, "most": most}
    cases = {key: value.astype(np.float32) for key, value in cases.items()}
    y = {key: np.asarray(round_trip(TAH4, value)) for key, value in cases.items()}
    np.testing.assert_array_equal(y["zero"], 0)
    np.testing.assert_array_equal(y["one"], cases["one"])  # the largest is exact, and there is nothing else
    assert np.isfinite(y["most"]).all() and y["most"][7] > 3.3e38
    base = snr_db(x, round_trip(TAH4, x))
    assert np.isfinite(y["tiny"]).all() and snr_db(cases["huge"], y["huge"]) == pytest.approx(base, abs=0.1)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"block": 512}, "block=512 with element='int3_4': must be at most 256"),
        ({"scale": "e8m0"}, "scale='e8m0' with element='int3_4': must be 'bfloat16'"),
        ({"block": "token", "rotation": "none"}, "block='token' with element='int3_4'"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TAH4, **fields)


def test_no_kernel_takes_it_and_the_reason_is_given():
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
    for codec, reason in (("tah4", "chooses between 4 and 3 bits tile by tile"), (INT3H, "int3 has no kernel")):
        name, given = dispatch.choose(codec, gpu, "bfloat16")
        assert name == "jnp" and reason in given
        with pytest.raises(KernelUnavailableError, match=reason):
            dispatch.choose(codec, gpu, "bfloat16", backend="triton")


# Collectives


@pytest.mark.parametrize("options", [{"algorithm": "one_shot"}, pytest.param({"chunks": 2}, marks=SLOW)])
def test_sums_are_those_of_what_was_sent(options):
    """What ranks rotate differs by their largest elements: sums are taken of tiles as they are.

    A sum of two hops in one piece is in test_error_feedback.py.
    """
    x_P = np.stack([outliers(3, 250, seed) for seed in range(4)])
    y = per_rank(lambda x: spelled_out.psum(x, "tp", codec="tah4", **options), 4, invarying_out=True)(x_P)
    assert relative(y, x_P.sum(0)) < 0.1
    if options.get("algorithm") == "one_shot":
        sent = np.stack([round_trip(TAH4, x) for x in x_P]).sum(0)
        np.testing.assert_allclose(y, sent, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_ppermute_moves_its_bytes():
    x_P = np.stack([outliers(3, 250, seed).astype(ml_dtypes.bfloat16) for seed in range(4)])
    f = per_rank(lambda x: taco_jax.ppermute(x, "tp", [(0, 1), (1, 2), (2, 3)], compression="tah4"), 4)
    np.testing.assert_array_equal(f(x_P)[1:], [round_trip(TAH4, x) for x in x_P[:3]])
    assert collectives(f.lower(x_P).compile()) == [("collective-permute", "uint8", wire_bytes(750))]


@pytest.mark.slow
def test_stochastic_rounding_and_statistics():
    codec = dataclasses.replace(TAH4, rounding="stochastic")
    x = gaussian(1000)
    ys = np.stack([round_trip(codec, x, None, key) for key in jax.random.split(jax.random.key(0), 50)])

    @jax.jit
    def measure(x):
        z = TAH4.to_blocks(x)
        message = TAH4.encode_blocks(z)[0]
        return TAH4.decode_blocks(message, len(z)).reshape(-1)[: x.size], TAH4.measure(z, message)

    nearest, (signal, noise, clipped, _, count) = map(np.asarray, measure(x))
    assert np.abs(ys.mean(0) - x).mean() < 0.5 * np.abs(nearest - x).mean()
    assert clipped == 0 and count == 1024
    assert Codec("int3_4", 128, "hadamard").name == "tah4"
    assert 10 * np.log10(signal / noise) == pytest.approx(snr_db(x, nearest), abs=0.4)  # the padding has noise too
