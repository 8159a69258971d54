"""The loop that every kernel runs: tiles come in ahead of time, are worked on, and go out behind.

A CTA of a few warpgroups stays on each multiprocessor. Every warpgroup is a worker of its own, with `stages` tiles of
input in flight, and shares only the rotation's matrices with the others. While one waits for memory, another computes.
Worker i begins with tiles i, i + workers, ...; where there are many it draws the rest (`tickets.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic.support import SHARED_BYTES
from pallas_kernels.mosaic.tickets import Tickets, barrier
from pallas_kernels.mosaic.tiling import Tiling

# An axis of the mesh with the same name would be taken for it.
CTA, WARPGROUP = "taco_jax_cta", "taco_jax_warpgroup"
# Multiprocessors of an H100 or H200; where there are more they idle, where there are fewer CTAs queue.
MAX_CTAS = 132
# Setting a counter to zero takes about 2 us, which a kernel of that many tiles for each worker wins back.
MIN_ROUNDS = 16


@dataclass(frozen=True)
class Workers:
    """How many workers there are, and how they share the tiles."""

    tiles: int
    warpgroups: int
    may_draw: bool
    interpret: Any = None  # what `plgpu.kernel` takes: None on a GPU

    @property
    def ctas(self) -> int:
        return min(self.tiles, MAX_CTAS)

    @property
    def count(self) -> int:
        return self.ctas * self.warpgroups

    @property
    def draw(self) -> bool:
        """Whether they draw their tiles. The interpreter knows no counter."""
        able = self.may_draw and compat.KERNELS_TAKE_REFS and self.interpret is None
        return able and self.tiles >= MIN_ROUNDS * self.count

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


def fit(
    tiling: Tiling,
    shared_bytes: int,
    stage_bytes: int,
    other_bytes: int,
    *,
    stages: tuple[int, ...],
    enough: int,
    most: int,
    may_draw: bool,
) -> tuple[Workers, int]:
    """(workers of up to `most` warpgroups, the first of `stages` that leaves shared memory for `enough`, or the last).

    Bytes of shared memory: `shared_bytes` for all of a CTA's warpgroups, for each `stage_bytes` a stage and
    `other_bytes`.
    """
    wanted = max(1, min(most, -(-tiling.tiles // MAX_CTAS)))
    for count in stages:
        room = (SHARED_BYTES - shared_bytes) // (count * stage_bytes + other_bytes)
        if room >= min(enough, wanted):
            break
    return Workers(tiling.tiles, max(1, min(wanted, room)), may_draw, tiling.interpret), count


def run(workers: Workers, stages: int, load, work, carry, begin, tickets: Tickets | None):
    """load(tile, slot) starts the copies of a tile; work(tile, slot, parity, free, carry) -> carry uses them.

    `work` calls free() as soon as it has read the slot, which starts the copies of the tile that comes next into it;
    `parity` alternates 0, 1 for the outgoing buffers. begin() runs when the first copies are on their way.

    Mosaic sets no barriers (`compat.compiler_params`). Of one warpgroup's threads, those that matter are here, before
    copies that overwrite what others may still read, in `wait_smem_to_gmem` and in `commit_smem`.
    """
    first, stride = workers.index(), workers.count
    ahead = stages * stride
    for s in range(stages):

        @pl.when(first + s * stride < workers.tiles)
        def _(s=s):
            load(first + s * stride, jnp.int32(s))

    if tickets is not None:
        tickets.put(jnp.int32(-1), tickets.draw())
    begin()

    def advance(k, tile, carry):
        """Works on the k-th tile; returns (the carry, the tile that comes in instead)."""
        slot = lax.rem(k, jnp.int32(stages))
        number = None if tickets is None else tickets.draw()
        coming = lambda: tile + ahead if tickets is None else tickets.get(k - 1) + ahead

        def free():
            if workers.interpret is None:
                barrier()
            if tickets is not None:
                tickets.put(k, number)
            following = coming()

            @pl.when(following < workers.tiles)
            def _():
                load(following, slot)

        carry = work(tile, slot, lax.rem(k, jnp.int32(2)), free, carry)
        return carry, coming()

    if tickets is None:
        body = lambda k, carry: advance(k, first + k * stride, carry)[0]
        return lax.fori_loop(0, workers.steps(workers.tiles), body, carry)

    def step(state):
        k, queue, carry = state
        carry, following = advance(k, queue[0], carry)
        return k + 1, (*queue[1:], following), carry

    queue = tuple(first + s * stride for s in range(stages))
    return lax.while_loop(lambda state: state[1][0] < workers.tiles, step, (jnp.int32(0), queue, carry))[2]


def call(body, inputs, out_type, scratch, workers: Workers):
    """The kernel `body(tickets, *input refs, *output refs, *scratch refs)`; tickets are for `run`."""
    options = {} if workers.interpret is None else {"interpret": workers.interpret}
    if workers.warpgroups > 1:
        options |= {"num_threads": workers.warpgroups, "thread_name": WARPGROUP}

    def launch(body, inputs, scratch):
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch,
            grid=(workers.ctas,),
            grid_names=(CTA,),
            compiler_params=compat.compiler_params(),
            **options,
        )(*inputs)

    # The kernel has the body's name in profiles.
    @functools.wraps(body)
    def without_tickets(*refs):
        body(None, *refs)

    @functools.wraps(body)
    def with_tickets(*refs):
        counter_g, numbers_s = refs[len(inputs)], refs[-1]
        tickets = Tickets(counter_g, numbers_s.at[workers.warpgroup()])
        body(tickets, *refs[: len(inputs)], *refs[len(inputs) + 1 : -1])

    # A batch of calls is one after the other: each has its own counter.
    @jax.custom_batching.sequential_vmap
    def dynamic(*inputs):
        counter = jax.new_ref(jnp.zeros((1,), jnp.int32))
        return launch(with_tickets, [*inputs, counter], [*scratch, Tickets.scratch(workers.warpgroups)])

    if workers.draw:
        out = dynamic(*inputs)
    else:
        out = launch(without_tickets, inputs, scratch)
    # Else XLA may let the kernel write into its caller's update of a larger array, at any byte of it.
    return lax.optimization_barrier(out)
