"""The number format as bytes: messages against the numpy reference and OCP decoders, shapes, bad input."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from codec_programs import PRESETS, encode_decode, gaussian
from covers import cover
from reference_codec import ELEMENTS, REFERENCES, Reference, exact_values, snr_db

from taco_jax import CODECS, Codec
from taco_jax.codec import as_codec

SIZES = (1, 7, 127, 128, 129, 8191, 8193)
FEW = (7, 129, 8193)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def values_for(preset, rng, size, dtype):
    """Data on which the reference and the codec must write the same bytes."""
    reference = REFERENCES[preset]
    if reference.scale == "paper":  # the mean of the squares has to be exact as well
        return exact_values(rng, (size,), dtype, limit=20)
    if reference.rotation != "none":
        return exact_values(rng, (size,), dtype)
    spread = np.exp2(rng.uniform(-6, 6, -(-size // 32))).repeat(32)[:size]
    return (rng.normal(size=size) * spread).astype(dtype)


def check_messages(preset, sizes, dtypes, exponent=None):
    rng = np.random.default_rng(1)
    codec, reference = CODECS[preset], REFERENCES[preset]
    xs = [values_for(preset, rng, n, dtype) for n, dtype in zip(sizes, dtypes)]
    for x, message, y in zip(xs, *encode_decode(codec, xs, exponent)):
        reference.check(message, x, exponent)
        expected = reference.round_trip(x, exponent).astype(x.dtype)
        # A rotation back sums in another order than the reference.
        unit = {"float32": 2**-20, "bfloat16": 2**-7, "float16": 2**-9}[str(x.dtype)]
        unit = 0 if reference.rotation == "none" else unit
        assert y.dtype == x.dtype and y.shape == x.shape
        scale = np.abs(expected.astype(np.float32)).max()
        np.testing.assert_allclose(np.float32(y), np.float32(expected), rtol=unit, atol=unit * scale)


# Layout and bytes


@pytest.mark.parametrize("preset", PRESETS)
def test_message_is_the_reference_byte_for_byte(preset):
    # One block or two, and many; sizes and dtypes go round from preset to preset.
    i = PRESETS.index(preset)
    dtypes = [*DTYPES.values()] * 2
    check_messages(preset, (SIZES[i % 5], SIZES[5 + i % 2]), dtypes[i % 3 :])


@pytest.mark.parametrize("exponent", [-9, 0, 3])
def test_calibrated_message_is_the_reference_byte_for_byte(exponent):
    check_messages("taco", FEW, DTYPES.values(), exponent)


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [None, -30, -4, 0, 9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_message_is_the_reference_byte_for_byte(preset, dtype, exponent):
    check_messages(preset, SIZES, [DTYPES[dtype]] * len(SIZES), exponent)


FIELDS = {
    "element": tuple(ELEMENTS),
    "block": (8, 16, 64, 256, 512),  # presets have 32 and 128
    "rotation": ("none", "hadamard", "signed_hadamard"),
    "scale": ("float32", "bfloat16", "e8m0", "e5m0", "e4m0", "ue5m3"),
}


def fields_of_every_width() -> list[tuple]:
    """Every two of width, block, rotation and scale meet; elements of one width take turns."""
    by_width = {}
    for name, (bits, *_) in ELEMENTS.items():
        by_width.setdefault(bits, []).append(name)
    turns = {bits: itertools.cycle(names) for bits, names in by_width.items()}
    widths = {**FIELDS, "element": tuple(by_width)}
    return [(next(turns[bits]), *rest) for bits, *rest in cover(2, **widths)]


def test_every_element_has_its_turn():
    assert {element for element, *_ in fields_of_every_width()} == set(ELEMENTS)


@pytest.mark.parametrize("element,block,rotation,scale", fields_of_every_width())
def test_any_fields_write_the_reference_bytes(element, block, rotation, scale):
    check_fields(element, block, rotation, scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    "element,block,rotation,scale", list(itertools.product(*(FIELDS | {"block": (8, 32, 512)}).values()))
)
def test_all_fields_write_the_reference_bytes(element, block, rotation, scale):
    check_fields(element, block, rotation, scale)


def check_fields(element, block, rotation, scale):
    codec, reference = Codec(element, block, rotation, scale), Reference(element, block, rotation, scale)
    x = exact_values(np.random.default_rng(3), (1100,), np.float32)
    message = np.asarray(jax.jit(codec.encode)(x, exponent=-4))
    reference.check(message, x, -4)
    assert message.size == codec.wire_bytes(x.size) == reference.wire_bytes(x.size)


@pytest.mark.parametrize("preset", PRESETS)
def test_wire_bytes_is_the_length_of_the_layout(preset):
    for n in (*range(1, 1200, 13), *SIZES, 10**6, 10**6 + 1):
        assert CODECS[preset].wire_bytes(n) == REFERENCES[preset].wire_bytes(n), n
    assert CODECS[preset].wire_bytes(0) == 0


def test_wire_bytes_by_hand():
    assert CODECS["taco"].wire_bytes(1) == 1024  # 128 codes, 1 scale at 128
    assert CODECS["taco"].wire_bytes(128 * 127) == 128 * 127 + 128  # 127 scales fill up to the next 1,024
    assert CODECS["taco"].wire_bytes(128 * 128) == 128 * 128 + 1024  # 128 scales: 16,512 -> 17,408
    # 65 blocks of 64 bytes: codes to 4,160; planes at 4,224 and 4,352, to 4,417.
    assert CODECS["int4h"].wire_bytes(8193) == 5120
    # 257 blocks of 24 bytes: codes to 6,168; plane at 6,272, to 6,529.
    assert CODECS["mxfp6"].wire_bytes(8193) == 7168
    assert CODECS["none"].wire_bytes(1000) == 2000
    # 513 blocks of 16 bytes: codes to 8,208, scales at 8,320; 520 scales of 5 bits (8 in 5 bytes) to 8,645, 514 of 4 to
    # 8,577, 513 of 8 to 8,833.
    for scale, bits in (("e5m0", 4 + 5 / 32), ("e4m0", 4.125), ("e8m0", 4.25)):
        codec = dataclasses.replace(CODECS["mxfp4"], scale=scale)
        assert codec.wire_bytes(32 * 512 + 1) == 9216 and codec.bits == bits
    # What the paper recommends: 8 million elements in so many bits each.
    paper = {(16, "e5m0"): 4.3125, (8, "e4m0"): 4.5, (32, "e4m0"): 4.125}
    for (block, scale), bits in paper.items():
        codec = Codec("e2m1", block, "none", scale)
        assert codec.bits == bits and codec.wire_bytes(1 << 23) * 8 / (1 << 23) == bits


BITS = {
    "taco": (8.0625, 1.984), "taco_paper": (8.25, 1.939), "e4m3h": (8.125, 1.969), "e4m3": (8.125, 1.969),
    "e5m2": (8.125, 1.969), "int8h": (8.125, 1.97), "int6h": (6.125, 2.61), "int5h": (5.125, 3.12),
    "int4h": (4.125, 3.88), "tah4": (4.1125, 3.89),
    "mxfp8": (8.25, 1.94), "mxfp6": (6.25, 2.56), "mxfp4": (4.25, 3.76), "mxint8": (8.25, 1.94),
    "none": (16, 1),
}  # fmt: skip


def test_bits():
    assert set(BITS) == set(CODECS) - {"int8_token"}
    for name, (bits, ratio) in BITS.items():
        assert CODECS[name].bits == bits
        assert 16 / bits == pytest.approx(ratio, abs=0.006), name
        n = 1 << 20
        assert CODECS[name].wire_bytes(n) * 8 / n == pytest.approx(bits, rel=2e-3)  # what the layout adds is small


# Shapes and dtypes


def test_partial_last_block_sends_all_its_codes():
    """The rotation spreads 3 values over 128 codes: without any one of them they could not be read back."""
    x = np.array([1.0, -2.5, 3.0], np.float32)
    message, y = encode_decode(CODECS["int8h"], x)
    assert np.count_nonzero(message[:128]) > 100
    np.testing.assert_allclose(y, x, atol=0.03)


def test_shapes_and_empty():
    x = gaussian(24).reshape(2, 3, 4)
    messages, (y, flat, scalar) = encode_decode(CODECS["int8h"], [x, x.ravel(), np.float32(2.5)])
    np.testing.assert_array_equal(messages[0], messages[1])
    np.testing.assert_array_equal(y, flat.reshape(x.shape))
    assert scalar.shape == () and abs(scalar - 2.5) < 0.03
    empty = CODECS["taco"].encode(jnp.zeros((0, 3)))
    assert empty.shape == (0,) and CODECS["taco"].decode(empty, (0, 3), jnp.float32).shape == (0, 3)


def test_other_dtype_out():
    x = gaussian(300)

    @jax.jit
    def read(x):
        message = CODECS["int8h"].encode(x)
        return [CODECS["int8h"].decode(message, x.shape, dtype) for dtype in (jnp.float32, jnp.bfloat16)]

    wide, narrow = read(x)
    assert wide.dtype == jnp.float32 and narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), narrow)


# Microscaling formats as others read them


@pytest.mark.parametrize("preset", ["mxfp8", "mxfp6", "mxfp4", "mxint8"])
def test_an_ocp_decoder_reads_mx_messages(preset):
    """OCP MX v1.0: block of 32, shared exponent 2^(c - 127), element value; MXINT8's element is k / 64."""
    x = gaussian(32 * 41) * np.exp2(np.repeat(np.arange(41) - 20, 32)).astype(np.float32)
    x[-1] = np.nan
    message, read = map(np.asarray, encode_decode(CODECS[preset], x))
    bits = {"mxfp6": 6, "mxfp4": 4}.get(preset, 8)
    n_codes = x.size * bits // 8
    c_start = 128 * -(-n_codes // 128)
    packed, c = message[:n_codes].reshape(41, -1)[:40], message[c_start : c_start + 41]
    assert c[40] == 255  # e8m0's NaN
    x, c = x[: 32 * 40], c[:40]
    if bits == 4:
        codes = np.concatenate([packed & 15, packed >> 4], axis=1)
    elif bits == 6:
        b = packed.reshape(40, 3, 8).astype(np.uint32)
        word = b[:, 0] | b[:, 1] << 8 | b[:, 2] << 16
        codes = np.concatenate([(word >> 6 * i & 63).astype(np.uint8) for i in range(4)], axis=1)
    else:
        codes = packed
    if preset == "mxint8":
        elements = np.ascontiguousarray(codes).view(np.int8) / 64
    else:
        dtype = {"mxfp8": "float8_e4m3fn", "mxfp6": "float6_e2m3fn", "mxfp4": "float4_e2m1fn"}[preset]
        elements = np.ascontiguousarray(codes).view(getattr(ml_dtypes, dtype)).astype(np.float64)
    shared = c.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    y = (elements * shared[:, None]).ravel().astype(np.float32)
    np.testing.assert_array_equal(y, read[: x.size])
    assert snr_db(x, y) > {"mxfp8": 31, "mxfp6": 30, "mxfp4": 18, "mxint8": 40}[preset]


# Bad input


def test_codecs_are_hashable_values():
    assert len({*CODECS.values(), Codec("e4m3", 128, "hadamard", "ue5m3")}) == len(CODECS)
    assert dataclasses.replace(CODECS["taco"], block=64).name == "e4m3-64-hadamard-ue5m3"
    assert all(CODECS[name].name == name for name in CODECS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CODECS["taco"].block = 64


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"element": "e4m3fn"}, r"element='e4m3fn' is unknown: did you mean 'e4m3'\?"),
        ({"rotation": "hadamrd"}, r"did you mean 'hadamard'\?"),
        ({"scale": "bf16"}, "scale='bf16' is unknown"),
        ({"rounding": "up"}, "rounding='up' is unknown: valid are nearest, stochastic"),
        ({"block": 100}, "block=100: must be a power of two from 8 to 512"),
        ({"block": 1024}, "block=1024"),
        ({"element": "e2m1", "scale": "site"}, "no code for a non-finite value"),
        ({"block": 128.0}, "block=128.0: must be a power of two"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        Codec(**{"element": "e4m3", **fields})


def test_bad_calls():
    with pytest.raises(ValueError, match=r"codec='tacoo' is unknown: did you mean 'taco'\?"):
        as_codec("tacoo")
    assert as_codec(None) == CODECS["none"] and as_codec("taco") is CODECS["taco"]
    with pytest.raises(TypeError, match="int32.*takes bfloat16, float16, float32"):
        CODECS["taco"].encode(jnp.arange(4))
    with pytest.raises(ValueError, match="codec 'none' writes no bytes"):
        CODECS["none"].encode(jnp.ones(4))
    with pytest.raises(
        ValueError, match=r"uint8\[1024\].*300 elements in codec 'int8h' are uint8\[1024\]|uint8\[2048\]"
    ):
        CODECS["int8h"].decode(jnp.zeros(2048, jnp.uint8), (300,), jnp.float32)
    with pytest.raises(ValueError, match="message is"):
        CODECS["int8h"].decode(jnp.zeros(1024, jnp.int8), (300,), jnp.float32)
    with pytest.raises(TypeError, match="dtype int32: codec 'taco' takes bfloat16"):
        CODECS["taco"].decode(jnp.zeros(1024, jnp.uint8), (300,), jnp.int32)
