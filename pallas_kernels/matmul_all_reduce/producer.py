"""Producer warps: they load operands, signal other ranks and wait for their signals, each at its own pace.

A signal takes a fence of microseconds, and so does waiting for one. Warps of their own keep that from the warpgroups.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul_all_reduce.plan import Plan
from pallas_kernels.matmul_all_reduce.shared_memory import Scratch
from pallas_kernels.matmul_all_reduce.support import FRAMES_PER_TILE, TILE_K, TILE_M, TILE_N
from pallas_kernels.nvlink.frame_transport import signal


def load_operands(plan: Plan, s: Scratch, *, x_g, w_g, hadamard_g) -> None:
    """Loads the operands of every step along K, as soon as a stage is empty. The work of one warp."""
    plgpu.copy_gmem_to_smem(hadamard_g, s.hadamard, s.hadamard_loaded)

    def load_tile(t, carry):
        row, column = plan.corner(plan.tile(t))

        def load_step(k, carry):
            i = t * plan.k_steps + k
            stage = lax.rem(i, jnp.int32(plan.operand_stages))
            pl.when(i >= plan.operand_stages)(lambda: plgpu.barrier_wait(s.operands_empty.at[stage]))
            inner, columns = pl.ds(k * TILE_K, TILE_K), pl.ds(column, TILE_N)
            w_tile = w_g.at[columns, inner] if plan.transposed else w_g.at[inner, columns]
            plgpu.copy_gmem_to_smem(x_g.at[pl.ds(row, TILE_M), inner], s.x.at[stage], s.operands_full.at[stage])
            plgpu.copy_gmem_to_smem(w_tile, s.w.at[stage], s.operands_full.at[stage])
            return carry

        return lax.fori_loop(0, plan.k_steps, load_step, carry)

    lax.fori_loop(0, plan.tile_count(), load_tile, 0)


def signal_terms(plan: Plan, s: Scratch) -> None:
    """Signals the owners once the frames of a tile are written. The work of one warp."""
    me = plan.rank()

    def signal_tile(t, carry):
        for pipeline in s.terms_sent:
            pipeline.wait(t)
        for own_rank in range(plan.ranks):

            @pl.when(me == own_rank)
            def _(own_rank=own_rank):
                frames = [divmod(f, plan.ranks) for f in range(FRAMES_PER_TILE) if f % plan.ranks != own_rank]
                signal([plan.remote_ref(s.terms_signal, owner).at[i, plan.sender_row(owner)] for i, owner in frames])

        return carry

    lax.fori_loop(0, plan.tile_count(), signal_tile, 0)


def signal_sums(plan: Plan, s: Scratch) -> None:
    """Signals all ranks once the own frames of a tile are summed and sent. The work of one warp."""

    def signal_tile(t, carry):
        s.sums_sent.wait(t)
        places = range(plan.frames_per_owner)
        signal([there for place in places for there in plan.owned_frame_on_all(s.sums_signal, 0, place)])
        return carry

    lax.fori_loop(0, plan.tile_count(), signal_tile, 0)


def watch_signals(plan: Plan, s: Scratch) -> None:
    """Waits for the signals of other ranks and passes them on to the summing warpgroup. The work of one warp."""
    me, tile_count = plan.rank(), plan.tile_count()

    def watch_tile(t, carry):
        @pl.when(t < tile_count)
        def _():
            for place in range(plan.frames_per_owner):
                for k in range(plan.ranks - 1):
                    source = k + (me <= k).astype(jnp.int32)
                    pl.semaphore_wait(s.terms_signal.at[place, source], t + 1, decrement=False)
            s.terms_received.arrive(t)

        @pl.when(t > 0)
        def _():
            for f in range(FRAMES_PER_TILE):
                pl.semaphore_wait(s.sums_signal.at[f], t, decrement=False)
            s.sums_received.arrive(t - 1)

        return carry

    lax.fori_loop(0, tile_count + 1, watch_tile, 0)
