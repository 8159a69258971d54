"""Who works on which tile, and when the others hear of it.

CTA c of every rank works on tiles c, c + CTAs, ... of each message, so CTAs talk only to those of the same number. What
a CTA sends is announced in groups of a few steps: a signal costs about a microsecond of fences.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic.pipeline import MAX_CTAS
from pallas_kernels.mosaic.tiling import Tiling

# An axis of the mesh with the same name would be taken for it.
CTA, ROLE = "taco_jax_cta", "taco_jax_role"
# A group has at most so many steps, and a CTA at least so many groups: the next role waits for the first one.
MOST_STEPS, GROUPS = 4, 8


@dataclass(frozen=True)
class Deal:
    """The tiles of `ranks` messages (or of one message that every rank has), dealt to CTAs.

    axis: the mesh axis of the ranks.
    """

    tiling: Tiling
    ranks: int
    axis: str

    @property
    def tiles(self) -> int:
        """Of one message."""
        return self.tiling.tiles_per_message

    @property
    def ctas(self) -> int:
        return min(self.tiles, MAX_CTAS)

    @property
    def group(self) -> int:
        """Steps of a group."""
        return max(1, min(MOST_STEPS, -(-self.tiles // self.ctas) // GROUPS))

    def rank(self):
        return lax.axis_index(self.axis)

    def peer(self, distance):
        """The rank `distance` further on: each sends to another one at any time."""
        return lax.rem(self.rank() + distance, jnp.int32(self.ranks))

    def device(self, rank) -> dict:
        """A rank's device, as remote refs and signals name it: the others' axes stay as they are."""
        return {self.axis: rank}

    def steps(self):
        """How many tiles of a message this CTA works on."""
        return lax.div(self.tiles - lax.axis_index(CTA) + self.ctas - 1, jnp.int32(self.ctas))

    def tile(self, step):
        return lax.axis_index(CTA) + step * self.ctas

    def row(self, tile):
        """The first row of a message's tile."""
        return self.tiling.locate(tile)[1]

    def signals(self, step):
        """How many signals must have come from a rank before the frame of its step is there."""
        return lax.div(step, jnp.int32(self.group)) + 1

    def ends_group(self, step):
        return (lax.rem(step, jnp.int32(self.group)) == self.group - 1) | (step == self.steps() - 1)
