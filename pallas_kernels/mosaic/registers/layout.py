"""The register layout of rotated blocks: an order of columns in which a thread's codes are consecutive bytes of a row.

A tensor core's product gives the four threads of a row columns 0 1, 2 3, 4 5, 6 7 of every eight. As codes these would
be moved through shared memory two bytes at a time, eight threads to the same bank. But the columns of H may come in any
order: here position 8 j + 2 q + e of a run of w columns (q: which of the four threads) is column q w / 4 + 2 j + e. So
thread q has a quarter of the run, which it moves at once. A run is what one plane of bytes holds: a part of a block
that shares its bytes with other parts, at most 128 columns.

Blocks that are not rotated lie in registers as they do in memory, but for those of `thread_blocks`, whose run is a row.

`pitch`: bytes from one row to the next, where a memory has no second dimension that says it (global memory).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.formats import Format, packing_parts
from pallas_kernels.mosaic import interpreter
from pallas_kernels.mosaic.tiling import TILE_ROWS

THREADS_PER_ROW = 4  # of a product's registers (WGMMA)
MAX_ACCESS_BYTES = 16  # of one load or store of a thread: 128 bits
MAX_RUN_COLUMNS = 128  # columns of a product's accumulator


def applies(fmt: Format) -> bool:
    """Returns whether blocks of this format lie in that order: rotated ones do."""
    return fmt.rotation != "none"


def run_columns(fmt: Format) -> int:
    """Returns w, the columns of a block that one plane of bytes holds, rotated or not."""
    return min(fmt.block // packing_parts(fmt.bits), MAX_RUN_COLUMNS)


@functools.cache
def columns(width: int, run: int) -> np.ndarray:
    """Returns the column that each of `width` positions holds, int[width]."""
    quarter = np.arange(run).reshape(THREADS_PER_ROW, run // 8, 2).swapaxes(0, 1).reshape(-1)
    return np.concatenate([start + quarter for start in range(0, width, run)])


def column_of(position: jax.Array, run: int) -> jax.Array:
    """Returns `columns` of an array of positions, uint32, by arithmetic."""
    start, p = position & np.uint32(-run % 2**32), position & np.uint32(run - 1)
    q = (p >> np.uint32(1)) & np.uint32(3)
    return start + q * np.uint32(run // THREADS_PER_ROW) + ((p >> np.uint32(3)) << np.uint32(1)) + (p & np.uint32(1))


def store_run(ref, run, start: int, interpret: bool, pitch: int | None = None) -> None:
    """Writes positions uint8[64, w] to bytes start..start + w of the rows of `ref` [64, row_bytes]."""
    width = run.shape[1]
    if interpret:
        interpreter.store_run(ref, run, start, np.argsort(columns(width, width)))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def move(ctx, memory, array):
        registers = array.registers.reshape(-1, 2)
        rows = [mgpu.utils.vector_concat(list(registers[:, half])) for half in range(2)]
        write_run(memory, start, width, rows, pitch)

    move(ref, run)


def load_run(ref, start: int, width: int, interpret: bool, pitch: int | None = None) -> jax.Array:
    """Reads what `store_run` writes: uint8[64, w] in the layout of a product."""
    if interpret:
        return interpreter.load_run(ref, start, width, columns(width, width))
    result = plgpu.ShapeDtypeStruct((TILE_ROWS, width), jnp.uint8, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def move(ctx, memory):
        layout, size = mgpu.WGMMA_LAYOUT, _access_bytes(width)
        registers = np.empty((width // 8, 2), object)
        for half, pieces in enumerate(read_run(memory, start, width, pitch)):
            for k, words in enumerate(pieces):
                bytes_ = vector.bitcast(ir.VectorType.get((size,), ir.IntegerType.get_signless(8)), words)
                for i in range(size // 2):
                    registers[k * size // 2 + i, half] = mgpu.utils.vector_slice(bytes_, slice(2 * i, 2 * i + 2))
        registers = registers.reshape(layout.registers_shape((TILE_ROWS, width)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=False)

    return move(ref)


def read_run(memory, start: int, width: int, pitch: int | None = None) -> list[list]:
    """Reads, in an inlined function, a thread's bytes of a run as vectors of words: those of row r, then of r + 8."""
    size = _access_bytes(width)
    load = lambda pointer: llvm.LoadOp(_words_type(size), pointer, alignment=size).res
    return [[load(pointer) for pointer in pointers] for pointers in _addresses(memory, start, width, pitch)]


def write_run(memory, start: int, width: int, rows: list, pitch: int | None = None) -> None:
    """Writes, in an inlined function, what `read_run` reads, given all bytes of each of the two rows as one vector."""
    size = _access_bytes(width)
    for row, pointers in zip(rows, _addresses(memory, start, width, pitch)):
        each = ir.VectorType(row.type).shape[0] * size // (width // THREADS_PER_ROW)
        for k, pointer in enumerate(pointers):
            piece = mgpu.utils.vector_slice(row, slice(k * each, (k + 1) * each))
            llvm.StoreOp(vector.bitcast(_words_type(size), piece), pointer, alignment=size)


def thread_row() -> tuple[ir.Value, ir.Value]:
    """Returns, in an inlined function, the first of a thread's two rows (the other is 8 below), and its place in it."""
    constant = lambda value: arith.constant(ir.IntegerType.get_signless(32), value)
    thread = arith.remui(mgpu.utils.thread_idx(), constant(128))
    # Warp i has rows 16 i and on, four neighbouring threads one row of them.
    row = arith.addi(
        arith.muli(arith.divui(thread, constant(32)), constant(16)),
        arith.divui(arith.remui(thread, constant(32)), constant(THREADS_PER_ROW)),
    )
    return row, arith.remui(thread, constant(THREADS_PER_ROW))


def _access_bytes(width: int) -> int:
    """Returns what a thread moves at once of a run of `width` bytes."""
    return math.gcd(width // THREADS_PER_ROW, MAX_ACCESS_BYTES)


def _words_type(size: int) -> ir.Type:
    """Returns the vector type of `size` bytes that memory is accessed with."""
    bits = 8 * min(size, 4)
    return ir.VectorType.get((max(1, size // 4),), ir.IntegerType.get_signless(bits))


def _addresses(memory, start: int, width: int, pitch: int | None = None) -> list[list]:
    """Returns where a thread's bytes lie: for each of its two rows (r and r + 8), the pieces that it moves at once."""
    i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    constant = lambda value: arith.constant(i32, value)
    pitch = pitch or ir.MemRefType(memory.type).shape[1]
    row, thread = thread_row()
    offset = arith.addi(arith.muli(row, constant(pitch)), arith.muli(thread, constant(width // THREADS_PER_ROW)))
    base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [offset], i8)
    size = _access_bytes(width)
    at = lambda half, k: mgpu.utils.getelementptr(base, [half * 8 * pitch + start + k * size], i8)
    return [[at(half, k) for k in range(width // THREADS_PER_ROW // size)] for half in range(2)]
