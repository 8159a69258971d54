"""e2m1, OCP's 4-bit float.

Decoding: four nibbles' low bits are the selector of a byte permutation, and its operands a table of the high bytes of
the eight magnitudes in float16 (their low bytes are zero).

Encoding is what `elements` does to floats: a number of the value's binade rounds it by its place value. Here it also
carries what the code is short of, so that one addition makes the code of it and the sum.
"""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.mosaic.words import constant, halves, permute

# High bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 as float16.
_TABLE = 0x3E3C3800, 0x46444240
_ONE = 127 << 23  # 1.0, the least binade that has its own spacing
# 2^22 times the binade rounds to a multiple of half of it, which is 1; and 6 of them. See `code`.
_ROUNDER = (22 << 23) + 6


def values(words: list) -> list:
    """A block's bytes, 4 words of 8 nibbles -> its values as 16 vectors of two float32."""
    low, high = [], []
    for word in words:
        selectors = arith.andi(word, constant(0x77777777))
        shifted = arith.shli(word, constant(4))
        for selector, signs in (selectors, 0x5140), (arith.shrui(selectors, constant(16)), 0x7362):
            magnitudes = permute(constant(_TABLE[0]), _TABLE[1], selector)
            # The sign of each of the four nibbles, low and high of two bytes, at the top of its magnitude's byte.
            signs = arith.andi(permute(shifted, word, signs), constant(0x80808080))
            quad = arith.ori(magnitudes, signs)
            for part, which in (low, 0x2404), (high, 0x3414):
                pair = halves(permute(quad, 0, which))
                part.append(arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), pair))
    return low + high


def code(value) -> ir.Value:
    """A scaled float32 -> its code in the low four bits, turned to the left by one: the sign is the lowest."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    bits = arith.bitcast(i32, value)
    exponent = arith.andi(bits, constant(0x7F800000))
    rounder = arith.maxsi(arith.addi(exponent, constant(_ROUNDER)), constant(_ONE + _ROUNDER))
    total = arith.bitcast(i32, arith.addf(mlir_math.absf(value), arith.bitcast(f32, rounder)))
    # Modulo 8, with e the exponent's bits: 2 (e + 22) + (quotient + 6) = 2 (e - 127) + quotient.
    magnitude = arith.addi(arith.shrui(rounder, constant(22)), total)
    return llvm.inline_asm(
        i32, [bits, magnitude], "shf.l.wrap.b32 $0, $1, $2, 1;", "=r,r,r", has_side_effects=False
    )  # fmt: skip


def turned(word) -> ir.Value:
    """Eight codes of `code` -> turned back to the right."""
    magnitudes = arith.andi(arith.shrui(word, constant(1)), constant(0x77777777))
    return arith.ori(magnitudes, arith.andi(arith.shli(word, constant(3)), constant(0x88888888)))
