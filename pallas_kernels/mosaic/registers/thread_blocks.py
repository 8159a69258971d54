"""One thread per block: unrotated blocks of 32, so that maxima and scales need no other thread.

Four threads share a row of 128, in the order of `layout.py`: thread q has columns 32 q to 32 q + 31, the row's block q,
and its codes are consecutive bytes. A value for each block is an array [64, 8], where thread q has columns 2 q and
2 q + 1: it stands there twice.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.formats import Format, packing_parts
from pallas_kernels.mosaic import interpreter
from pallas_kernels.mosaic.registers import layout, pack_float, pack_int
from pallas_kernels.mosaic.tiling import TILE_ROWS

BLOCK_ELEMENTS, ROW_ELEMENTS = 32, 128
BLOCK_COLUMNS = 2 * layout.THREADS_PER_ROW  # of an array with a value for each block
LINE_BYTES, ACCESS_BYTES = 128, 16  # a line of swizzled shared memory, and one access of a thread


def can_pack(fmt: Format) -> bool:
    """Returns whether `pack` and `unpack` have it: no code means NaN."""
    return fmt.scale != "site"


def block_maxima(x: jax.Array, interpret: bool) -> jax.Array:
    """Returns max |x| of each block as bits, int32[64, 8]. NaN is the largest, as of `tile_codec.block_max`."""
    magnitude = interpreter.magnitude_bits(x) if interpret else jnp.abs(x)
    runs = [magnitude[:, start : start + BLOCK_COLUMNS] for start in range(0, ROW_ELEMENTS, BLOCK_COLUMNS)]
    while len(runs) > 1:
        runs = [jnp.maximum(a, b) for a, b in zip(runs[::2], runs[1::2])]
    if interpret:
        return interpreter.pair_maxima(runs[0])
    result = plgpu.ShapeDtypeStruct((TILE_ROWS, BLOCK_COLUMNS), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def of_pairs(ctx, array):
        registers = np.empty(array.registers.shape, object)
        for index, pair in np.ndenumerate(array.registers):
            largest = arith.maximumf(*[vector.extract(pair, [], [i]) for i in range(2)])
            registers[index] = vector.broadcast(pair.type, largest)
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return lax.bitcast_convert_type(of_pairs(runs[0]), jnp.int32)


def spread(blocks: jax.Array) -> jax.Array:
    """Returns a value for each element, [64, 128], of one for each block [64, 8]; one for all stays."""
    return jnp.concatenate([blocks] * (ROW_ELEMENTS // BLOCK_COLUMNS), axis=1) if blocks.ndim else blocks


def pack(fmt: Format, ref, scaled: jax.Array, keep: jax.Array) -> None:
    """Rounds float32[64, 128], scaled and clipped, and writes the codes to `ref` [64, row_bytes].

    keep: int32[64, 8], for each block all ones, or zero where its codes shall be.
    """
    parts, row_bytes = packing_parts(fmt.bits), ref.shape[1]
    to_codes = functools.partial(pack_float.floats_to_codes, fmt) if fmt.is_float else pack_int.floats_to_codes

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, plgpu.Layout.WGMMA))
    def write(ctx, memory, scaled, keep):
        registers, keep, rows = scaled.registers.reshape(-1, 2), keep.registers.reshape(-1), []
        for half in range(2):
            pairs = list(registers[:, half])
            codes = [to_codes(pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
            width = len(codes) // parts
            of_parts = list(zip(*[codes[start : start + width] for start in range(0, len(codes), width)]))
            words = [pack_int.plane_of(fmt, k, list(four)) for k in range(parts * fmt.bits // 8) for four in of_parts]
            if fmt.element == "e2m1":
                words = [pack_float.e2m1_turned_back(word) for word in words]
            own = vector.extract(keep[half], [], [0])
            words = [arith.andi(word, own) for word in words]
            rows.append(vector.from_elements(ir.VectorType.get((len(words),), own.type), words))
        layout.write_run(memory, 0, row_bytes, rows)

    write(ref, scaled, keep)


def unpack(fmt: Format, ref) -> jax.Array:
    """Reads codes in memory [64, row_bytes]: their values, float32[64, 128]."""
    parts, row_bytes = packing_parts(fmt.bits), ref.shape[1]
    result = plgpu.ShapeDtypeStruct((TILE_ROWS, ROW_ELEMENTS), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def read(ctx, memory):
        registers = np.empty((BLOCK_ELEMENTS // 2, 2), object)
        for half, pieces in enumerate(layout.read_run(memory, 0, row_bytes)):
            words = pack_int.split_words(pieces)
            if fmt.element == "e2m1":
                registers[:, half] = pack_float.e2m1_values(words)
                continue
            width = len(words) * 8 // (fmt.bits * parts)  # words of a plane of bytes
            planes = [words[start : start + width] for start in range(0, len(words), width)]
            floats = functools.partial((pack_float if fmt.is_float else pack_int).codes_to_floats, fmt)
            found = [floats(part, of_planes, jnp.float32) for part in range(parts) for of_planes in zip(*planes)]
            registers[:, half] = [pair for two in found for pair in two]
        registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((TILE_ROWS, ROW_ELEMENTS)))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return read(ref)


def load_tile(ref, interpret: bool) -> jax.Array:
    """Reads a tile [64, 128] in shared memory, swizzled in lines of 128 bytes: float32[64, 128] in this order."""
    if interpret:
        return interpreter.load_tile(ref, layout.columns(ROW_ELEMENTS, ROW_ELEMENTS))
    result = plgpu.ShapeDtypeStruct((TILE_ROWS, ROW_ELEMENTS), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_transforms(ref.dtype)),), return_type=result)
    def load(ctx, memory):
        element = ir.MemRefType(memory.type).element_type
        two_floats = ir.VectorType.get((2,), ir.F32Type.get())
        count = ACCESS_BYTES // jnp.dtype(ref.dtype).itemsize
        registers = np.empty((BLOCK_ELEMENTS // 2, 2), object)
        for half, pointers in enumerate(_pieces(memory, count)):
            for k, pointer in enumerate(pointers):
                piece = llvm.LoadOp(ir.VectorType.get((count,), element), pointer, alignment=ACCESS_BYTES).res
                for i in range(count // 2):
                    pair = mgpu.utils.vector_slice(piece, slice(2 * i, 2 * i + 2))
                    if ref.dtype == jnp.bfloat16:
                        pair = _widened(pair)
                    elif ref.dtype == jnp.float16:
                        pair = arith.extf(two_floats, pair)
                    registers[k * count // 2 + i, half] = pair
        registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((TILE_ROWS, ROW_ELEMENTS)))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return load(ref)


def store_tile(ref, value: jax.Array, interpret: bool) -> None:
    """Writes what `load_tile` reads, a value in the dtype of `ref`."""
    if interpret:
        interpreter.store_tile(ref, value, np.argsort(layout.columns(ROW_ELEMENTS, ROW_ELEMENTS)))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_transforms(value.dtype)), plgpu.Layout.WGMMA))
    def store(ctx, memory, array):
        count = ACCESS_BYTES // jnp.dtype(value.dtype).itemsize
        registers = array.registers.reshape(-1, 2)
        for half, pointers in enumerate(_pieces(memory, count)):
            for k, pointer in enumerate(pointers):
                own = registers[k * count // 2 : (k + 1) * count // 2, half]
                llvm.StoreOp(mgpu.utils.vector_concat(list(own)), pointer, alignment=ACCESS_BYTES)

    store(ref, value)


def load_scales(ref, interpret: bool) -> jax.Array:
    """Reads the scale bytes of the rows' blocks in shared memory, uint8[64, 4]: int32[64, 8]."""
    if interpret:
        return interpreter.load_scales(ref)
    result = plgpu.ShapeDtypeStruct((TILE_ROWS, BLOCK_COLUMNS), jnp.int32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, memory):
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        loaded = [arith.extui(i32, llvm.LoadOp(i8, pointer, alignment=1).res) for pointer in _bytes(memory)]
        registers = np.array([vector.broadcast(ir.VectorType.get((2,), i32), byte) for byte in loaded], object)
        registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((TILE_ROWS, BLOCK_COLUMNS)))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=True)

    return load(ref)


