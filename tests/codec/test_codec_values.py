"""The number format as values: error in dB, site scales, edge values, stochastic rounding, statistics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from codec_programs import PRESETS, encode, round_trip
from codec_programs import gaussian as normal
from reference_codec import ELEMENTS, Reference, snr_db

from taco_jax import CODECS, UNCALIBRATED, Codec

pytestmark = pytest.mark.usefixtures("optimised")

# All messages have one size, so that each codec is compiled once: many blocks, the last one not full.
SIZE = (1 << 15) - 5


def gaussian(seed=0):
    return normal(SIZE, seed)


# Error


SNR = {
    "e4m3": 31.8, "e4m3h": 31.8, "e5m2": 25.8, "int8h": 43.7, "int6h": 31.5, "int5h": 25.2, "int4h": 18.6, "taco": 31.6,
    "taco_paper": 31.7,
}  # fmt: skip


@pytest.mark.parametrize("preset", SNR)
def test_snr_on_gaussian_data(preset):
    x = gaussian()
    assert snr_db(x, round_trip(CODECS[preset], x)) == pytest.approx(SNR[preset], abs=0.3)


def test_the_papers_alpha_cancels():
    """taco_paper's codes are those of one float32 scale on at least 99.99 % of elements."""
    codecs = CODECS["taco_paper"], Codec("e4m3", 256, "hadamard", "float32")
    xs = normal(16 * SIZE).reshape(16, SIZE)
    paper, plain = ([np.asarray(encode(c, x))[:SIZE] for x in xs] for c in codecs)
    same = np.equal(paper, plain)
    assert same.mean() >= 0.9999


def test_site_scale_is_worth_nothing_to_floats_and_2_to_3_5_db_to_integers():
    x = gaussian()
    for element in ("e4m3", "int8", "int6", "int5", "int4"):
        gains = []
        codec = Codec(element, 128, "hadamard", "ue5m3")
        # The gain over a power of two depends on where the data lies between two of them: an octave in five steps.
        for x_scaled in [x * np.float32(2 ** (i / 5)) for i in range(5)]:
            exponent = right_exponent(codec, x_scaled)
            calibrated = snr_db(x_scaled, round_trip(codec, x_scaled, exponent))
            gains.append(calibrated - snr_db(x_scaled, round_trip(codec, x_scaled, UNCALIBRATED)))
            if element == "e4m3":
                assert abs(calibrated - snr_db(x_scaled, round_trip(CODECS["e4m3h"], x_scaled))) < 0.3
        assert abs(np.mean(gains)) < 0.3 if element == "e4m3" else 2 < np.mean(gains) < 3.5, (element, gains)


@pytest.mark.parametrize("scale,bits", [("e5m0", 5), ("e4m0", 4)])
@pytest.mark.slow
def test_short_scales_are_e8m0_within_their_range(scale, bits):
    """And beyond it codes clip, or the smallest scale is taken. A site scale moves the range."""
    x = gaussian()
    full, codec = Codec("e2m2", 32, "none", "e8m0"), Codec("e2m2", 32, "none", scale)
    np.testing.assert_array_equal(round_trip(codec, x), round_trip(full, x))
    most = 2 ** (bits - 1) - 1
    far = np.zeros(SIZE, np.float32)
    far[:128] = np.repeat(np.float32(2.0) ** np.array([-most - 9, -most, most, most + 9]), 32)
    y = np.asarray(round_trip(codec, far))[:128].reshape(4, 32)[:, 0]
    # The scales are 2^-most to 2^most; 7 is the largest value and 1/4 the smallest.
    assert y.tolist() == [0, 2.0**-most, 2.0**most, 7 * 2.0**most]
    for exponent in (-40, 40):
        moved = np.ldexp(x, exponent)
        np.testing.assert_array_equal(
            round_trip(codec, moved, exponent), np.ldexp(np.asarray(round_trip(full, x)), exponent)
        )
        assert np.isclose(np.asarray(round_trip(codec, moved)).max(), 0 if exponent < 0 else 7 * 2.0**most)
    np.testing.assert_array_equal(round_trip(codec, x, UNCALIBRATED), round_trip(codec, x))


