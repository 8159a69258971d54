"""e2m1, OCP's 4-bit float, two to four values to a register.

Decoding: the low bits of a byte pair's four nibbles are the selector of a byte permutation, and its operands a table of
the high bytes of the eight magnitudes in float16 (their low bytes are zero).

Encoding, where a value has at most 11 significant bits (16-bit inputs times a power of two): it is exact in float16,
or far below the smallest code's border. Two are rounded at once, as `elements` does it in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.formats import Format
from pallas_kernels.mosaic.tiling import ROWS
from pallas_kernels.mosaic.words import constant, halves, permute

# High bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 as float16.
_TABLE = 0x3E3C3800, 0x46444240


def reads(fmt: Format) -> bool:
    return fmt.element == "e2m1" and fmt.rotation == "none" and fmt.scale != "site"


def writes(fmt: Format, x_dtype) -> bool:
    """Whether encoding values of `x_dtype` may round in float16."""
    exact = jnp.dtype(x_dtype).itemsize == 2 and fmt.scale == "e8m0" and fmt.rounding == "nearest"
    return reads(fmt) and exact


def values(bytes_: jax.Array) -> list[jax.Array]:
    """A block's bytes, uint8[64, B / 2] in the layout of a product -> the values of its halves, float32[64, B / 2]."""
    width = bytes_.shape[1]
    one = plgpu.ShapeDtypeStruct((ROWS, width), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=[one, one])
    def read(ctx, array):
        parts = [np.empty(array.registers.shape, object) for _ in range(2)]
        for index, register in np.ndenumerate(array.registers):
            word = _word(register)
            magnitudes = permute(constant(_TABLE[0]), _TABLE[1], arith.andi(word, constant(0x7777)))
            # Bytes 0 0 1 1 of the pair: the sign of each nibble goes to the top of its magnitude's byte.
            twice = permute(word, 0, 0x1100)
            signs = arith.ori(
                arith.andi(arith.shli(twice, constant(4)), constant(0x00800080)),
                arith.andi(twice, constant(0x80008000)),
            )
            quad = arith.ori(magnitudes, signs)
            for part, selector in zip(parts, (0x2404, 0x3414)):
                pair = halves(permute(quad, 0, selector))
                part[index] = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), pair)
        make = lambda registers: mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)
        return [make(part) for part in parts]

    return read(bytes_)


def codes(low: jax.Array, high: jax.Array) -> jax.Array:
    """Scaled values of a block's halves, float32[64, B / 2], exact in 11 bits -> its bytes, uint8[64, B / 2]."""
    result = plgpu.ShapeDtypeStruct(low.shape, jnp.uint8, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA), return_type=result)
    def write(ctx, low, high):
        registers = np.empty(low.registers.shape, object)
        for index, register in np.ndenumerate(low.registers):
            nibbles = arith.ori(_round(register), arith.shli(_round(high.registers[index]), constant(4)))
            both = arith.trunci(ir.IntegerType.get_signless(16), permute(nibbles, 0, 0x4420))
            one = ir.VectorType.get((1,), ir.IntegerType.get_signless(16))
            registers[index] = vector.bitcast(_i8x2(), vector.broadcast(one, both))
        return mgpu.FragmentedArray(_registers=registers, _layout=low.layout, _is_signed=False)

    return write(low, high)


def _round(pair) -> ir.Value:
    """float32 values, two of them -> their codes in the low bits of 16 each."""
    i32 = ir.IntegerType.get_signless(32)
    as_word = lambda pair: vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), pair), [], [0])
    low, high = (vector.extract(pair, [], [i]) for i in range(2))
    word = llvm.inline_asm(i32, [high, low], "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", has_side_effects=False)
    magnitude = arith.andi(word, constant(0x7FFF7FFF))
    exponent = llvm.inline_asm(
        i32, [arith.andi(magnitude, constant(0x7C007C00)), constant(0x3C003C00)], "max.u16x2 $0, $1, $2;", "=r,r,r",
        has_side_effects=False,
    )  # fmt: skip
    # 2^(e + 9) rounds to a multiple of 2^(e - 1), and leaves the quotient in the low bits of the sum.
    rounder = arith.addi(exponent, constant(9 << 10 | 9 << 26))
    quotient = as_word(arith.addf(halves(magnitude), halves(rounder)))
    binade = arith.subi(arith.shrui(exponent, constant(9)), constant(30 | 30 << 16))
    code = arith.andi(arith.addi(binade, quotient), constant(0x00070007))
    return arith.ori(code, arith.andi(arith.shrui(word, constant(12)), constant(0x00080008)))


def _word(pair) -> ir.Value:
    """Two bytes -> the low half of an int32."""
    i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    return arith.extui(i32, vector.extract(vector.bitcast(ir.VectorType.get((1,), i16), pair), [], [0]))


def _i8x2() -> ir.Type:
    return ir.VectorType.get((2,), ir.IntegerType.get_signless(8))
