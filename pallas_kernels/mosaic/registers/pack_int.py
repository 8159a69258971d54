"""Integer codes of rotated blocks, four to a 32-bit word: unpacked and made into floats, or packed.

2^23 + c is a float32 whose low byte is c (float16: 2^10 + c), so that one byte permutation makes a float of a code and
a subtraction takes the 2^23 away, and the offset of two's complement with its sign bit flipped. Codes of fewer bits
need no permutation, nor a shift: two of them, in any bits of a word's bytes 0 and 2, become float16 by one bitwise
operation, and one multiplication and addition. The other way round a sum rounds a float to such a number, and three
permutations collect the low bytes of four.
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
from pallas_kernels.mosaic.registers import layout
from pallas_kernels.mosaic.tiling import TILE_ROWS

# Adding 1.5 * 2^23 rounds a small float32 to the nearest integer (even), which is then in the low bits of the sum.
ROUND_TO_INT = np.float32(12582912.0)


def can_unpack(fmt: Format) -> bool:
    """Returns whether `unpack_block` has it: integers in runs of whole words a thread, and no code that means NaN."""
    whole = layout.run_columns(fmt) >= 4 * layout.THREADS_PER_ROW
    return layout.applies(fmt) and not fmt.is_float and fmt.scale != "site" and whole


def can_pack(fmt: Format) -> bool:
    """Returns whether `pack_block` has it: what can be unpacked, where no noise rounds."""
    return can_unpack(fmt) and fmt.rounding == "nearest"


def unpack_block(fmt: Format, ref, start: int, dtype, pitch: int | None = None) -> list[jax.Array]:
    """Reads the block whose codes start at byte `start` of the rows of `ref`: its runs' values, dtype[64, w] each.

    dtype: float32 or float16.
    """
    width, parts = layout.run_columns(fmt), packing_parts(fmt.bits)
    # Of 8-bit codes a block of 256 is two runs, which share no bytes.
    groups = fmt.block // (parts * width)
    planes = parts * fmt.bits // 8
    one = plgpu.ShapeDtypeStruct((TILE_ROWS, width), dtype, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[one] * (groups * parts))
    def read(ctx, memory):
        out = []
        for group in range(groups):
            places = [start + (group * planes + k) * width for k in range(planes)]
            of_planes = [list(map(split_words, layout.read_run(memory, place, width, pitch))) for place in places]
            for part in range(parts):
                shape = mgpu.WGMMA_LAYOUT.registers_shape((TILE_ROWS, width))
                registers = np.empty((width // 8, 2), object)
                for half in range(2):
                    for k in range(width // 16):
                        words = [plane[half][k] for plane in of_planes]
                        registers[2 * k : 2 * k + 2, half] = codes_to_floats(fmt, part, words, dtype)
                out.append(
                    mgpu.FragmentedArray(
                        _registers=registers.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
                    )
                )
        return out

    return read(ref)


def pack_block(
    fmt: Format, ref, start: int, parts: list[jax.Array], finite: jax.Array, pitch: int | None = None
) -> None:
    """Writes a block from byte `start` of the rows of `ref`, zeros where a row is not `finite` (bool[64]).

    parts: its runs, int32[64, w] each, whose low bits are the codes; the others are ignored.
    """
    width, together = layout.run_columns(fmt), packing_parts(fmt.bits)
    planes = together * fmt.bits // 8
    keep = jnp.where(finite, np.int32(-1), np.int32(0))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA.reduce(1), *[plgpu.Layout.WGMMA] * len(parts)),
    )
    def write(ctx, memory, keep, *parts):
        keep = [vector.extract(row, [], [0]) for row in keep.registers.reshape(-1)]
        words = [[_low_bytes(part.registers.reshape(-1, 2)[:, half]) for half in range(2)] for part in parts]
        for group in range(len(parts) // together):
            own = words[group * together : (group + 1) * together]
            for k in range(planes):
                rows = []
                for half in range(2):
                    of_parts = zip(*[part[half] for part in own])
                    plane = [arith.andi(plane_of(fmt, k, list(codes)), keep[half]) for codes in of_parts]
                    rows.append(vector.from_elements(ir.VectorType.get((len(plane),), plane[0].type), plane))
                layout.write_run(memory, start + (group * planes + k) * width, width, rows, pitch)

    write(ref, keep, *parts)


def constant(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), value - (1 << 32) if value >= 1 << 31 else value)


def split_words(pieces: list) -> list:
    """Returns the words of vectors of words, four bytes each."""
    return [vector.extract(piece, [], [i]) for piece in pieces for i in range(ir.VectorType(piece.type).shape[0])]


def part_of(fmt: Format, part: int, planes: list) -> ir.Value:
    """Returns the codes of one part from words of each byte plane: four codes, a byte each."""
    word, low = _located(fmt, part, planes)
    word = arith.shrui(word, constant(low)) if low else word
    return arith.andi(word, constant(((1 << fmt.bits) - 1) * 0x01010101)) if fmt.bits < 8 else word


def _located(fmt: Format, part: int, planes: list) -> tuple[ir.Value, int]:
    """Returns (word, low): each byte has a code of one part in its bits from `low` on, and others' bits."""
    first, low = divmod(part * fmt.bits, 8)
    if low + fmt.bits <= 8:
        return planes[first], low
    mask = (0xFF >> low) * 0x01010101
    begin = arith.andi(arith.shrui(planes[first], constant(low)), constant(mask))
    end = arith.andi(arith.shli(planes[first + 1], constant(8 - low)), constant(mask ^ 0xFFFFFFFF))
    return arith.ori(begin, end), 0


