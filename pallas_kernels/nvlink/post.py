"""Frames on their way: those that work on them fill and read slots of shared memory, couriers do the rest.

A courier is a warp. One takes full slots, copies each frame to the peers' buffers, waits until it is there and signals
that: only the fence of a signal, which takes microseconds, and the wait before it keep it from the next one, and nobody
waits for it while there are free slots. Others wait for signals and fetch the frames. Every slot has two barriers: what
is in it is there (`full`), and is used (`free`).

A fetching courier reads with bulk copies, which go another way through the memory system than the wait before them:
the fence between them is `fence.proxy.async`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.nvlink.deal import Deal


@dataclass(frozen=True)
class Slots:
    """Shared memory for some frames, uint8[count, bytes], and both barriers of each, from `first` on."""

    frames_s: Any
    full: Any
    free: Any
    count: int
    first: Any = 0

    @property
    def lag(self) -> int:
        """How many frames are sent after one before its slot is free again and it is announced: in a busy link each
        takes that long. Not more, or a worker and its courier would wait for each other."""
        return self.count - 1

    def index(self, i):
        return lax.rem(i, jnp.int32(self.count))

    def wait(self, barriers, slot) -> None:
        plgpu.barrier_wait(barriers.at[self.first + slot])

    def arrive(self, barriers, slot) -> None:
        plgpu.barrier_arrive(barriers.at[self.first + slot])

    # The workers' side

    def to_fill(self, i):
        """The frame i that a worker may fill."""

        @pl.when(i >= self.count)
        def _():
            self.wait(self.free, self.index(i))

        return self.frames_s.at[self.index(i)]

    def filled(self, i) -> None:
        plgpu.commit_smem()
        self.arrive(self.full, self.index(i))

    def to_read(self, slot):
        """The frame in a slot, when it is there."""
        self.wait(self.full, slot)
        return self.frames_s.at[slot]

    def read(self, slot) -> None:
        self.arrive(self.free, slot)


def deliver(deal: Deal, slots: Slots, buffer_g, signals, sending) -> None:
    """A courier's work: the frames of `sending` (`orders.py`) go to their ranks, which are signalled group by group.

    buffer_g [ranks, tiles, bytes]: where frames arrive, on every rank; row r is what rank r sent. signals: semaphores
    [ranks] of this CTA, alike.
    """
    total, targets = sending.total(), sending.targets
    lag = slots.lag

    def announce(i, sent_since: int):
        step, distance = sending.place(i)
        ends_step = (targets > 1) | (distance == sending.each)

        @pl.when((i >= 0) & ends_step & deal.ends_group(step))
        def _():
            plgpu.wait_smem_to_gmem(sent_since * targets, wait_read_only=False)
            peers = [deal.device(deal.peer(d)) for d in range(1, max(targets, sending.each) + 1)]
            signal([plgpu.remote_ref(signals, peer).at[deal.rank()] for peer in peers])

    def send(i, carry):
        step, distance = sending.place(i)
        slot = slots.index(i)
        slots.wait(slots.full, slot)
        for k in range(targets):
            there = plgpu.remote_ref(buffer_g, deal.device(deal.peer(distance + k)))
            plgpu.copy_smem_to_gmem(slots.frames_s.at[slot], there.at[deal.rank(), deal.tile(step)])
        plgpu.wait_smem_to_gmem(lag * targets, wait_read_only=True)

        @pl.when(i >= lag)
        def _():
            slots.arrive(slots.free, slots.index(i - lag))

        announce(i - lag, lag)
        return carry

    lax.fori_loop(0, total, send, 0)
    for behind in reversed(range(lag)):
        announce(total - 1 - behind, behind)


def fetch(deal: Deal, slots: Slots, buffer_g, signals, order) -> None:
    """A courier's work: the frames of `order` (`orders.py`), each once its rank has signalled it."""

    def one(i, carry):
        source, step, slot = order.place(i)

        @pl.when(i >= slots.count)
        def _():
            slots.wait(slots.free, slot)

        pl.semaphore_wait(signals.at[source], deal.signals(step), decrement=False)
        _fence()
        plgpu.copy_gmem_to_smem(
            buffer_g.at[source, deal.tile(step)], slots.frames_s.at[slot], slots.full.at[slots.first + slot],
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )  # fmt: skip
        return carry

    lax.fori_loop(0, order.total(), one, 0)


def _fence() -> None:
    """What was seen before it, by loads, is seen by bulk copies after it."""

    @plgpu.inline_mgpu()
    def fence(ctx):
        mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()


def signal(semaphores: list) -> None:
    """Adds one to each: whoever sees it sees what this thread saw before. One fence, which takes microseconds."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(semaphores))
    def add(ctx, *semaphores):
        utils = mgpu.utils
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARP)):
            utils.inline_ptx("fence.acq_rel.sys;", has_side_effects=True)
            for semaphore in semaphores:
                text = "red.relaxed.sys.global.add.u32 [$0], 1;"
                utils.inline_ptx(text, utils.memref_ptr(semaphore), has_side_effects=True)

    add(*semaphores)
