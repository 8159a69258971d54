"""The facts of the format, against the reference that has them from its own description."""

import dataclasses
import math

import numpy as np
import pytest
import reference_codec
from codec_programs import PRESETS as FIXED
from covers import cover
from reference_codec import Reference

from pallas_kernels import formats
from pallas_kernels.dispatch import ONLY_IN_JNP, SCALES_ONLY_IN_JNP, TOKEN
from pallas_kernels.formats import ELEMENTS, ROTATIONS, Format
from taco_jax import CODECS, Codec
from taco_jax.codec import tah
from taco_jax.compression.dispatch import to_format

SIZES = (1, 7, 127, 128, 129, 8191, 8193, 2**14 + 3, 2**20 + 8, 2**32 + 5)
PRESETS = [name for name in FIXED if CODECS[name].scale != "paper"]
BLOCKS = (8, 16, 32, 64, 128, 256, 512)
ROUNDINGS = ("nearest", "stochastic")
FIELDS = cover(
    2,
    element=formats.KERNEL_ELEMENTS,
    block=BLOCKS,
    rotation=ROTATIONS,
    scale=formats.KERNEL_SCALES,
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
    assert fmt.wire_bytes(n) == codec.wire_bytes(n)
    assert fmt.wire_bytes(n) == Reference(codec.element, codec.block, codec.rotation, codec.scale).wire_bytes(n)
    sections = fmt.sections(n)
    assert [length for _, length in sections] == codec._sections(codec.n_blocks(n))
    ends = [0, *(offset + length for offset, length in sections)]
    assert all(0 <= offset - end < 128 and offset % 128 == 0 for (offset, _), end in zip(sections, ends))
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
def test_facts_of_elements(name):
    element, (bits, maximum, _) = formats.ELEMENTS[name], reference_codec.ELEMENTS[name]
    assert (element.name, element.bits, element.maximum, element.is_float) == (name, bits, maximum, name[0] == "e")
    ours = formats.reciprocal_down(maximum)
    assert ours.dtype == np.float32 and ours == reference_codec.reciprocal_down(maximum)
    assert formats.packing_parts(bits) * bits % 8 == 0 and math.lcm(8, bits) == formats.packing_parts(bits) * bits
    if name in formats.KERNEL_ELEMENTS:
        fmt = Format(name, 32, "none", "e8m0")
        facts = (fmt.bits, fmt.maximum, fmt.mantissa, fmt.min_exponent, fmt.nan, fmt.is_float, fmt.reciprocal_maximum)
        assert facts == (
            bits, maximum, element.mantissa, element.min_exponent, element.nan, element.is_float, ours
        )  # fmt: skip
        # OCP's MXINT8 is k / 64.
        assert fmt.scale_bias == (6 if name == "int8" else 0)
        assert Format(name, 32, "none", "bfloat16").scale_bias == 0


def test_what_has_kernels():
    assert {*formats.KERNEL_ELEMENTS, *ONLY_IN_JNP} == {*formats.ELEMENTS, tah.ELEMENT}
    assert {*formats.KERNEL_SCALES, *SCALES_ONLY_IN_JNP} == set(formats.SCALES)
    assert {*formats.SCALE_BYTES, *formats.SCALE_BITS} == set(formats.SCALES)
    assert CODECS["int8_token"].block == TOKEN


def test_scales_of_calibrated_sites_are_normal_float32():
    """2^a bitcast((c + 896) << 20) for every byte c, up to the largest |a|, and not beyond it."""
    c = np.arange(1, 255)
    normal = lambda a: ((c + 896 + 8 * a >> 3 >= 1) & (c + 896 + 8 * a >> 3 <= 254)).all()
    assert [a for a in range(300) if normal(a) and normal(-a)] == list(range(formats.MAX_EXPONENT + 1))
    assert formats.TINY == np.float32(2.0**-100) and formats.TINY.dtype == np.float32


@pytest.mark.parametrize("block", BLOCKS)
def test_signs_are_the_references(block):
    np.testing.assert_array_equal(formats.block_signs(block), reference_codec.signs(block))
    assert formats.block_signs(block).dtype == formats.hadamard_signs(block).dtype == np.float32
