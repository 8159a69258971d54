"""Warps that load operands, signal other ranks and watch for their signals: each at its own pace, ahead of the others.

A signal takes a fence of microseconds, and so does waiting for one: none of it keeps a warpgroup from its work.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.nvlink.frame_transport import signal
from pallas_kernels.product.lines import hear, tell
from pallas_kernels.product.plan import Plan
from pallas_kernels.product.sizes import FRAMES, TILE_K, TILE_M, TILE_N, WORKERS


def load(plan: Plan, s: dict, x_g, w_g, m_g) -> None:
    """A warp's work: the operands of every step, as soon as there is a stage for them."""
    plgpu.copy_gmem_to_smem(m_g, s["matrix"], s["matrix_full"])

    def tile(t, carry):
        row, column = plan.corner(plan.tile(t))

        def step(k, carry):
            i = t * plan.steps_k + k
            stage = lax.rem(i, jnp.int32(plan.stages))
            pl.when(i >= plan.stages)(lambda: plgpu.barrier_wait(s["used"].at[stage]))
            inner, columns = pl.ds(k * TILE_K, TILE_K), pl.ds(column, TILE_N)
            w_tile = w_g.at[columns, inner] if plan.transposed else w_g.at[inner, columns]
            plgpu.copy_gmem_to_smem(x_g.at[pl.ds(row, TILE_M), inner], s["a"].at[stage], s["loaded"].at[stage])
            plgpu.copy_gmem_to_smem(w_tile, s["b"].at[stage], s["loaded"].at[stage])
            return carry

        return lax.fori_loop(0, plan.steps_k, step, carry)

    lax.fori_loop(0, plan.steps(), tile, 0)


def announce_terms(plan: Plan, s: dict) -> None:
    """A warp's work: signals owners, once warpgroups have written the frames of a tile."""
    me = plan.rank()

    def one(t, carry):
        for worker in range(WORKERS):
            hear(s, f"terms_out{worker}", t)
        for own in range(plan.ranks):

            @pl.when(me == own)
            def _(own=own):
                others = [divmod(f, plan.ranks) for f in range(FRAMES) if f % plan.ranks != own]
                signal([plan.at(s["terms"], owner).at[place, plan.sender(owner)] for place, owner in others])

        return carry

    lax.fori_loop(0, plan.steps(), one, 0)


def announce_sums(plan: Plan, s: dict) -> None:
    """A warp's work: signals all, once the own frames of a tile are summed and sent."""

    def one(t, carry):
        hear(s, "sums_out", t)
        signal([there for place in range(plan.own) for there in plan.everywhere(s["sums"], 0, place)])
        return carry

    lax.fori_loop(0, plan.steps(), one, 0)


def watch(plan: Plan, s: dict) -> None:
    """A warp's work: waits for signals, which takes fences, and tells what has come in."""
    me, steps = plan.rank(), plan.steps()

    def one(t, carry):
        @pl.when(t < steps)
        def _():
            for place in range(plan.own):
                for k in range(plan.ranks - 1):
                    source = k + (me <= k).astype(jnp.int32)
                    pl.semaphore_wait(s["terms"].at[place, source], t + 1, decrement=False)
            tell(s, "terms_in", t)

        @pl.when(t > 0)
        def _():
            for f in range(FRAMES):
                pl.semaphore_wait(s["sums"].at[f], t, decrement=False)
            tell(s, "sums_in", t - 1)

        return carry

    lax.fori_loop(0, steps + 1, one, 0)
