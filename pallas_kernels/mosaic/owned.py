"""Blocks of 32 that are not rotated: each thread has whole ones, so that maxima and scales need no other thread.

Four threads share a row of 128, in the order of `interleaving`: thread q has columns 32 q to 32 q + 31, the row's block
q, and its codes are consecutive bytes. A value for each block is an array [64, 8], where thread q has columns 2 q and
2 q + 1: it stands there twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.formats import packing_parts
from pallas_kernels.mosaic import elements, interleaving, packing, quads, scales
from pallas_kernels.mosaic.tiling import ROWS, Tiling

COLUMNS = 2 * interleaving.THREADS  # of an array with a value for each block
_BLOCK, _ROW, _LINE, _PIECE = 32, 128, 128, 16  # elements, elements; bytes of a swizzled line, and of one access


def encode(tiling: Tiling, x, exponent, noise, codes_s) -> tuple[jax.Array, list]:
    """`blocks.encode` of one array float32[64, 128]; maxima and scale bytes are arrays [64, 8]."""
    fmt, interpret = tiling.fmt, tiling.interpret is not None
    bits = _maxima(x, interpret)
    multiplier, finite, planes = scales.compute(fmt, lax.bitcast_convert_type(bits, jnp.float32), exponent)
    keep = jnp.where(finite, np.int32(-1), np.int32(0))
    scaled = x * _spread(multiplier)
    if quads.applies(fmt) and noise is None and not interpret:
        quads.store(fmt, codes_s, elements.clip(fmt, scaled, interpret), keep)
        return bits, [planes]
    keep = _spread(keep) != 0
    codes = elements.to_codes(fmt, jnp.where(keep, scaled, np.float32(0)), noise, interpret)
    if fmt.scale == "site":
        codes = jnp.where(keep, codes.astype(jnp.int32), jnp.int32(fmt.nan))
        codes = codes.astype(jnp.uint8) if fmt.bits == 8 else codes
    bytes_ = [codes]
    if fmt.bits < 8:
        width = _ROW // packing_parts(fmt.bits)
        bytes_ = packing.pack(fmt, [codes[:, start : start + width] for start in range(0, _ROW, width)])
    row = bytes_[0] if len(bytes_) == 1 else jnp.concatenate(bytes_, axis=1)
    interleaving.store(codes_s, row, 0, interpret)
    return bits, [planes]


def decode(tiling: Tiling, codes_s) -> jax.Array:
    """Codes in shared memory [64, row_bytes] -> their values, float32[64, 128], without the scales."""
    fmt, interpret = tiling.fmt, tiling.interpret is not None
    if quads.applies(fmt) and not interpret:
        return quads.values(fmt, codes_s)
    row = interleaving.load(codes_s, 0, tiling.row_bytes, interpret)
    if fmt.bits == 8:
        return elements.from_codes(fmt, row)
    width = _ROW // packing_parts(fmt.bits)
    parts = packing.unpack(fmt, [row[:, start : start + width] for start in range(0, tiling.row_bytes, width)])
    return elements.from_codes(fmt, jnp.concatenate(parts, axis=1))


def scale(values: jax.Array, scale: jax.Array) -> jax.Array:
    """values [64, 128] times the scale of their block [64, 8], or one for all."""
    return values * _spread(scale)


def load_tile(ref, interpret: bool) -> jax.Array:
    """A tile [64, 128] in shared memory, swizzled in lines of 128 bytes -> float32[64, 128] in this order."""
    if interpret:
        x = ref[...].astype(jnp.float32)
        return jnp.stack([x[:, c] for c in interleaving.columns(_ROW, _ROW)], axis=1)
    result = plgpu.ShapeDtypeStruct((ROWS, _ROW), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_transforms(ref.dtype)),), return_type=result)
    def load(ctx, memory):
        element = ir.MemRefType(memory.type).element_type
        two_floats = ir.VectorType.get((2,), ir.F32Type.get())
        count = _PIECE // jnp.dtype(ref.dtype).itemsize
        registers = np.empty((_BLOCK // 2, 2), object)
        for half, pointers in enumerate(_pieces(memory, count)):
            for k, pointer in enumerate(pointers):
                piece = llvm.LoadOp(ir.VectorType.get((count,), element), pointer, alignment=_PIECE).res
                for i in range(count // 2):
                    pair = mgpu.utils.vector_slice(piece, slice(2 * i, 2 * i + 2))
                    if ref.dtype == jnp.bfloat16:
                        pair = _widened(pair)
                    elif ref.dtype == jnp.float16:
                        pair = arith.extf(two_floats, pair)
                    registers[k * count // 2 + i, half] = pair
        registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, _ROW)))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return load(ref)


def store_tile(ref, value: jax.Array, interpret: bool) -> None:
    """The inverse of `load_tile`, of a value in the dtype of `ref`."""
    if interpret:
        order = np.argsort(interleaving.columns(_ROW, _ROW))
        ref[...] = jnp.stack([value[:, p] for p in order], axis=1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_transforms(value.dtype)), plgpu.Layout.WGMMA))
    def store(ctx, memory, array):
        count = _PIECE // jnp.dtype(value.dtype).itemsize
        registers = array.registers.reshape(-1, 2)
        for half, pointers in enumerate(_pieces(memory, count)):
            for k, pointer in enumerate(pointers):
                own = registers[k * count // 2 : (k + 1) * count // 2, half]
                llvm.StoreOp(mgpu.utils.vector_concat(list(own)), pointer, alignment=_PIECE)

    store(ref, value)


def load_scales(ref, interpret: bool) -> jax.Array:
    """Scale bytes of the rows' blocks in shared memory, uint8[64, 4] -> int32[64, 8]."""
    if interpret:
        return jnp.repeat(ref[...].astype(jnp.int32) & 0xFF, 2, axis=1)
    result = plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, memory):
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        loaded = [arith.extui(i32, llvm.LoadOp(i8, pointer, alignment=1).res) for pointer in _bytes(memory)]
        registers = np.array([vector.broadcast(ir.VectorType.get((2,), i32), byte) for byte in loaded], object)
        registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, COLUMNS)))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=True)

    return load(ref)


