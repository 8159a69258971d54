"""The roles of the warpgroups of a CTA. Each does one thing for all of the CTA's tiles, at the same time as the others.

| role | takes | gives |
|---|---|---|
| `send` | tiles of x | frames, to the message's owner or to every rank |
| `combine` | a tile's frames from all ranks, the owner's own x | their sum: a frame to every rank, or values |
| `receive` | frames, one by one | their values, rotated back, in y |

Copy warps bring and take frames (`frame_transport.py`). Sums are float32, in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import tile_codec
from pallas_kernels.mosaic.rotation import Rotator
from pallas_kernels.mosaic.tiling import TILE_ROWS
from pallas_kernels.mosaic.wire_io import WireWriter
from pallas_kernels.nvlink.frame_transport import FrameCodec, FrameSlots
from pallas_kernels.nvlink.tile_schedule import CombineOrder, ReceiveOrder, SendOrder, TileSchedule


@dataclass(frozen=True)
class RoleContext:
    """The objects that every role uses: schedule, frames, rotation with its matrices, and the site's exponent."""

    schedule: TileSchedule
    frames: FrameCodec
    rotator: Rotator
    matrices_s: Any
    exponent: Any

    def no_maxima(self):
        """Returns the largest |z| of no tile, as bits."""
        return WireWriter.no_maxima(self.schedule.tiling)


@dataclass(frozen=True)
class InputTiles:
    """Tiles of x that are loaded ahead: x_s [stages, 64, row], with barriers from first_barrier on."""

    context: RoleContext
    x_g: Any
    x_s: Any
    loaded: Any
    stages: int
    first_barrier: Any = 0

    def load(self, message, step, i) -> None:
        """Starts the copy of a message's tile, the i-th that this warpgroup loads."""
        schedule, stage = self.context.schedule, lax.rem(i, jnp.int32(self.stages))
        rows = pl.ds(schedule.tiling.x_row(message, schedule.first_row(schedule.tile(step))), TILE_ROWS)
        plgpu.copy_gmem_to_smem(self.x_g.at[rows], self.x_s.at[stage], self.loaded.at[self.first_barrier + stage])

    def rotated(self, i) -> list:
        """Waits for the i-th tile and returns its rotated blocks."""
        stage = lax.rem(i, jnp.int32(self.stages))
        plgpu.barrier_wait(self.loaded.at[self.first_barrier + stage])
        return self.context.rotator.rotate(self.x_s.at[stage], self.context.matrices_s)


@dataclass(frozen=True)
class OutputTiles:
    """Tiles of values on their way to y: y_s [buffers, 64, row], swizzled as y's copies are."""

    context: RoleContext
    y_g: Any
    y_s: Any
    buffers: int
    transforms: tuple

    def store(self, k, row, values: list) -> None:
        """Starts the copy of the k-th tile to the rows of y from `row` on."""
        plgpu.wait_smem_to_gmem(self.buffers - 1, wait_read_only=True)
        buffer = self.y_s.at[lax.rem(k, jnp.int32(self.buffers))]
        values = [v.astype(self.y_s.dtype) for v in values]
        tile_codec.store_tile(self.context.schedule.tiling, buffer, values, self.transforms)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, self.y_g.at[pl.ds(row, TILE_ROWS)])


def send(context: RoleContext, order: SendOrder, x: InputTiles, outgoing: FrameSlots, *, wait_for_matrices):
    """Encodes every tile of x into a frame; returns the largest |z|, as bits."""
    total = order.total()

    def load(i):
        step, distance = order.place(i)
        x.load(context.schedule.peer(distance) if order.to_owners else jnp.int32(0), step, i)

    _load_first(x.stages, total, load)
    wait_for_matrices()

    def work(i, largest):
        z = x.rotated(i)
        found = context.frames.encode(outgoing.producer_acquire(i), z, context.exponent)
        outgoing.producer_commit(i)  # and its barrier: all threads have read the tile
        _load_next(i, x.stages, total, load)
        return jnp.maximum(largest, found)

    return lax.fori_loop(0, total, work, context.no_maxima())