def store_scales(ref, plane: jax.Array, interpret: bool) -> None:
    """Writes the low bytes of int32[64, 8] to memory of any kind, uint8[256]."""
    if interpret:
        interpreter.store_scales(ref, plane)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(ctx, memory, array):
        for pointer, register in zip(_bytes(memory), array.registers.reshape(-1)):
            byte = arith.trunci(ir.IntegerType.get_signless(8), vector.extract(register, [], [0]))
            llvm.StoreOp(byte, pointer, alignment=1)

    store(ref, plane)


def _widened(pair) -> ir.Value:
    """Widens two bfloat16 to float32 by one operation each: a compiler takes two for the upper one."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    word = vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), pair), [], [0])
    low, high = arith.shli(word, pack_int.constant(16)), arith.andi(word, pack_int.constant(0xFFFF0000))
    return vector.from_elements(ir.VectorType.get((2,), f32), [arith.bitcast(f32, x) for x in (low, high)])


def _transforms(dtype) -> tuple:
    """Returns the transforms of shared memory that `load_tile` reads."""
    return plgpu.TilingTransform((8, LINE_BYTES // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(LINE_BYTES)


def _bytes(memory) -> list:
    """Returns pointers of the thread's own two bytes, where memory has one byte for each block in rows of four."""
    row, q = layout.thread_row()
    base = mgpu.utils.getelementptr(
        mgpu.utils.memref_ptr(memory),
        [arith.addi(arith.muli(row, pack_int.constant(layout.THREADS_PER_ROW)), q)],
        ir.IntegerType.get_signless(8),
    )
    return [base, mgpu.utils.getelementptr(base, [8 * layout.THREADS_PER_ROW], ir.IntegerType.get_signless(8))]


def _pieces(memory, count: int) -> list[list]:
    """Returns the pointers of a thread's block in each of its two rows, in pieces of `count` elements.

    Groups of 8 rows are lines of 128 bytes, a group's first 128 bytes of all its rows before the next; in line i piece
    k stands at k ^ i.
    """
    i8, constant = ir.IntegerType.get_signless(8), pack_int.constant
    row, q = layout.thread_row()
    pieces = BLOCK_ELEMENTS // count
    lines = ROW_ELEMENTS // (8 * count)  # of a row
    line = arith.andi(row, constant(7))
    first = arith.muli(q, constant(pieces))
    group = arith.muli(arith.shrui(row, constant(3)), constant(8 * LINE_BYTES * lines))
    start = arith.addi(
        arith.muli(arith.shrui(first, constant(3)), constant(8 * LINE_BYTES)),
        arith.muli(line, constant(LINE_BYTES)),
    )
    own = arith.xori(arith.andi(first, constant(7)), line)
    base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [arith.addi(group, start)], i8)
    out = []
    for half in range(2):
        at = [arith.muli(arith.xori(own, constant(k)), constant(ACCESS_BYTES)) for k in range(pieces)]
        row_base = mgpu.utils.getelementptr(base, [half * 8 * LINE_BYTES * lines], i8)
        out.append([mgpu.utils.getelementptr(row_base, [offset], i8) for offset in at])
    return out