def store_scales(ref, plane: jax.Array, interpret: bool) -> None:
    """int32[64, 8] -> their low bytes in memory of any kind, uint8[256]."""
    if interpret:
        ref[...] = plane[:, ::2].astype(jnp.uint8).reshape(ref.shape)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(ctx, memory, array):
        for pointer, register in zip(_bytes(memory), array.registers.reshape(-1)):
            byte = arith.trunci(ir.IntegerType.get_signless(8), vector.extract(register, [], [0]))
            llvm.StoreOp(byte, pointer, alignment=1)

    store(ref, plane)


def _maxima(x: jax.Array, interpret: bool) -> jax.Array:
    """max |x| of each block as bits, int32[64, 8]; see `blocks`: NaN is the largest."""
    magnitude = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF if interpret else jnp.abs(x)
    runs = [magnitude[:, start : start + COLUMNS] for start in range(0, _ROW, COLUMNS)]
    while len(runs) > 1:
        runs = [jnp.maximum(a, b) for a, b in zip(runs[::2], runs[1::2])]
    if interpret:
        return jnp.repeat(runs[0].reshape(ROWS, interleaving.THREADS, 2).max(2), 2, axis=1)
    result = plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def of_pairs(ctx, array):
        registers = np.empty(array.registers.shape, object)
        for index, pair in np.ndenumerate(array.registers):
            largest = arith.maximumf(*[vector.extract(pair, [], [i]) for i in range(2)])
            registers[index] = vector.broadcast(pair.type, largest)
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return lax.bitcast_convert_type(of_pairs(runs[0]), jnp.int32)


def _spread(blocks: jax.Array) -> jax.Array:
    """A value for each block [64, 8] -> for each of its elements, [64, 128]; one for all stays."""
    return jnp.concatenate([blocks] * (_ROW // COLUMNS), axis=1) if blocks.ndim else blocks


def _widened(pair) -> ir.Value:
    """Two bfloat16 -> float32, by one operation each: a compiler takes two for the upper one."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    word = vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), pair), [], [0])
    low, high = arith.shli(word, quads.constant(16)), arith.andi(word, quads.constant(0xFFFF0000))
    return vector.from_elements(ir.VectorType.get((2,), f32), [arith.bitcast(f32, x) for x in (low, high)])


def _transforms(dtype) -> tuple:
    """What `load_tile` expects of the shared memory."""
    return plgpu.TilingTransform((8, _LINE // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(_LINE)


def _bytes(memory) -> list:
    """Of one byte for each block, rows of four: the pointers of a thread's own two."""
    row, q = interleaving.thread_row()
    base = mgpu.utils.getelementptr(
        mgpu.utils.memref_ptr(memory),
        [arith.addi(arith.muli(row, quads.constant(interleaving.THREADS)), q)],
        ir.IntegerType.get_signless(8),
    )
    return [base, mgpu.utils.getelementptr(base, [8 * interleaving.THREADS], ir.IntegerType.get_signless(8))]


def _pieces(memory, count: int) -> list[list]:
    """The pointers of a thread's block in each of its two rows, in pieces of `count` elements.

    Groups of 8 rows are lines of 128 bytes, a group's first 128 bytes of all its rows before the next; in line i piece
    k stands at k ^ i.
    """
    i8, constant = ir.IntegerType.get_signless(8), quads.constant
    row, q = interleaving.thread_row()
    pieces = _BLOCK // count
    lines = _ROW // (8 * count)  # of a row
    line = arith.andi(row, constant(7))
    first = arith.muli(q, constant(pieces))
    group = arith.muli(arith.shrui(row, constant(3)), constant(8 * _LINE * lines))
    start = arith.addi(
        arith.muli(arith.shrui(first, constant(3)), constant(8 * _LINE)), arith.muli(line, constant(_LINE))
    )
    own = arith.xori(arith.andi(first, constant(7)), line)
    base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [arith.addi(group, start)], i8)
    out = []
    for half in range(2):
        at = [arith.muli(arith.xori(own, constant(k)), constant(_PIECE)) for k in range(pieces)]
        row_base = mgpu.utils.getelementptr(base, [half * 8 * _LINE * lines], i8)
        out.append([mgpu.utils.getelementptr(row_base, [offset], i8) for offset in at])
    return out
