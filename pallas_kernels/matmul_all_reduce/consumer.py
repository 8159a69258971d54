"""Consumer warpgroups: two multiply and encode tiles, one sums the frames that arrive and decodes the sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels import compat
from pallas_kernels.matmul_all_reduce.hadamard import HALF_COLUMNS, hadamard_butterfly, hadamard_wgmma
from pallas_kernels.matmul_all_reduce.plan import FRAME_ROWS, Plan
from pallas_kernels.matmul_all_reduce.shared_memory import FRAMES_PER_WARPGROUP, PIPELINE_TILES, Scratch
from pallas_kernels.matmul_all_reduce.support import FRAMES_PER_TILE, TILE_N
from pallas_kernels.mosaic import rotation, tile_codec
from pallas_kernels.mosaic.wire_io import WireWriter
from pallas_kernels.nvlink.frame_transport import FrameCodec
from pallas_kernels.nvlink.tile_schedule import CTA_AXIS

# Factor of the orthonormal transform.
HADAMARD_SCALE = np.float32(1.0 / np.sqrt(TILE_N))
# Tiles whose own terms are kept: those that are ahead, one that is summed and one that is made.
OWN_TERM_TILES = PIPELINE_TILES + 2
WARPGROUP_THREADS, VECTOR_BYTES = 128, 16


class GlobalFrameCodec(FrameCodec):
    """Encodes and decodes frames in global memory, of this rank or another one, straight from registers."""

    def _codes(self, frame):
        return frame.at[pl.ds(0, self.code_bytes)]


@dataclass(frozen=True)
class ConsumerContext:
    """The objects that the consumers of a kernel use.

    terms_g [ranks, tiles * frames_per_owner, frame_bytes]: frames of this rank's sums, row r from rank r. sums_g
    [tiles * 4, frame_bytes]: frames of all sums. own_terms_g [ctas, frames_per_owner, OWN_TERM_TILES, 64 * 128]: own
    terms, float32. exponent(): the site's exponent or None.
    """

    plan: Plan
    s: Scratch
    frames: GlobalFrameCodec
    terms_g: Any
    sums_g: Any
    own_terms_g: Any
    exponent: Callable

    def own_term(self, place: int, t):
        """Returns where the own term of tile t is kept; `place` counts the own frames of a tile."""
        return self.own_terms_g.at[lax.axis_index(CTA_AXIS), place, lax.rem(t, jnp.int32(OWN_TERM_TILES))]


def multiply(context: ConsumerContext, warpgroup: int) -> jax.Array:
    """Multiplies, encodes and sends a half of every tile; returns the largest |z| that was encoded, as bits."""
    no_maxima = WireWriter.no_maxima(context.plan.frame_tiling)
    return lax.fori_loop(0, context.plan.tile_count(), functools.partial(_encode_tile, context, warpgroup), no_maxima)


def _encode_tile(context: ConsumerContext, warpgroup: int, t, largest):
    """Sends half of tile t as frames to their owners; the own frames stay as they are."""
    plan, s, me = context.plan, context.s, context.plan.rank()
    y = _matmul_tile(plan, s, t, warpgroup)
    for j in range(FRAMES_PER_WARPGROUP):
        f = warpgroup * FRAMES_PER_WARPGROUP + j
        owner, place = f % plan.ranks, f // plan.ranks
        # Rounded as the product by itself would be.
        y_j = y[j * FRAME_ROWS : (j + 1) * FRAME_ROWS].astype(jnp.bfloat16).astype(jnp.float32)
        z = hadamard_butterfly(y_j) * HADAMARD_SCALE

        def keep(largest, z=z, place=place):
            spill(context.own_term(place, t), z)
            s.own_terms.arrive(t)
            return largest

        def send(largest, z=z, owner=owner, place=place):
            rows = plan.remote_ref(context.terms_g, owner)
            frame = rows.at[plan.sender_row(owner), plan.tile(t) * plan.frames_per_owner + place]
            return jnp.maximum(largest, context.frames.encode(frame, [z], context.exponent()))

        largest = lax.cond(me == owner, keep, send, largest)
    s.terms_sent[warpgroup].arrive(t)
    return largest


def _matmul_tile(plan: Plan, s: Scratch, t, warpgroup: int) -> jax.Array:
    """Returns a warpgroup's half of tile t: float32[128, 128]."""
    stage_of = lambda k: lax.rem(t * plan.k_steps + k, jnp.int32(plan.operand_stages))
    half_rows = FRAMES_PER_WARPGROUP * FRAME_ROWS

    def accumulate(accumulator):
        def step(k, carry):
            stage = stage_of(k)
            plgpu.barrier_wait(s.operands_full.at[stage])
            x, w = s.x.at[stage, pl.ds(warpgroup * half_rows, half_rows)], s.w.at[stage]
            _wgmma_fence()
            plgpu.wgmma(accumulator, x, w.transpose((1, 0)) if plan.transposed else w)
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(s.operands_empty.at[stage_of(k - 1)]))
            return carry

        lax.fori_loop(0, plan.k_steps, step, 0)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s.operands_empty.at[stage_of(plan.k_steps - 1)])
        return accumulator[...]

    return pl.run_scoped(accumulate, plgpu.ACC((half_rows, TILE_N), jnp.float32))