def right_exponent(codec, x) -> int:
    """ceil(log2(largest s)), computed without the codec."""
    z = Reference(codec.element, codec.block, codec.rotation, "float32").to_blocks(x)
    return int(np.ceil(np.log2(np.abs(z).max() / ELEMENTS[codec.element][1])))


def token_data(kind, tokens=64, features=512):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(tokens, features))
    if kind == "heavy-tailed":
        x = rng.standard_t(3, size=(tokens, features))
    if kind == "outlier-channel":
        x[:, [3, 77, 200, 411]] *= 60
    if kind == "log-normal":
        x = rng.choice([-1, 1], x.shape) * np.exp(rng.normal(size=x.shape))
    if kind == "log-normal tokens":
        x *= np.exp(rng.normal(0, 1.5, (tokens, 1)))
    return x.astype(np.float32).ravel()[:SIZE]


@pytest.mark.parametrize("kind", ["gaussian", "heavy-tailed", "outlier-channel", "log-normal", "log-normal tokens"])
def test_a_wrong_exponent_costs_little(kind):
    x, codec = token_data(kind), CODECS["taco"]
    right = right_exponent(codec, x)
    best = snr_db(x, round_trip(codec, x, right))
    for off in (-10, -5, 5, 10):
        y = np.asarray(round_trip(codec, x, right + off))
        assert best - snr_db(x, y) < 0.3, off
        assert np.abs(y[: 63 * 512]).reshape(63, 512).max(1).min() > 0, f"a token became zero at {off}"
    # Far off it does cost, so the numbers above say something.
    assert best - snr_db(x, round_trip(codec, x, right - 20)) > 10


def test_scale_bytes_saturate_and_are_never_zero():
    z = np.zeros(SIZE, np.float32)
    z[[0, 128, 256]] = 2.0**60, 1, 2.0**-60
    codec = Codec("e4m3", 128, "none", "ue5m3")
    message = np.asarray(encode(codec, z, 0))[256 * 128 :]
    # Far above the range codes clip at the largest scale, far below the smallest scale is taken.
    assert list(message[:3]) == [254, (0 - 9 + 15) * 8 + 2, 1]  # 1/448 = 2^-9 * 1.143 -> up to 1.25
    y = np.asarray(round_trip(codec, z, 0))
    assert y[0] == 448 * 2.0**16 * 1.75 and y[256] == 0


def test_uncalibrated_writes_the_byte_of_e8m0():
    x = gaussian()
    plain = np.asarray(encode(CODECS["taco"], x))
    np.testing.assert_array_equal(plain, encode(CODECS["taco"], x, UNCALIBRATED))
    np.testing.assert_array_equal(plain, encode(dataclasses.replace(CODECS["taco"], scale="e8m0"), x))
    assert (plain != np.asarray(encode(CODECS["taco"], x, -6))).any()


def test_exponent_is_data_not_program():
    traces = []

    @jax.jit
    def f(x, exponent):
        traces.append(1)
        return CODECS["taco"].encode(x, exponent=exponent)

    x = gaussian()
    for a in (UNCALIBRATED, -3, 5):
        np.testing.assert_array_equal(f(x, jnp.int32(a)), encode(CODECS["taco"], x, a))
    assert len(traces) == 1


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("element", ["e4m3", SLOW("e5m2"), "int8", SLOW("int6"), "int4"])
def test_scale_site_has_one_power_of_two_for_all(element):
    x = normal(4096)  # the more values, the further the largest from the others
    codec = Codec(element, 128, "hadamard", "site")
    assert codec.bits == ELEMENTS[element][0]
    a = right_exponent(codec, x)
    step = 2.0**a
    y = round_trip(codec, x, a)
    assert snr_db(x, y) > {"e4m3": 31, "e5m2": 25, "int8": 34, "int6": 22, "int4": 10}[element]
    z = Reference(element, 128, "hadamard", "float32").to_blocks(np.asarray(y))
    if element.startswith("int"):
        np.testing.assert_allclose(z / step, np.rint(z / step), atol=2e-3)
        clipped = Reference(element, 128, "hadamard", "float32").to_blocks(round_trip(codec, 100 * x, a))
        assert np.abs(clipped).max() == pytest.approx(step * ELEMENTS[element][1], rel=1e-5)
    np.testing.assert_array_equal(y, round_trip(codec, x, UNCALIBRATED))  # the message carries its own scale


