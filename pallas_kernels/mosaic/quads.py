"""Four codes of one thread's block, a byte each in a 32-bit word, to float32 values and back.

Sub-byte floats go through the hardware's casts of 8-bit floats with as many mantissa bits: times a power of two, which
moves their subnormals to those of the 8-bit float, they differ from it by where the sign is. e2m1 has one mantissa bit
and no such relative: see `fp4.py`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.formats import ELEMENTS, Format, packing_parts
from pallas_kernels.mosaic import elements, fp4, interleaving
from pallas_kernels.mosaic.tiling import ROWS
from pallas_kernels.mosaic.words import constant, gather, halves, integers, part_of, plane_of, words_of

_HARDWARE = {2: "e5m2", 3: "e4m3"}  # by mantissa bits


def applies(fmt: Format) -> bool:
    """Whether `values` and `store` do, of blocks that `owned` has: there is no code that means NaN."""
    return fmt.scale != "site"


def values(fmt: Format, ref) -> jax.Array:
    """Codes in shared memory [64, row_bytes] -> their values, float32[64, 128]."""
    parts, row_bytes = packing_parts(fmt.bits), ref.shape[1]
    result = plgpu.ShapeDtypeStruct((ROWS, 128), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def read(ctx, memory):
        registers = np.empty((16, 2), object)
        for half, pieces in enumerate(interleaving.read(memory, 0, row_bytes)):
            words = words_of(pieces)
            if fmt.element == "e2m1":
                registers[:, half] = fp4.values(words)
                continue
            width = len(words) * 8 // (fmt.bits * parts)  # words of a plane of bytes
            planes = [words[start : start + width] for start in range(0, len(words), width)]
            floats = functools.partial(_floats if fmt.is_float else integers, fmt)
            found = [floats(part, of_planes, jnp.float32) for part in range(parts) for of_planes in zip(*planes)]
            registers[:, half] = [pair for two in found for pair in two]
        registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, 128)))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return read(ref)


def store(fmt: Format, ref, scaled: jax.Array, keep: jax.Array) -> None:
    """Rounds float32[64, 128], scaled and clipped, and writes the codes to `ref` [64, row_bytes].

    keep: int32[64, 8], for each block all ones, or zero where its codes shall be.
    """
    parts, row_bytes = packing_parts(fmt.bits), ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, plgpu.Layout.WGMMA))
    def write(ctx, memory, scaled, keep):
        registers, keep, rows = scaled.registers.reshape(-1, 2), keep.registers.reshape(-1), []
        for half in range(2):
            pairs = list(registers[:, half])
            codes = [_codes(fmt, pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
            width = len(codes) // parts
            of_parts = list(zip(*[codes[start : start + width] for start in range(0, len(codes), width)]))
            words = [plane_of(fmt, k, list(four)) for k in range(parts * fmt.bits // 8) for four in of_parts]
            if fmt.element == "e2m1":
                words = [fp4.turned(word) for word in words]
            own = vector.extract(keep[half], [], [0])
            words = [arith.andi(word, own) for word in words]
            rows.append(vector.from_elements(ir.VectorType.get((len(words),), own.type), words))
        interleaving.write(memory, 0, row_bytes, rows)

    write(ref, scaled, keep)


def _floats(fmt: Format, part: int, planes: list, dtype) -> list:
    """`words.integers` of a float format, float32 only."""
    word, hardware = part_of(fmt, part, planes), _HARDWARE[fmt.mantissa]
    if fmt.bits < 8:
        sign = 1 << (fmt.bits - 1)
        # Adding what the bit 7 is more than the sign moves it there.
        signs = arith.andi(word, constant(sign * 0x01010101))
        word = arith.addi(word, arith.muli(signs, constant((128 - sign) // sign)))
    f16, i16, i32 = ir.F16Type.get(), ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    pairs = []
    for shift in (0, 16):
        two = arith.trunci(i16, arith.shrui(word, constant(shift)) if shift else word)
        pair = llvm.inline_asm(i32, [two], f"cvt.rn.f16x2.{hardware}x2 $0, $1;", "=r,h", has_side_effects=False)
        vector_type = ir.VectorType.get((2,), f16)
        pair = halves(pair)
        if moved := _moved(fmt):
            factor = ir.DenseElementsAttr.get_splat(vector_type, ir.FloatAttr.get(f16, 2.0**moved))
            pair = arith.mulf(pair, arith.constant(vector_type, factor))
        pairs.append(arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), pair))
    return pairs


def _codes(fmt: Format, pairs: list) -> ir.Value:
    """Two vectors of two values -> four codes; the bits above them are to be ignored."""
    f32, i16, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    number = lambda value: arith.constant(f32, ir.FloatAttr.get(f32, value))
    each = [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]
    if fmt.element == "e2m1":
        return gather([fp4.code(value) for value in each])
    if not fmt.is_float:
        return gather([arith.bitcast(i32, arith.addf(value, number(float(elements.MAGIC)))) for value in each])
    if moved := _moved(fmt):
        each = [arith.mulf(value, number(2.0**-moved)) for value in each]
    cast = f"cvt.rn.satfinite.{_HARDWARE[fmt.mantissa]}x2.f32 $0, $1, $2;"
    two = [llvm.inline_asm(i16, [b, a], cast, "=h,f,f", has_side_effects=False) for a, b in (each[:2], each[2:])]
    word = arith.ori(arith.extui(i32, two[0]), arith.shli(arith.extui(i32, two[1]), constant(16)))
    if fmt.bits == 8:
        return word
    sign = (1 << (fmt.bits - 1)) * 0x01010101
    moved = arith.shrui(word, constant(8 - fmt.bits))
    return arith.ori(arith.andi(word, constant(sign ^ 0xFFFFFFFF)), arith.andi(moved, constant(sign)))


def _moved(fmt: Format) -> int:
    """The power of two that a value is more than what its bits say in the 8-bit float."""
    return fmt.min_exponent - ELEMENTS[_HARDWARE[fmt.mantissa]].min_exponent
