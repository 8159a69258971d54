"""Codecs with a scale for each token: any width, in every collective that sends whole tokens."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import spelled_out
from codec_programs import encode, round_trip
from gradients import relative
from hlo import collectives
from reference_codec import Reference, snr_db
from shards import per_rank

import taco_jax
from pallas_kernels import KernelUnavailableError
from taco_jax import CODECS, Codec, Compression
from taco_jax.collectives.transport import chunk_elements, cut
from taco_jax.compression import dispatch

INT8 = CODECS["int8_token"]
SHAPES = ((2, 3, 3584), (5, 768), (3, 5, 7), (129,), (), (1, 1))
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)


def values(shape, dtype=np.float32, seed=0):
    """Tokens of different sizes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    return (x * np.exp(rng.normal(size=x.shape[:-1]))[..., None] if x.ndim else x).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_messages_are_the_references_with_the_last_dim_as_block(shape):
    width = shape[-1] if shape else 1
    reference = Reference("int8", width, "none", "bfloat16")
    xs = [values(shape, dtype) for dtype in DTYPES]
    for x, message, y in zip(xs, encode(INT8, xs), round_trip(INT8, xs)):
        reference.check(np.asarray(message), x)
        assert message.size == INT8.of(shape).wire_bytes(x.size) == reference.wire_bytes(x.size)
        assert y.dtype == x.dtype and y.shape == x.shape
        np.testing.assert_array_equal(y, reference.round_trip(x).astype(x.dtype))


def test_bytes_by_hand():
    # 6 tokens of 3584 codes, then two planes of 6 scale bytes at multiples of 128, all a multiple of 1,024.
    assert INT8.of((2, 3, 3584)).wire_bytes(2 * 3 * 3584) == 1024 * -(-(6 * 3584 + 128 + 6) // 1024)
    assert INT8.of((4096, 3584)).bits == 8 + 16 / 3584
    assert INT8.of((0, 3)).wire_bytes(0) == INT8.of((3, 0)).wire_bytes(0) == 0


@pytest.mark.parametrize("width, snr", [(768, 42.2), (3584, 41.2)])
def test_snr_on_gaussian_tokens(width, snr):
    x = values((200, width))
    assert snr_db(x, round_trip(INT8, x)) == pytest.approx(snr, abs=0.3)


def test_a_large_token_does_not_touch_the_others():
    x = values((4, 768))
    louder = x.copy()
    louder[1] *= 1e4
    y, z = round_trip(INT8, [x, louder])
    np.testing.assert_array_equal(np.delete(y, 1, 0), np.delete(z, 1, 0))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_is_nan_and_no_other(value):
    for shape in ((3, 7), (200, 96)):  # XLA's own maximum drops NaN once it is vectorised
        x = values(shape)
        x[1, 3] = value
        y = np.asarray(round_trip(INT8, x))
        assert np.isnan(y[1]).all() and np.isfinite(np.delete(y, 1, 0)).all()


def test_other_elements_and_scales():
    x = values((40, 96))
    for element, scale, least in (("e4m3", "ue5m3", 30), ("int6", "e8m0", 22), ("int4", "float32", 13)):
        codec = Codec(element, "token", "none", scale)
        assert codec.name == f"{element}-token-none-{scale}" == codec.of(x.shape).name
        assert snr_db(x, round_trip(codec, x)) > least
    with pytest.raises(ValueError, match="tokens of 7 elements of int4 do not fill whole bytes; .* multiple of 2"):
        Codec("int4", "token").of((3, 7))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Codec("int8", "tokens"), "block='tokens': must be a power of two from 8 to 512.*or 'token'"),
        (lambda: Codec("int8", "token", "hadamard"), "block='token' with rotation='hadamard': a token has any size"),
        (lambda: Codec("int8", 128, token=64), "token=64 with block=128: only Codec.of sets it"),
        (lambda: INT8.wire_bytes(10), "codec 'int8_token' has a block for each token: .* codec.of"),
        (lambda: INT8.bits, "has a block for each token"),
        (lambda: INT8.decode(jnp.zeros(1024, jnp.uint8), (3, 512), jnp.float32), r"are uint8\[2048\]"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_no_kernel_takes_it_and_the_reason_is_given():
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
    for codec in ("int8_token", INT8.of((4, 128))):  # a size that others have kernels for, too
        name, reason = dispatch.choose(codec, gpu, "bfloat16")
        assert name == "jnp" and "codec 'int8_token' has one scale a token, whose size may be any" in reason
        with pytest.raises(KernelUnavailableError, match="cannot encode codec 'int8_token' on .*one scale a token"):
            dispatch.choose(codec, gpu, "bfloat16", backend="mosaic")


# Collectives

PERM = ((0, 1), (1, 2), (2, 3))


def test_ppermute_sends_tokens_both_ways():
    x_P = np.stack([values((3, 5, 24), seed=seed) for seed in range(4)])

    def f(x):
        send = lambda x: taco_jax.ppermute(
            x, "tp", PERM, compression=Compression("int8_token", backward="e4m3h", chunks=2)
        )
        y, pull = jax.vjp(send, x)
        return y, pull(x)[0]

    run = per_rank(f, 4)
    y_P, dx_P = run(x_P)
    sent = [round_trip(INT8, x) for x in x_P]
    np.testing.assert_array_equal(y_P, [np.zeros_like(x_P[0]), *sent[:3]])
    assert relative(dx_P[0], x_P[1]) < 0.05 and not np.asarray(dx_P[3]).any()
    # 15 tokens in chunks of 8 and 7; the gradient's three blocks of 128 in two and one.
    bytes_of = lambda codec, n: ("collective-permute", "uint8", codec.wire_bytes(n))
    token, e4m3h = INT8.of((24,)), CODECS["e4m3h"]
    expected = [bytes_of(token, 8 * 24), bytes_of(token, 7 * 24), bytes_of(e4m3h, 256), bytes_of(e4m3h, 104)]
    assert sorted(collectives(run.lower(x_P).compile())) == sorted(expected)


def test_sums_and_gathers_of_whole_tokens():
    x_P = np.stack([values((4, 6, 24), seed=seed) for seed in range(4)])
    total = x_P.sum(0)
    reduced = per_rank(lambda x: taco_jax.psum(x, "tp", compression="int8_token"), 4, invarying_out=True)(x_P)
    assert relative(reduced, total) < 0.02
    scattered = per_rank(lambda x: taco_jax.psum_scatter(x, "tp", compression="int8_token", tiled=True), 4)(x_P)
    assert relative(np.concatenate(scattered), total) < 0.02
    gathered = per_rank(lambda x: taco_jax.all_gather(x, "tp", compression="int8_token", axis=1, tiled=True), 4)(x_P)
    expected = np.concatenate([round_trip(INT8, x) for x in x_P], axis=1)
    for y in gathered:
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    "name, f",
    [
        ("psum_scatter", lambda x, **c: spelled_out.psum_scatter(x, "tp", scatter_dimension=2, tiled=True, **c)),
        ("all_gather", lambda x, **c: spelled_out.all_gather(x, "tp", axis=-1, tiled=True, **c)),
        ("all_to_all", lambda x, **c: spelled_out.all_to_all(x, "tp", 0, 2, tiled=True, **c)),
    ],
)
def test_cutting_tokens_raises(name, f):
    x_P = np.ones((4, 4, 4, 8), np.float32)
    message = f"{name}: codec 'int8_token' has one scale a token, and dim 2, the tokens' own, is cut or joined here"
    with pytest.raises(ValueError, match=message):
        per_rank(lambda x: f(x, codec="int8h", backward="int8_token"), 4)(x_P)
    per_rank(lambda x: f(x, codec="int8h"), 4)(x_P)