def sum_and_receive(context: ConsumerContext, y_g) -> jax.Array:
    """Sums the own frames of every tile, and makes the result of the tile before; returns the largest |z| of sums."""
    tile_count = context.plan.tile_count()
    plgpu.barrier_wait(context.s.hadamard_loaded)

    def one(t, largest):
        combine = lambda largest: _combine_tile(context, t, largest)
        largest = lax.cond(t < tile_count, combine, lambda largest: largest, largest)
        pl.when(t > 0)(lambda: _receive_tile(context, y_g, t - 1))
        return largest

    return lax.fori_loop(0, tile_count + 1, one, WireWriter.no_maxima(context.plan.frame_tiling))


def _combine_tile(context: ConsumerContext, t, largest):
    """Sums the own frames of tile t, in rank order, and sends the sums to all ranks."""
    plan, s, me = context.plan, context.s, context.plan.rank()
    s.own_terms.wait(t)
    s.terms_received.wait(t)
    for place in range(plan.frames_per_owner):
        add_own = lambda total, place=place: add_spilled(total, context.own_term(place, t))
        total = plgpu.layout_cast(jnp.full((FRAME_ROWS, TILE_N), -0.0, jnp.float32), plgpu.Layout.WGMMA)
        for k in range(plan.ranks - 1):
            total = lax.cond(me == k, add_own, lambda z: z, total)
            source = k + (me <= k).astype(jnp.int32)
            frame = context.terms_g.at[source, plan.tile(t) * plan.frames_per_owner + place]
            total = total + context.frames.decode(frame, context.exponent())[0]
        total = lax.cond(me == plan.ranks - 1, add_own, lambda z: z, total)
        for there in plan.owned_frame_on_all(context.sums_g, plan.tile(t) * FRAMES_PER_TILE, place):
            largest = jnp.maximum(largest, context.frames.encode(there, [total], context.exponent()))
    s.sums_sent.arrive(t)
    return largest


def _receive_tile(context: ConsumerContext, y_g, t) -> None:
    """Decodes the sums of tile t into y."""
    plan, s, tile = context.plan, context.s, context.plan.tile(t)
    row, column = plan.corner(tile)
    s.sums_received.wait(t)

    def receive_frame(f, carry):
        frame = context.sums_g.at[tile * FRAMES_PER_TILE + f]
        scale = context.frames.scales(frame, context.exponent())
        codes = context.frames.codes(frame)[0].astype(jnp.bfloat16)
        for half, y in enumerate(hadamard_wgmma(codes, s.hadamard)):
            y = tile_codec.scale_rows(plan.frame_tiling, [y * HADAMARD_SCALE], scale)[0].astype(jnp.bfloat16)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before has left this half's memory
            compat.store_tile(s.y.at[half], y, rotation.transforms(jnp.bfloat16, HALF_COLUMNS), False)
            plgpu.commit_smem()
            there = pl.ds(row + f * FRAME_ROWS, FRAME_ROWS), pl.ds(column + half * HALF_COLUMNS, HALF_COLUMNS)
            plgpu.copy_smem_to_gmem(s.y.at[half], y_g.at[there])
        return carry

    lax.fori_loop(0, FRAMES_PER_TILE, receive_frame, 0)


def _wgmma_fence() -> None:
    """Stands before every product of a loop: else ptxas puts one where it finds none, and serialises all products."""

    @plgpu.inline_mgpu()
    def fence(ctx):
        nvvm.wgmma_fence_aligned()

    fence()


def spill(ref, values: jax.Array) -> None:
    """Writes float32[64, n] in the layout of a product to global memory, float32[64 * n].

    `add_spilled` reads each value in the thread with the same place in its warpgroup: no order is needed.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(ctx, memory, array):
        registers = list(array.registers.reshape(-1))
        for k, pointer in enumerate(_thread_vectors(memory, len(registers) // 2)):
            vector = mgpu.utils.vector_concat(registers[2 * k : 2 * k + 2])
            llvm.StoreOp(vector, pointer, alignment=VECTOR_BYTES)

    store(ref, values)


def add_spilled(values: jax.Array, ref) -> jax.Array:
    """Returns values + what `spill` wrote to ref."""
    result = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA), return_type=result)
    def add(ctx, memory, array):
        registers = list(array.registers.reshape(-1))
        four = ir.VectorType.get((VECTOR_BYTES // 4,), ir.F32Type.get())
        for k, pointer in enumerate(_thread_vectors(memory, len(registers) // 2)):
            vector = llvm.LoadOp(four, pointer, alignment=VECTOR_BYTES).res
            for i in range(2):
                two = mgpu.utils.vector_slice(vector, slice(2 * i, 2 * i + 2))
                registers[2 * k + i] = arith.addf(registers[2 * k + i], two)
        out = np.array(registers, object).reshape(array.registers.shape)
        return mgpu.FragmentedArray(_registers=out, _layout=array.layout, _is_signed=None)

    return add(ref, values)


def _thread_vectors(memory, count: int) -> list:
    """Returns pointers to a thread's vectors; vector k of all threads lie together."""
    i32, i8, utils = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8), mgpu.utils
    thread = arith.remui(utils.thread_idx(), arith.constant(i32, WARPGROUP_THREADS))
    offset = arith.muli(thread, arith.constant(i32, VECTOR_BYTES))
    base = utils.getelementptr(utils.memref_ptr(memory), [offset], i8)
    return [utils.getelementptr(base, [k * WARPGROUP_THREADS * VECTOR_BYTES], i8) for k in range(count)]
