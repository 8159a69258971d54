"""The loop that every kernel runs: tiles come in ahead of time, are worked on, and go out behind.

A CTA of a few warpgroups stays on each multiprocessor. Every warpgroup is a worker of its own: it takes tiles
worker, worker + workers, ... with `stages` tiles of input in flight, and shares only the rotation's matrices with the
others. While one waits for memory, another computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic.obstacles import SHARED_BYTES

CTA, WARPGROUP = "cta", "warpgroup"
# Multiprocessors of an H100 or H200; where there are more they idle, where there are fewer CTAs queue.
MAX_CTAS = 132


@dataclass(frozen=True)
class Workers:
    """How many workers there are, and how they share the tiles."""

    tiles: int
    warpgroups: int

    @staticmethod
    def fit(tiles: int, shared_bytes: int, bytes_each: int, most: int) -> Workers:
        """Up to `most` warpgroups, as the shared memory allows; `shared_bytes` are used by all of a CTA's."""
        room = (SHARED_BYTES - shared_bytes) // bytes_each
        return Workers(tiles, max(1, min(most, room, -(-tiles // MAX_CTAS))))

    @property
    def ctas(self) -> int:
        return min(self.tiles, MAX_CTAS)

    @property
    def count(self) -> int:
        return self.ctas * self.warpgroups

    def warpgroup(self):
        """The index of this warpgroup in its CTA."""
        return lax.axis_index(WARPGROUP) if self.warpgroups > 1 else jnp.int32(0)

    def index(self):
        """The index of this worker: neighbouring tiles go to different CTAs."""
        return self.warpgroup() * self.ctas + lax.axis_index(CTA)

    def steps(self, items: int):
        """How many of `items` this worker takes."""
        return lax.div(items - self.index() + self.count - 1, jnp.int32(self.count))

    def for_each(self, items: int, body) -> None:
        """body(i) for every i < items, shared among the workers."""

        def step(k, carry):
            body(self.index() + k * self.count)
            return carry

        lax.fori_loop(0, self.steps(items), step, 0)


def run(workers: Workers, stages: int, load, work, carry, begin):
    """load(tile, slot) starts the copies of a tile; work(tile, slot, parity, free, carry) -> carry uses them.

    `work` calls free() as soon as it has read the slot, which starts the copies of the tile that comes next into it;
    `parity` alternates 0, 1 for the outgoing buffers. begin() runs when the first copies are on their way.
    """
    first, stride, steps = workers.index(), workers.count, workers.steps(workers.tiles)
    for s in range(stages):

        @pl.when(s < steps)
        def _(s=s):
            load(first + s * stride, jnp.int32(s))

    begin()

    def body(k, carry):
        slot, tile = lax.rem(k, jnp.int32(stages)), first + k * stride

        def free():
            @pl.when(k + stages < steps)
            def _():
                load(tile + stages * stride, slot)

        return work(tile, slot, lax.rem(k, jnp.int32(2)), free, carry)

    return lax.fori_loop(0, steps, body, carry)


def call(body, inputs, out_type, scratch, workers: Workers, interpret=None):
    """The kernel `body(*input refs, *output refs, *scratch refs)`."""
    options = {} if interpret is None else {"interpret": interpret}
    if workers.warpgroups > 1:
        options |= {"num_threads": workers.warpgroups, "thread_name": WARPGROUP}
    out = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(workers.ctas,),
        grid_names=(CTA,),
        compiler_params=compat.compiler_params(),
        **options,
    )(*inputs)
    # Else XLA may let the kernel write into its caller's update of a larger array, at any byte of it.
    return lax.optimization_barrier(out)
