"""`pallas_kernels.formats` states again what `taco_jax` defines, for kernels to compile in: the two must be equal."""

import dataclasses

import numpy as np
import pytest
from codec_programs import PRESETS as FIXED
from covers import cover

from pallas_kernels import formats
from pallas_kernels.dispatch import ONLY_IN_JNP, SCALES_ONLY_IN_JNP, TOKEN
from pallas_kernels.formats import Format, packing_parts
from taco_jax import CODECS, Codec
from taco_jax.codec import block_scale, hadamard, tah, wire
from taco_jax.codec.elements import ELEMENTS
from taco_jax.codec.hadamard import ROTATIONS
from taco_jax.compression.dispatch import to_format

SIZES = (1, 7, 127, 128, 129, 8191, 8193, 2**14 + 3, 2**20 + 8, 2**32 + 5)
PRESETS = [name for name in FIXED if CODECS[name].scale != "paper"]
BLOCKS = (8, 16, 32, 64, 128, 256, 512)
ROUNDINGS = ("nearest", "stochastic")
FIELDS = cover(
    2,
    element=tuple(formats.ELEMENTS),
    block=BLOCKS,
    rotation=ROTATIONS,
    scale=tuple(formats.SCALE_BYTES),
    rounding=ROUNDINGS,
    size=SIZES,
)


def codecs(fields):
    """The codec of the fields, and the kernels' format. Elements without a code for NaN have no site scale."""
    element, _, _, scale, *_ = fields
    if scale == "site" and ELEMENTS[element].nan is None:
        fields = (*fields[:3], "e8m0", *fields[4:])
    codec = Codec(*fields[:5])
    return codec, Format(**fields_of(codec)), fields[5]


def fields_of(codec):
    """Those that kernels have too."""
    return {field.name: getattr(codec, field.name) for field in dataclasses.fields(Format)}


def check(codec, fmt, n):
    assert to_format(codec) == fmt
    lengths = codec._sections(codec.n_blocks(n))
    offsets, total = wire.section_offsets(lengths)
    assert fmt.sections(n) == list(zip(offsets, lengths))
    assert fmt.wire_bytes(n) == codec.wire_bytes(n) == total
    assert fmt.n_blocks(n) == codec.n_blocks(n)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_codecs_layout(name):
    fmt = to_format(CODECS[name])
    assert dataclasses.asdict(fmt) == fields_of(CODECS[name])
    for size in SIZES:
        check(CODECS[name], fmt, size)
    assert fmt.wire_bytes(0) == CODECS[name].wire_bytes(0) == 0


@pytest.mark.parametrize(
    "fields,message",
    [
        (("int7", 128, "none", "bfloat16"), "Format.element='int7': must be one of e4m3, e5m2, int8"),
        (("int8", 100, "none", "bfloat16"), "Format.block=100: must be one of 8, 16, 32, 64, 128, 256, 512"),
        (("int8", 128.0, "none", "bfloat16"), "Format.block=128.0: must be one of"),
        (("int8", 128, "hadamart", "bfloat16"), "Format.rotation='hadamart': must be one of none, hadamard"),
        (("int8", 128, "none", "paper"), "Format.scale='paper': must be one of float32"),
        (("int8", 128, "none", "site", "up"), "Format.rounding='up': must be one of nearest, stochastic"),
    ],
)
def test_unknown_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Format(*fields)


def test_any_fields_have_the_codecs_layout():
    for fields in FIELDS:
        check(*codecs(fields))


@pytest.mark.parametrize("name", formats.ELEMENTS)
def test_elements_are_the_codecs(name):
    element, fmt = ELEMENTS[name], Format(name, 128, "none", "bfloat16")
    facts = (fmt.bits, fmt.maximum, fmt.mantissa, fmt.min_exponent, fmt.nan, fmt.is_float)
    assert facts == (
        element.bits, element.maximum, element.mantissa, element.min_exponent, element.nan, element.is_float
    )  # fmt: skip
    ours, theirs = fmt.reciprocal_maximum, block_scale._reciprocal_down(element.maximum)
    assert ours.dtype == theirs.dtype == np.float32 and ours == theirs
    for scale in ("e8m0", "ue5m3", "bfloat16"):
        bias = block_scale._ocp_bias(element) if scale == "e8m0" else 0
        assert Format(name, 32, "none", scale).scale_bias == bias
    # As many bytes as `wire.pack` makes of the parts.
    assert fmt.block // packing_parts(fmt.bits) * (packing_parts(fmt.bits) * fmt.bits // 8) == 128 * fmt.bits // 8


def test_constants_are_the_codecs():
    assert {*formats.ELEMENTS, *ONLY_IN_JNP} == {*ELEMENTS, tah.ELEMENT}
    assert CODECS["int8_token"].block == TOKEN
    assert {*formats.SCALE_BYTES, *SCALES_ONLY_IN_JNP} == set(block_scale.SCALES)
    assert all(8 * formats.SCALE_BYTES[scale] == block_scale.bits_per_block(scale) for scale in formats.SCALE_BYTES)
    assert (formats.SECTION_BYTES, formats.MESSAGE_BYTES) == (wire.SECTION_BYTES, wire.MESSAGE_BYTES)
    assert formats.UNCALIBRATED == block_scale.UNCALIBRATED
    assert formats.MAX_EXPONENT == block_scale.MAX_EXPONENT
    assert formats.TINY == block_scale._TINY and formats.TINY.dtype == np.float32


@pytest.mark.parametrize("block", BLOCKS)
def test_rotations_are_the_codecs(block):
    np.testing.assert_array_equal(formats.hadamard_signs(block), hadamard.hadamard_signs(block))
    np.testing.assert_array_equal(formats.block_signs(block), hadamard.block_signs(block))
    assert formats.block_signs(block).dtype == np.float32
