"""What the warpgroups of a CTA do, each one thing for all of the CTA's tiles, at the same time.

| role | takes | gives |
|---|---|---|
| `send` | tiles of x | frames, to the message's owner or to every rank |
| `combine` | a tile's frames from all ranks, for the owner's his own x | their sum: a frame to every rank, or values |
| `receive` | frames, one by one | their values, rotated back, in y |

The couriers that bring and take frames are in `post.py`, the order in which a role uses them in `orders.py`.
Nobody waits for who comes after him, and buffers hold whole messages, so there is always somebody who can go on.
Sums are float32, in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import tile_codec as blocks
from pallas_kernels.mosaic.rotation import Rotator
from pallas_kernels.mosaic.tiling import TILE_ROWS as ROWS
from pallas_kernels.mosaic.wire_io import WireWriter as Writer
from pallas_kernels.nvlink.deal import Deal
from pallas_kernels.nvlink.frames import Frames
from pallas_kernels.nvlink.orders import Combining, Receiving, Sending
from pallas_kernels.nvlink.post import Slots


@dataclass(frozen=True)
class Desk:
    """What every role of a kernel has: the tiles, the codec's constants in shared memory, and the site's exponent."""

    deal: Deal
    frames: Frames
    rotator: Rotator
    matrices_s: Any
    exponent: Any

    def nothing(self):
        return Writer.nothing(self.deal.tiling)


@dataclass(frozen=True)
class Tiles:
    """Tiles of x, read ahead of time: `load` what `take` waits for. x_s [stages, 64, row]; barriers from `first` on."""

    desk: Desk
    x_g: Any
    x_s: Any
    barriers: Any
    stages: int
    first: Any = 0

    def load(self, message, step, i) -> None:
        deal, slot = self.desk.deal, lax.rem(i, jnp.int32(self.stages))
        rows = pl.ds(deal.tiling.x_row(message, deal.row(deal.tile(step))), ROWS)
        plgpu.copy_gmem_to_smem(self.x_g.at[rows], self.x_s.at[slot], self.barriers.at[self.first + slot])

    def take(self, i) -> list:
        """The rotated tile i."""
        slot = lax.rem(i, jnp.int32(self.stages))
        plgpu.barrier_wait(self.barriers.at[self.first + slot])
        return self.desk.rotator.rotate(self.x_s.at[slot], self.desk.matrices_s)


@dataclass(frozen=True)
class Values:
    """Values on their way to y: y_s [buffers, 64, row], swizzled as y's copies are."""

    desk: Desk
    y_g: Any
    y_s: Any
    buffers: int
    transforms: tuple

    def put(self, k, row, values: list) -> None:
        plgpu.wait_smem_to_gmem(self.buffers - 1, wait_read_only=True)
        buffer = self.y_s.at[lax.rem(k, jnp.int32(self.buffers))]
        values = [v.astype(self.y_s.dtype) for v in values]
        blocks.store_tile(self.desk.deal.tiling, buffer, values, self.transforms)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, self.y_g.at[pl.ds(row, ROWS)])


def send(desk: Desk, sending: Sending, tiles: Tiles, outgoing: Slots, begin):
    """Every tile of x as a frame; returns the largest |z|, as bits."""
    total = sending.total()

    def load(i):
        step, distance = sending.place(i)
        tiles.load(desk.deal.peer(distance) if sending.to_owners else jnp.int32(0), step, i)

    _ahead(tiles.stages, total, load)
    begin()

    def work(i, largest):
        z = tiles.take(i)
        found = desk.frames.write(outgoing.to_fill(i), z, desk.exponent)
        outgoing.filled(i)  # and its barrier: all threads have read the tile
        _next(i, tiles.stages, total, load)
        return jnp.maximum(largest, found)

    return lax.fori_loop(0, total, work, desk.nothing())


def combine(desk: Desk, combining: Combining, incoming: Slots, own: Tiles | None, begin, put, begins_with_term: bool):
    """The sum of every tile's frames, given to put(step, k, sum) -> largest; k counts what this warpgroup has done."""
    deal, me, count = desk.deal, desk.deal.rank(), combining.count()
    skipped = me if own is not None else jnp.int32(deal.ranks)

    def load(k):
        if own is not None:
            own.load(me, combining.step(k), k)

    if own is not None:
        _ahead(own.stages, count, load)
    begin()

    def work(k, largest):
        add = lambda total, z: tuple(a + b for a, b in zip(total, z))

        def theirs(p):
            slot = combining.slot(k, p)
            z = tuple(desk.frames.values(incoming.to_read(slot), desk.exponent))
            incoming.read(slot)
            return z

        def ours():
            return tuple(own.take(k))

        def several(begin, end, total):
            return lax.fori_loop(begin, end, lambda p, total: add(total, theirs(p)), total)

        # As in `mosaic/kernels.py`, to the bit: where a product and its sum meet, they are rounded once.
        before = lambda: several(jnp.int32(1), skipped, theirs(jnp.int32(0)))
        if own is None:
            total = before()
        elif begins_with_term:
            total = lax.cond(me == 0, ours, lambda: add(before(), ours()))
        else:
            zero = plgpu.layout_cast(jnp.full((ROWS, deal.tiling.chunk), -0.0, jnp.float32), plgpu.Layout.WGMMA)
            total = lax.cond(me == 0, lambda: (zero,) * (deal.tiling.row // deal.tiling.chunk), before)
            total = add(total, ours())
        if own is not None:
            total = several(me + 1, jnp.int32(deal.ranks), total)
        found = put(combining.step(k), k, list(total))  # and its barrier: all threads have read the own tile
        if own is not None:
            _next(k, own.stages, count, load)
        return jnp.maximum(largest, found)

    return lax.fori_loop(0, count, work, desk.nothing())


def to_frames(desk: Desk, outgoing: Slots):
    """`put` of `combine`: the sum as a frame."""

    def put(step, k, z):
        found = desk.frames.write(outgoing.to_fill(k), z, desk.exponent)
        outgoing.filled(k)
        return found

    return put


def to_values(desk: Desk, values: Values):
    """`put` of `combine`: the sum is rotated back, into the rows of one message."""

    def put(step, k, z):
        z = desk.rotator.unrotate(z, desk.matrices_s, values.y_s.dtype)
        values.put(k, desk.deal.row(desk.deal.tile(step)), z)
        return desk.nothing()

    return put


def receive(desk: Desk, receiving: Receiving, incoming: Slots, values: Values, begin):
    """Every rank's frames, this one's too, each into its message's rows of y."""
    deal, rotator = desk.deal, desk.rotator
    begin()

    def work(k, carry):
        source, step, slot = receiving.place(k)
        frame_s = incoming.to_read(slot)
        codes = desk.frames.codes(frame_s, rotator.dtype if rotator.dtype == jnp.float16 else jnp.float32)
        scales = desk.frames.scales(frame_s, desk.exponent)
        incoming.read(slot)
        out = blocks.scale_rows(deal.tiling, rotator.unrotate_codes(codes, desk.matrices_s), scales)
        values.put(k, source * deal.tiling.rows + deal.row(deal.tile(step)), out)
        return carry

    lax.fori_loop(0, receiving.total(), work, 0)


def _ahead(stages: int, total, load) -> None:
    """load(i) of the first few i."""
    for i in range(stages):

        @pl.when(i < total)
        def _(i=i):
            load(jnp.int32(i))


def _next(i, stages: int, total, load) -> None:
    """load(i + stages), into the memory that i had."""

    @pl.when(i + stages < total)
    def _():
        load(i + stages)