def combine(
    context: RoleContext,
    order: CombineOrder,
    incoming: FrameSlots,
    own_x: InputTiles | None,
    *,
    store,
    starts_with_term: bool,
    wait_for_matrices,
):
    """Sums every tile's frames; returns the largest |z| of the sums that are encoded, as bits.

    store(step, k, sum) -> largest |z| takes the sum of the warpgroup's k-th tile. starts_with_term: a sum starts with
    its first term, which saves registers that a zero would need; else with -0, which changes no sum.
    """
    me, tile_count = context.schedule.rank(), order.tile_count()
    own_rank = me if own_x is not None else jnp.int32(context.schedule.ranks)

    def load(k):
        if own_x is not None:
            own_x.load(me, order.step(k), k)

    if own_x is not None:
        _load_first(own_x.stages, tile_count, load)
    wait_for_matrices()

    def work(k, largest):
        add = lambda total, z: tuple(a + b for a, b in zip(total, z))

        def frame_term(rank):
            slot = order.slot(k, rank)
            z = tuple(context.frames.decode(incoming.consumer_wait(slot), context.exponent))
            incoming.consumer_release(slot)
            return z

        def own_term():
            return tuple(own_x.rotated(k))

        def add_frames(first, end, total):
            return lax.fori_loop(first, end, lambda rank, total: add(total, frame_term(rank)), total)

        # As in `mosaic/kernels.py`, to the bit: where a product and its sum meet, they are rounded once.
        ranks_before = lambda: add_frames(jnp.int32(1), own_rank, frame_term(jnp.int32(0)))
        if own_x is None:
            total = ranks_before()
        elif starts_with_term:
            total = lax.cond(me == 0, own_term, lambda: add(ranks_before(), own_term()))
        else:
            tiling = context.schedule.tiling
            zero = plgpu.layout_cast(jnp.full((TILE_ROWS, tiling.chunk), -0.0, jnp.float32), plgpu.Layout.WGMMA)
            total = lax.cond(me == 0, lambda: (zero,) * (tiling.row_elements // tiling.chunk), ranks_before)
            total = add(total, own_term())
        if own_x is not None:
            total = add_frames(me + 1, jnp.int32(context.schedule.ranks), total)
        found = store(order.step(k), k, list(total))  # and its barrier: all threads have read the own tile
        if own_x is not None:
            _load_next(k, own_x.stages, tile_count, load)
        return jnp.maximum(largest, found)

    return lax.fori_loop(0, tile_count, work, context.no_maxima())


def store_in_frames(context: RoleContext, outgoing: FrameSlots):
    """Returns `store` of `combine` for sums that are sent on: each becomes a frame."""

    def store(step, k, z):
        found = context.frames.encode(outgoing.producer_acquire(k), z, context.exponent)
        outgoing.producer_commit(k)
        return found

    return store


def store_in_values(context: RoleContext, y: OutputTiles):
    """Returns `store` of `combine` for sums that are results: each is rotated back, into the rows of one message."""

    def store(step, k, z):
        z = context.rotator.unrotate(z, context.matrices_s, y.y_s.dtype)
        y.store(k, context.schedule.first_row(context.schedule.tile(step)), z)
        return context.no_maxima()

    return store


def receive(context: RoleContext, order: ReceiveOrder, incoming: FrameSlots, y: OutputTiles, *, wait_for_matrices):
    """Decodes every rank's frames, this one's too, each into its message's rows of y."""
    schedule, rotator = context.schedule, context.rotator
    wait_for_matrices()

    def work(k, carry):
        source, step, slot = order.place(k)
        frame_s = incoming.consumer_wait(slot)
        codes = context.frames.codes(frame_s, rotator.dtype if rotator.dtype == jnp.float16 else jnp.float32)
        scales = context.frames.scales(frame_s, context.exponent)
        incoming.consumer_release(slot)
        values = tile_codec.scale_rows(schedule.tiling, rotator.unrotate_codes(codes, context.matrices_s), scales)
        y.store(k, source * schedule.tiling.rows + schedule.first_row(schedule.tile(step)), values)
        return carry

    lax.fori_loop(0, order.total(), work, 0)


def _load_first(stages: int, total, load) -> None:
    """load(i) of the first `stages` tiles."""
    for i in range(stages):

        @pl.when(i < total)
        def _(i=i):
            load(jnp.int32(i))


def _load_next(i, stages: int, total, load) -> None:
    """load(i + stages), into the stage that tile i had."""

    @pl.when(i + stages < total)
    def _():
        load(i + stages)