def plane_of(fmt: Format, k: int, parts: list) -> ir.Value:
    """Returns byte plane k from words of four codes of each part; `part_of` turned round."""
    word = None
    for part, codes in enumerate(parts):
        shift = part * fmt.bits - 8 * k
        if not -fmt.bits < shift < 8:
            continue
        moved = (arith.shli if shift > 0 else arith.shrui)(codes, constant(abs(shift))) if shift else codes
        if word is None:
            word = moved
            continue
        # The bits from the shift on: those above are the next part's, whose turn comes, or outside of the byte.
        mask = ((0xFF << max(0, shift)) & 0xFF) * 0x01010101
        word = arith.ori(arith.andi(moved, constant(mask)), arith.andi(word, constant(mask ^ 0xFFFFFFFF)))
    return word


def _low_bytes(pairs) -> list:
    """Returns, of vectors of two int32, words of the low bytes of four."""
    each = [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]
    return [gather_low_bytes(each[i : i + 4]) for i in range(0, len(each), 4)]


def floats_to_codes(pairs: list) -> ir.Value:
    """Rounds two vectors of two scaled float32: a word of four codes, whose bits above them are to be ignored."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    number = lambda value: arith.constant(f32, ir.FloatAttr.get(f32, value))
    each = [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]
    return gather_low_bytes([arith.bitcast(i32, arith.addf(value, number(float(ROUND_TO_INT)))) for value in each])


def gather_low_bytes(each: list) -> ir.Value:
    """Returns a word of the low bytes of four int32."""
    two = [permute_bytes(a, b, 0x0040) for a, b in (each[:2], each[2:])]
    return permute_bytes(*two, 0x5410)


def codes_to_floats(fmt: Format, part: int, planes: list, dtype) -> list:
    """Returns the values of one part's codes in words of each byte plane: two vectors of two, float32 or float16."""
    sign = 1 << (fmt.bits - 1)
    if fmt.bits < 8 and dtype == jnp.float32:
        return _without_permutations(fmt, *_located(fmt, part, planes))
    word = arith.xori(part_of(fmt, part, planes), constant(sign * 0x01010101))
    if dtype == jnp.float16:
        pairs = [permute_bytes(word, 0x64, selector) for selector in (0x4140, 0x4342)]
        bias = as_float16_pair(constant(_twice(1024.0 + sign)))
        return [arith.subf(as_float16_pair(pair), bias) for pair in pairs]
    f32 = ir.F32Type.get()
    bias = arith.constant(f32, ir.FloatAttr.get(f32, 8388608.0 + sign))
    singles = [arith.bitcast(f32, permute_bytes(word, 0x4B000000, 0x7440 + i)) for i in range(4)]
    return _pairs([arith.subf(single, bias) for single in singles])


def _without_permutations(fmt: Format, word, low: int) -> list:
    """Returns float32 of the codes in bits `low` and on of each byte."""
    sign, numbers = 1 << (fmt.bits - 1), [None] * 4
    mask, flip = ((1 << fmt.bits) - 1) << low, 0x6400 | sign << low
    f32 = ir.F32Type.get()
    for first in range(2):
        two = arith.shrui(word, constant(8)) if first else word
        # (two & mask) ^ flip in one instruction, of which no compiler makes it by itself.
        operands = [two, constant(mask * 0x00010001), constant(flip * 0x00010001)]
        two = _assembly("lop3.b32 $0, $1, $2, $3, 0x6A;", *operands)
        # 2^10 + c 2^low, and so 2^(10 - low) + c.
        operands = [two, *[constant(_twice(value)) for value in (2.0**-low, -(2.0 ** (10 - low)) - sign)]]
        pair = as_float16_pair(_assembly("fma.rn.f16x2 $0, $1, $2, $3;", *operands))
        pair = arith.extf(ir.VectorType.get((2,), f32), pair)
        numbers[first::2] = [vector.extract(pair, [], [i]) for i in range(2)]
    return _pairs(numbers)


def _pairs(numbers: list) -> list:
    pair_type = ir.VectorType.get((2,), numbers[0].type)
    return [vector.from_elements(pair_type, numbers[i : i + 2]) for i in range(0, len(numbers), 2)]


def _twice(value: float) -> int:
    """Returns a word of one float16 twice."""
    return int(np.float16(value).view(np.uint16)) * 0x00010001


def as_float16_pair(word) -> ir.Value:
    """Returns a word as two float16."""
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    return vector.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), vector.broadcast(one, word))


def permute_bytes(word, other: int | ir.Value, selector: int | ir.Value) -> ir.Value:
    """Returns bytes of `word` (0 to 3) and of `other` (4 to 7), lowest first as the selector's digits say."""
    value = lambda operand: constant(operand) if isinstance(operand, int) else operand
    kinds = "=r,r,r,n" if isinstance(selector, int) else "=r,r,r,r"
    operands = [word, value(other), value(selector)]
    return _assembly("prmt.b32 $0, $1, $2, $3;", *operands, kinds=kinds)


def _assembly(text: str, *operands, kinds: str = "=r,r,r,r") -> ir.Value:
    return llvm.inline_asm(ir.IntegerType.get_signless(32), operands, text, kinds, has_side_effects=False)
