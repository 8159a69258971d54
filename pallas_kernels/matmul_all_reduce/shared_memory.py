"""The shared memory and barriers of one CTA, and the mbarrier pipeline between its roles.

The table at the head of `kernel.py` says what each array is for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul_all_reduce import hadamard
from pallas_kernels.matmul_all_reduce.plan import FRAME_ROWS, Plan
from pallas_kernels.matmul_all_reduce.support import FRAMES_PER_TILE, TILE_K, TILE_M, TILE_N
from pallas_kernels.mosaic import rotation

MATMUL_WARPGROUPS = 2
FRAMES_PER_WARPGROUP = FRAMES_PER_TILE // MATMUL_WARPGROUPS
# Tiles that one role may be ahead of the next one.
PIPELINE_TILES = 2


class Pipeline(NamedTuple):
    """An mbarrier pipeline: one role arrives once for each tile, the next role waits for it.

    No waiter may miss a phase of a barrier, so the role that arrives is at most PIPELINE_TILES tiles ahead.
    """

    arrived: Any
    taken: Any

    @classmethod
    def types(cls, arrivals: int = 1) -> Pipeline:
        """Returns the barriers of a pipeline; `arrivals` arrivals complete a tile."""
        arrived = plgpu.Barrier(num_arrivals=arrivals, num_barriers=PIPELINE_TILES)
        return cls(arrived, plgpu.Barrier(num_barriers=PIPELINE_TILES))

    def arrive(self, t) -> None:
        """Tells the next role that tile t is done."""
        slot = lax.rem(t, jnp.int32(PIPELINE_TILES))
        pl.when(t >= PIPELINE_TILES)(lambda: plgpu.barrier_wait(self.taken.at[slot]))
        plgpu.barrier_arrive(self.arrived.at[slot])

    def wait(self, t) -> None:
        """Waits until tile t is done."""
        slot = lax.rem(t, jnp.int32(PIPELINE_TILES))
        plgpu.barrier_wait(self.arrived.at[slot])
        plgpu.barrier_arrive(self.taken.at[slot])


class Scratch(NamedTuple):
    """Shared memory, barriers and semaphores of one CTA."""

    x: Any
    w: Any
    operands_full: Any
    operands_empty: Any
    y: Any
    hadamard: Any
    hadamard_loaded: Any
    terms_signal: Any
    sums_signal: Any
    terms_sent: tuple[Pipeline, ...]
    sums_sent: Pipeline
    terms_received: Pipeline
    sums_received: Pipeline
    own_terms: Pipeline

    @classmethod
    def types(cls, plan: Plan) -> Scratch:
        swizzled = rotation.transforms(jnp.bfloat16, TILE_K)
        w_tile = (TILE_N, TILE_K) if plan.transposed else (TILE_K, TILE_N)
        return cls(
            x=plgpu.SMEM((plan.operand_stages, TILE_M, TILE_K), jnp.bfloat16, transforms=swizzled),
            w=plgpu.SMEM((plan.operand_stages, *w_tile), jnp.bfloat16, transforms=swizzled),
            operands_full=plgpu.Barrier(num_arrivals=2, num_barriers=plan.operand_stages),
            operands_empty=plgpu.Barrier(num_arrivals=MATMUL_WARPGROUPS, num_barriers=plan.operand_stages),
            y=plgpu.SMEM((2, FRAME_ROWS, hadamard.HALF_COLUMNS), jnp.bfloat16, transforms=swizzled),
            hadamard=hadamard.matrix_scratch(),
            hadamard_loaded=plgpu.Barrier(),
            terms_signal=plgpu.SemaphoreType.REGULAR((plan.frames_per_owner, plan.ranks)),
            sums_signal=plgpu.SemaphoreType.REGULAR((FRAMES_PER_TILE,)),
            terms_sent=(Pipeline.types(),) * MATMUL_WARPGROUPS,
            sums_sent=Pipeline.types(),
            terms_received=Pipeline.types(),
            sums_received=Pipeline.types(),
            own_terms=Pipeline.types(arrivals=plan.frames_per_owner),
        )