# Edge values


EDGE = {**{name: CODECS[name] for name in PRESETS}, "site": Codec("int6", 128, "hadamard", "site")}
SHORT = {"e5m0": Codec("e2m2", 32, "none", "e5m0"), "e4m0": Codec("int4", 8, "hadamard", "e4m0")}


# Other dtypes are converted before anything else is done, so a few codecs stand for all.
NARROW = {"taco": ("bf16", "f16"), "int5h": ("bf16",), "mxfp4": ("f16",)}


@pytest.mark.parametrize("name", EDGE)
def test_edge_values(name):
    codec = EDGE[name]
    x = gaussian(seed=2)[: 1200 if name == "site" else SIZE]
    base = snr_db(x, round_trip(codec, x))
    second_block = np.arange(x.size) // codec.block == 1
    cases = {
        "zero": np.zeros_like(x),
        "zero_block": np.where(second_block, 0, x).astype(np.float32),
        "minus_zero": np.full_like(x, -0.0),
        "subnormal": np.full_like(x, 1e-40),
        "tiny": (x * 1e-30).astype(np.float32),
        "huge": (x * 1e30).astype(np.float32),
    }
    if "bf16" in NARROW.get(name, ()):
        cases["huge_bf16"] = (x * 1e30).astype(ml_dtypes.bfloat16)
    if "f16" in NARROW.get(name, ()):
        cases["subnormal_f16"] = (np.sign(x) * 2.0**-24).astype(np.float16)
    y = {k: np.asarray(round_trip(codec, v)) for k, v in cases.items()}
    for key in ("zero", "minus_zero"):
        assert (y[key] == 0).all(), key
    if codec.rotation == "none" and ELEMENTS[codec.element][2] is not None:
        assert np.signbit(y["minus_zero"]).all()
    assert (y["zero_block"][second_block] == 0).all()
    assert snr_db(cases["zero_block"], y["zero_block"]) > base - 1
    assert (np.abs(y["subnormal"]) < 1e-30).all()  # finite, next to nothing
    assert np.isfinite(y["tiny"]).all()
    if name != "taco_paper":  # its alpha is 0 for 1e30 and its 1e-6 swallows 1e-30
        assert snr_db(x * 1e30, y["huge"]) == pytest.approx(base, abs=3 if name == "site" else 1)
    if "huge_bf16" in y:
        assert np.isfinite(np.float32(y["huge_bf16"])).all()
        assert snr_db(np.float32(cases["huge_bf16"]), np.float32(y["huge_bf16"])) > base - 1
    if "subnormal_f16" in y:  # equal magnitudes: f16's own rounding of the result is the error
        assert snr_db(cases["subnormal_f16"], y["subnormal_f16"]) > 15


@pytest.mark.parametrize("name", [*EDGE, *SHORT, "taco calibrated"])
def test_a_block_that_is_not_finite_becomes_nan_and_no_other(name):
    codec, exponent = (CODECS["taco"], -6) if name == "taco calibrated" else ((EDGE | SHORT)[name], None)
    blocks = codec.n_blocks(SIZE)
    x = gaussian(seed=4)  # a partial last block
    bad = {}
    for i, value in enumerate((np.inf, -np.inf, np.nan, np.nan)):
        x_bad = x.copy()
        position = (i + 2) * codec.block + 3
        x_bad[position if i < 3 else -1] = value
        bad[i] = x_bad
    y_good = np.asarray(round_trip(codec, x, exponent))
    for i, x_bad in bad.items():
        y = np.asarray(round_trip(codec, x_bad, exponent))
        block = np.arange(x.size) // codec.block == (i + 2 if i < 3 else blocks - 1)
        assert np.isnan(y[block]).all(), "part of the block is a number"
        if codec.scale == "site":  # its one scale looks at all blocks that are finite
            assert np.isfinite(y[~block]).all()
        else:
            np.testing.assert_array_equal(np.asarray(y)[~block], y_good[~block])


def test_inf_in_bfloat16_and_float16():
    for dtype in (ml_dtypes.bfloat16, np.float16):
        x = np.ones(SIZE, dtype)
        x[130] = np.inf
        y = np.float32(round_trip(CODECS["taco"], x))
        assert np.isnan(y[128:256]).all() and np.isfinite(np.delete(y, np.s_[128:256])).all()


