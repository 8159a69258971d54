"""Values of a warpgroup in global memory, read by the same thread of a warpgroup: no order, no barrier."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

THREADS, PIECE_BYTES = 128, 16


def put(ref, values: jax.Array) -> None:
    """float32[64, n] in the layout of a product -> ref float32[64 * n]."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(ctx, memory, array):
        registers = list(array.registers.reshape(-1))
        for k, pointer in enumerate(_pieces(memory, len(registers) // 2)):
            piece = mgpu.utils.vector_concat(registers[2 * k : 2 * k + 2])
            llvm.StoreOp(piece, pointer, alignment=PIECE_BYTES)

    store(ref, values)


def plus(values: jax.Array, ref) -> jax.Array:
    """values + what `put` wrote to ref."""
    result = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA), return_type=result)
    def add(ctx, memory, array):
        registers = list(array.registers.reshape(-1))
        four = ir.VectorType.get((PIECE_BYTES // 4,), ir.F32Type.get())
        for k, pointer in enumerate(_pieces(memory, len(registers) // 2)):
            piece = llvm.LoadOp(four, pointer, alignment=PIECE_BYTES).res
            for i in range(2):
                two = mgpu.utils.vector_slice(piece, slice(2 * i, 2 * i + 2))
                registers[2 * k + i] = arith.addf(registers[2 * k + i], two)
        out = np.array(registers, object).reshape(array.registers.shape)
        return mgpu.FragmentedArray(_registers=out, _layout=array.layout, _is_signed=None)

    return add(ref, values)


def _pieces(memory, count: int) -> list:
    """Where a thread's pieces lie: piece k of all threads together."""
    i32, i8, utils = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8), mgpu.utils
    thread = arith.remui(utils.thread_idx(), arith.constant(i32, THREADS))
    offset = arith.muli(thread, arith.constant(i32, PIECE_BYTES))
    base = utils.getelementptr(utils.memref_ptr(memory), [offset], i8)
    return [utils.getelementptr(base, [k * THREADS * PIECE_BYTES], i8) for k in range(count)]
