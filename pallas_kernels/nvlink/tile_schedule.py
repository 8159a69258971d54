"""The static tile schedule: which CTA works on which tile, in which order frames move, and when they are signalled.

CTA c of every rank works on tiles c, c + CTAs, ... of each message. So a CTA exchanges frames only with the CTAs of the
same number. A step is one tile of every message. A warpgroup and its copy warp follow the same order object.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic.pipeline import MAX_CTAS
from pallas_kernels.mosaic.tiling import Tiling

# Names of a kernel's own axes. A mesh axis of the same name would be taken for them.
CTA_AXIS, ROLE_AXIS = "taco_jax_cta", "taco_jax_role"
# A signal costs about a microsecond of fences, so one stands for a few steps. The next role waits for the first signal,
# so a CTA sends at least a few.
MAX_STEPS_PER_SIGNAL, MIN_SIGNALS = 4, 8


@dataclass(frozen=True)
class TileSchedule:
    """The tiles of `ranks` messages, or of one message that every rank has, shared out among CTAs.

    axis: the mesh axis of the ranks.
    """

    tiling: Tiling
    ranks: int
    axis: str

    @property
    def message_tiles(self) -> int:
        """Returns the number of tiles of one message."""
        return self.tiling.tiles_per_message

    @property
    def ctas(self) -> int:
        return min(self.message_tiles, MAX_CTAS)

    @property
    def steps_per_signal(self) -> int:
        return max(1, min(MAX_STEPS_PER_SIGNAL, -(-self.message_tiles // self.ctas) // MIN_SIGNALS))

    def rank(self):
        return lax.axis_index(self.axis)

    def peer(self, distance):
        """Returns the rank `distance` further on: at any time each rank sends to another one."""
        return lax.rem(self.rank() + distance, jnp.int32(self.ranks))

    def device(self, rank) -> dict:
        """Returns a rank's device as remote refs and signals name it. Indices on other mesh axes stay as they are."""
        return {self.axis: rank}

    def step_count(self):
        """Returns how many tiles of a message this CTA works on."""
        return lax.div(self.message_tiles - lax.axis_index(CTA_AXIS) + self.ctas - 1, jnp.int32(self.ctas))

    def tile(self, step):
        return lax.axis_index(CTA_AXIS) + step * self.ctas

    def first_row(self, tile):
        """Returns the first row of a message's tile."""
        return self.tiling.locate(tile)[1]

    def signals_before(self, step):
        """Returns how many signals must have come from a rank before its frame of this step is there."""
        return lax.div(step, jnp.int32(self.steps_per_signal)) + 1

    def signals_after(self, step):
        """Returns whether a rank signals when it has sent its frames of this step."""
        last_of_signal = lax.rem(step, jnp.int32(self.steps_per_signal)) == self.steps_per_signal - 1
        return last_of_signal | (step == self.step_count() - 1)


@dataclass(frozen=True)
class SendOrder:
    """The frames that a CTA sends, in order.

    to_owners: each step sends the tile of every other rank's message to its owner. Otherwise each step sends the tile
    of the only message to every rank, this one last.
    """

    schedule: TileSchedule
    to_owners: bool

    @property
    def ranks_per_frame(self) -> int:
        return 1 if self.to_owners else self.schedule.ranks

    @property
    def frames_per_step(self) -> int:
        return self.schedule.ranks - 1 if self.to_owners else 1

    def total(self):
        return self.schedule.step_count() * self.frames_per_step

    def place(self, i):
        """Returns (step of frame i, distance of the rank that it goes to, or of the first one)."""
        return lax.div(i, jnp.int32(self.frames_per_step)), lax.rem(i, jnp.int32(self.frames_per_step)) + 1


@dataclass(frozen=True)
class CombineOrder:
    """The frames that a warpgroup sums, in order: those of all sources for its steps first, first + stride, ...

    Frames are fetched from the next rank on, since all ranks signal at about the same time. Each lies in its rank's
    slot.

    has_own_term: this rank's x stands for its own frame. sets: tiles whose frames have slots.
    """

    schedule: TileSchedule
    has_own_term: bool
    first: int
    stride: int
    sets: int

    @property
    def sources(self) -> int:
        return self.schedule.ranks - self.has_own_term

    def tile_count(self):
        return lax.div(self.schedule.step_count() - self.first + self.stride - 1, jnp.int32(self.stride))

    def step(self, k):
        return self.first + k * self.stride

    def slot(self, k, source):
        """Returns the slot of a rank's frame for the k-th tile."""
        place = source - (source > self.schedule.rank()).astype(jnp.int32) if self.has_own_term else source
        return lax.rem(k, jnp.int32(self.sets)) * self.sources + place

    def total(self):
        return self.tile_count() * self.sources

    def place(self, i):
        """Returns (rank that sent frame i, its step, its slot)."""
        k = lax.div(i, jnp.int32(self.sources))
        source = self.schedule.peer(lax.rem(i, jnp.int32(self.sources)) + 1)
        return source, self.step(k), self.slot(k, source)


@dataclass(frozen=True)
class ReceiveOrder:
    """The frames that a warpgroup receives, in order: frames first, first + stride, ... of all; a step's from the next
    rank on."""

    schedule: TileSchedule
    first: int
    stride: int
    slots: int

    def total(self):
        frames = self.schedule.step_count() * self.schedule.ranks
        return lax.div(frames - self.first + self.stride - 1, jnp.int32(self.stride))

    def place(self, k):
        """Returns (rank that sent the k-th frame, its step, its slot)."""
        i = self.first + k * self.stride
        source = self.schedule.peer(lax.rem(i, jnp.int32(self.schedule.ranks)) + 1)
        return source, lax.div(i, jnp.int32(self.schedule.ranks)), lax.rem(k, jnp.int32(self.slots))
