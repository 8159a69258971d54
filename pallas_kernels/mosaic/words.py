"""Integer codes of `interleaving`'s rows, unpacked and made into floats four to a 32-bit word.

2^23 + c is a float32 whose low byte is c (float16: 2^10 + c), so that one byte permutation makes a float of a code and
a subtraction takes the 2^23 away, and the offset of two's complement with its sign bit flipped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.formats import Format, packing_parts
from pallas_kernels.mosaic import interleaving
from pallas_kernels.mosaic.tiling import ROWS


def reads(fmt: Format) -> bool:
    """Whether `values` does: integers in runs that give a thread whole words, and no code that means NaN."""
    whole = interleaving.run_columns(fmt) >= 4 * interleaving.THREADS
    return interleaving.applies(fmt) and not fmt.is_float and fmt.scale != "site" and whole


def values(fmt: Format, ref, start: int, dtype) -> list[jax.Array]:
    """The block whose codes start at byte `start` of the rows of `ref` -> its runs' values, dtype[64, w] each.

    dtype: float32 or float16.
    """
    width, parts = interleaving.run_columns(fmt), packing_parts(fmt.bits)
    # Of 8-bit codes a block of 256 is two runs, which share no bytes.
    groups = fmt.block // (parts * width)
    planes = parts * fmt.bits // 8
    one = plgpu.ShapeDtypeStruct((ROWS, width), dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[one] * (groups * parts))
    def read(ctx, memory):
        out = []
        for group in range(groups):
            of_planes = [_load(memory, start + (group * planes + k) * width, width) for k in range(planes)]
            for part in range(parts):
                shape = mgpu.WGMMA_LAYOUT.registers_shape((ROWS, width))
                registers = np.empty((width // 8, 2), object)
                for half in range(2):
                    for k in range(width // 16):
                        word = _part(fmt, part, [plane[half][k] for plane in of_planes])
                        registers[2 * k : 2 * k + 2, half] = _floats(fmt, word, dtype)
                out.append(
                    mgpu.FragmentedArray(
                        _registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
                    )
                )
        return out

    return read(ref)


def constant(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), value - (1 << 32) if value >= 1 << 31 else value)


def _load(memory, start: int, width: int) -> list[list]:
    """A thread's bytes of a run as words: for each of its two rows, int32 of four codes each."""
    words = lambda pieces: [
        vector.extract(piece, [], [i]) for piece in pieces for i in range(ir.VectorType(piece.type).shape[0])
    ]
    return [words(pieces) for pieces in interleaving.read(memory, start, width)]


def _part(fmt: Format, part: int, planes: list) -> ir.Value:
    """The codes of one part from words of each byte plane: four codes, a byte each, with their sign bits flipped."""
    word = None
    for k, plane in enumerate(planes):
        shift = part * fmt.bits - 8 * k
        if not -fmt.bits < shift < 8:
            continue
        if fmt.bits < 8:
            moved = (arith.shrui if shift > 0 else arith.shli)(plane, constant(abs(shift))) if shift else plane
            # The bits of the code that this byte holds; its neighbours' bits came with the shift.
            kept = ((0xFF >> shift) if shift > 0 else (0xFF << -shift)) & ((1 << fmt.bits) - 1)
            plane = arith.andi(moved, constant(kept * 0x01010101))
        word = plane if word is None else arith.ori(word, plane)
    return arith.xori(word, constant((1 << (fmt.bits - 1)) * 0x01010101))


def _floats(fmt: Format, word, dtype) -> list:
    """Four codes -> two vectors of two values."""
    offset = 1 << (fmt.bits - 1)
    if jnp.dtype(dtype) == jnp.float16:
        f16 = ir.F16Type.get()
        two = ir.VectorType.get((2,), f16)
        bias = arith.constant(two, ir.DenseElementsAttr.get_splat(two, ir.FloatAttr.get(f16, 1024.0 + offset)))
        pairs = [permute(word, 0x64, selector) for selector in (0x4140, 0x4342)]
        return [arith.subf(halves(pair), bias) for pair in pairs]
    f32 = ir.F32Type.get()
    pair_type = ir.VectorType.get((2,), f32)
    bias = arith.constant(f32, ir.FloatAttr.get(f32, 8388608.0 + offset))
    singles = [arith.bitcast(f32, permute(word, 0x4B000000, 0x7440 + i)) for i in range(4)]
    numbers = [arith.subf(single, bias) for single in singles]
    return [vector.from_elements(pair_type, numbers[i : i + 2]) for i in (0, 2)]


def halves(word) -> ir.Value:
    """A word as two float16."""
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    return vector.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), vector.broadcast(one, word))


def permute(word, other: int, selector: int | ir.Value) -> ir.Value:
    """Bytes of `word` (0 to 3) and of a constant (4 to 7), lowest first as the selector's digits say."""
    i32 = ir.IntegerType.get_signless(32)
    fixed = isinstance(selector, int)
    operands = [word, constant(other), constant(selector) if fixed else selector]
    kinds = "=r,r,r,n" if fixed else "=r,r,r,r"
    return llvm.inline_asm(i32, operands, "prmt.b32 $0, $1, $2, $3;", kinds, has_side_effects=False)