LARGE = ["taco", "e4m3", "int8h", "int4h", "mxfp4", "taco_paper"]


# One operation after the other takes its time: once in the fast tests.
FAST = [(64, "taco", True), (64, "taco_paper", True), (1000, "taco", True), (64, "taco", False)]
ALL = [(blocks, name, jit) for blocks in (1, 64, 1000) for name in LARGE for jit in (True, False)]


@pytest.mark.parametrize("blocks, name, jit", [*FAST, *(SLOW(*case) for case in ALL if case not in FAST)])
def test_a_nan_is_never_lost_in_a_large_message(name, blocks, jit):
    # XLA's maximum over an axis drops NaN on CPUs once it is vectorised: from about 64 blocks on.
    codec = CODECS[name]
    x = np.random.default_rng(0).standard_normal(blocks * codec.block).astype(np.float32)
    positions = [0, x.size // 2 + 5, x.size - 1]
    x[positions] = np.nan
    wrap = jax.jit if jit else lambda f: f

    @wrap
    def run(x):
        z = codec.to_blocks(x)
        message, largest = codec.encode_blocks(z)
        return codec.from_blocks(codec.decode_blocks(message, blocks), x.size, x.dtype), largest

    y, largest = map(np.asarray, run(jnp.asarray(x)))
    hit = np.isin(np.arange(x.size) // codec.block, np.array(positions) // codec.block)
    assert (np.isnan(y) == hit).all()
    assert np.isnan(largest)


# Stochastic rounding


@pytest.mark.parametrize("element", ["e4m3", "e2m3", "int6", "int4"])
def test_stochastic_rounding_has_no_bias(element):
    codec = Codec(element, 32, "none", "float32", "stochastic")
    x, repeats = normal(32, seed=5), 4000
    keys = jax.random.split(jax.random.key(0), repeats)
    y = np.asarray(
        jax.jit(jax.vmap(lambda k: codec.decode(codec.encode(x, key=k), x.shape, x.dtype)))(keys), np.float64
    )
    deviation = y.std(0) / np.sqrt(repeats)
    # Every value is read back as one of its two neighbours, whose mean it is; 5 deviations, and f32's own rounding.
    assert max(len(np.unique(column)) for column in y.T) == 2
    assert (np.abs(y.mean(0) - x) < 5 * deviation + 1e-5 * np.abs(x).max()).all()
    nearest = Reference(element, 32, "none", "float32").round_trip(x)
    assert (np.abs(nearest - x) > 5 * deviation + 1e-5).any()  # nearest rounding would not pass


def test_stochastic_rounding_follows_its_key():
    codec = dataclasses.replace(CODECS["int4h"], rounding="stochastic")
    x = normal(1000)
    run = jax.jit(lambda key: codec.encode(x, key=key))
    a, b, c = (np.asarray(run(jax.random.key(k))) for k in (1, 1, 2))
    assert (a == b).all() and (a != c).any()
    with pytest.raises(ValueError, match="needs key="):
        codec.encode(x)


# Statistics


def test_measure_counts_what_a_message_did():
    codec = Codec("e4m3", 128, "none", "ue5m3")
    z = normal(8 * 128).reshape(8, 128)
    z[[1, 4]] *= 2.0**-40  # flushed: the site's smallest scale is far above
    z[2] *= 2.0**40  # clipped: its largest is far below
    z[3, 5] = 0  # neither

    @jax.jit
    def run(z):
        wires, largest = codec.encode_blocks(z, exponent=-7)
        return codec.measure(z, wires, exponent=-7), codec.decode_blocks(wires, 8, exponent=-7), largest

    (signal, noise, clipped, flushed, count), y, largest = (np.asarray(a, np.float64) for a in run(z))
    assert float(largest) == pytest.approx(np.abs(z).max() / 448, rel=1e-6)
    assert count == z.size
    assert signal == pytest.approx((z.astype(np.float64) ** 2).sum(), rel=1e-5)
    assert noise == pytest.approx(((z - y) ** 2).sum(), rel=1e-5)
    assert flushed == 2 * 128
    assert clipped == (np.abs(z[2]) > 448 * 2.0 ** (-7 + 16) * 1.75).sum() > 100