def test_chunks_and_shares_are_whole_tokens():
    codec = INT8.of((1 << 12, 3584))
    share = chunk_elements(codec, (1 << 12) * 3584, 4)
    assert share == (1 << 10) * 3584
    pieces = cut(dispatch.Geometry(4 * share, 4, share), 3, codec.block)
    assert all(p.per_message % 3584 == 0 and p.offset % 3584 == 0 for p in pieces) and len(pieces) == 3


@pytest.mark.slow
def test_stochastic_rounding_and_statistics():
    codec = dataclasses.replace(INT8, rounding="stochastic")
    x = values((6, 40))
    ys = np.stack([round_trip(codec, x, None, key) for key in jax.random.split(jax.random.key(0), 50)])
    nearest = np.asarray(round_trip(INT8, x))
    assert np.abs(ys.mean(0) - x).mean() < 0.5 * np.abs(nearest - x).mean()
    sized = INT8.of(x.shape)
    z = sized.to_blocks(jnp.asarray(x).reshape(-1))
    signal, noise, clipped, _, count = np.asarray(sized.measure(z, sized.encode_blocks(z)[0]))
    assert count == x.size and clipped == 0 and 10 * np.log10(signal / noise) == pytest.approx(snr_db(x, nearest))


def test_the_exact_collective_below_min_bytes():
    f = per_rank(
        lambda x: taco_jax.ppermute(x, "tp", PERM, compression=Compression("int8_token", min_bytes=1 << 20)), 4
    )
    x_P = values((4, 3, 24))
    np.testing.assert_array_equal(f(x_P)[1:], x_P[:3])
    assert "u8" not in f.lower(x_P).compile().as_text()
