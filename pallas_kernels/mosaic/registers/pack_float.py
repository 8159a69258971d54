"""Codes of floats, a byte each in a 32-bit word, to float32 values and back, by the hardware's casts of 8-bit floats.

Sub-byte floats go through the cast of the 8-bit float with as many mantissa bits: times a power of two, which moves
their subnormals to those of the 8-bit float, they differ from it by where the sign is.

e2m1, OCP's 4-bit float, has one mantissa bit and no such relative. Decoding: four nibbles' low bits are the selector
of a byte permutation, and its operands a table of the high bytes of the eight magnitudes in float16 (their low bytes
are zero). Encoding is what `tile_codec` does to floats: a number of the value's binade rounds it by its place value.
Here it also carries what the code is short of, so that one addition makes the code of it and the sum.
"""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.formats import ELEMENTS, Format
from pallas_kernels.mosaic.registers.pack_int import (
    as_float16_pair,
    constant,
    gather_low_bytes,
    part_of,
    permute_bytes,
)

CAST_BY_MANTISSA_BITS = {2: "e5m2", 3: "e4m3"}
# High bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 as float16.
E2M1_HIGH_BYTES = 0x3E3C3800, 0x46444240
FLOAT32_ONE = 127 << 23  # 1.0, the least binade of e2m1 that has its own spacing
# 2^22 times the binade rounds to a multiple of half of it, which is 1; and 6 of them. See `e2m1_code`.
E2M1_ROUNDER = (22 << 23) + 6


def codes_to_floats(fmt: Format, part: int, planes: list, dtype) -> list:
    """`pack_int.codes_to_floats` of a float format, float32 only."""
    word, cast = part_of(fmt, part, planes), CAST_BY_MANTISSA_BITS[fmt.mantissa]
    if fmt.bits < 8:
        sign = 1 << (fmt.bits - 1)
        # Adding what the bit 7 is more than the sign moves it there.
        signs = arith.andi(word, constant(sign * 0x01010101))
        word = arith.addi(word, arith.muli(signs, constant((128 - sign) // sign)))
    f16, i16, i32 = ir.F16Type.get(), ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    pairs = []
    for shift in (0, 16):
        two = arith.trunci(i16, arith.shrui(word, constant(shift)) if shift else word)
        pair = llvm.inline_asm(i32, [two], f"cvt.rn.f16x2.{cast}x2 $0, $1;", "=r,h", has_side_effects=False)
        vector_type = ir.VectorType.get((2,), f16)
        pair = as_float16_pair(pair)
        if exponent := _exponent_shift(fmt):
            factor = ir.DenseElementsAttr.get_splat(vector_type, ir.FloatAttr.get(f16, 2.0**exponent))
            pair = arith.mulf(pair, arith.constant(vector_type, factor))
        pairs.append(arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), pair))
    return pairs


def floats_to_codes(fmt: Format, pairs: list) -> ir.Value:
    """Rounds two vectors of two scaled values: a word of four codes, whose bits above them are to be ignored."""
    f32, i16, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    number = lambda value: arith.constant(f32, ir.FloatAttr.get(f32, value))
    each = [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]
    if fmt.element == "e2m1":
        return gather_low_bytes([e2m1_code(value) for value in each])
    if exponent := _exponent_shift(fmt):
        each = [arith.mulf(value, number(2.0**-exponent)) for value in each]
    cast = f"cvt.rn.satfinite.{CAST_BY_MANTISSA_BITS[fmt.mantissa]}x2.f32 $0, $1, $2;"
    two = [llvm.inline_asm(i16, [b, a], cast, "=h,f,f", has_side_effects=False) for a, b in (each[:2], each[2:])]
    word = arith.ori(arith.extui(i32, two[0]), arith.shli(arith.extui(i32, two[1]), constant(16)))
    if fmt.bits == 8:
        return word
    sign = (1 << (fmt.bits - 1)) * 0x01010101
    moved = arith.shrui(word, constant(8 - fmt.bits))
    return arith.ori(arith.andi(word, constant(sign ^ 0xFFFFFFFF)), arith.andi(moved, constant(sign)))


def e2m1_values(words: list) -> list:
    """Returns the values of a block's bytes, 4 words of 8 nibbles, as 16 vectors of two float32."""
    low, high = [], []
    for word in words:
        selectors = arith.andi(word, constant(0x77777777))
        shifted = arith.shli(word, constant(4))
        for selector, signs in (selectors, 0x5140), (arith.shrui(selectors, constant(16)), 0x7362):
            magnitudes = permute_bytes(constant(E2M1_HIGH_BYTES[0]), E2M1_HIGH_BYTES[1], selector)
            # The sign of each of the four nibbles, low and high of two bytes, at the top of its magnitude's byte.
            signs = arith.andi(permute_bytes(shifted, word, signs), constant(0x80808080))
            four = arith.ori(magnitudes, signs)
            for part, which in (low, 0x2404), (high, 0x3414):
                pair = as_float16_pair(permute_bytes(four, 0, which))
                part.append(arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), pair))
    return low + high


def e2m1_code(value) -> ir.Value:
    """Rounds a scaled float32: its code in the low four bits, turned to the left by one, so that the sign is lowest."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    bits = arith.bitcast(i32, value)
    exponent = arith.andi(bits, constant(0x7F800000))
    rounder = arith.maxsi(arith.addi(exponent, constant(E2M1_ROUNDER)), constant(FLOAT32_ONE + E2M1_ROUNDER))
    total = arith.bitcast(i32, arith.addf(mlir_math.absf(value), arith.bitcast(f32, rounder)))
    # Modulo 8, with e the exponent's bits: 2 (e + 22) + (quotient + 6) = 2 (e - 127) + quotient.
    magnitude = arith.addi(arith.shrui(rounder, constant(22)), total)
    return llvm.inline_asm(
        i32, [bits, magnitude], "shf.l.wrap.b32 $0, $1, $2, 1;", "=r,r,r", has_side_effects=False
    )  # fmt: skip


def e2m1_turned_back(word) -> ir.Value:
    """Turns eight codes of `e2m1_code` back to the right."""
    magnitudes = arith.andi(arith.shrui(word, constant(1)), constant(0x77777777))
    return arith.ori(magnitudes, arith.andi(arith.shli(word, constant(3)), constant(0x88888888)))


def _exponent_shift(fmt: Format) -> int:
    """Returns the power of two that a value is more than what its bits say in the 8-bit float."""
    return fmt.min_exponent - ELEMENTS[CAST_BY_MANTISSA_BITS[fmt.mantissa]].min_exponent
