"""In which order frames are sent, summed and received: what a worker and his courier must agree on.

A step is one tile of every message (`deal.py`). Counts and places are of the CTA that asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from pallas_kernels.nvlink.deal import Deal


@dataclass(frozen=True)
class Sending:
    """Which frames a CTA sends, in order: with owners the tile of each other rank's message, to him; else the tile of
    the only message, to every rank, this one last."""

    deal: Deal
    to_owners: bool

    @property
    def targets(self) -> int:
        """Ranks that a frame goes to."""
        return 1 if self.to_owners else self.deal.ranks

    @property
    def each(self) -> int:
        """Frames of a step."""
        return self.deal.ranks - 1 if self.to_owners else 1

    def total(self):
        return self.deal.steps() * self.each

    def place(self, i):
        """(step, distance of the rank, or of the first one)."""
        return lax.div(i, jnp.int32(self.each)), lax.rem(i, jnp.int32(self.each)) + 1


@dataclass(frozen=True)
class Combining:
    """Which frames a warpgroup sums, in order: of its steps first, first + stride, ... those of every source, from the
    next rank on, since all signal at about the same time; each in the place of its rank."""

    deal: Deal
    owned: bool  # this rank's x stands for its own frame
    first: int
    stride: int
    sets: int  # tiles whose frames have slots

    @property
    def sources(self) -> int:
        return self.deal.ranks - self.owned

    def count(self):
        return lax.div(self.deal.steps() - self.first + self.stride - 1, jnp.int32(self.stride))

    def step(self, k):
        return self.first + k * self.stride

    def slot(self, k, source):
        """Of a rank's frame for the k-th tile."""
        place = source - (source > self.deal.rank()).astype(jnp.int32) if self.owned else source
        return lax.rem(k, jnp.int32(self.sets)) * self.sources + place

    def total(self):
        return self.count() * self.sources

    def place(self, i):
        """(rank that sent frame i, its step, the slot that it shall be in)."""
        k = lax.div(i, jnp.int32(self.sources))
        source = self.deal.peer(lax.rem(i, jnp.int32(self.sources)) + 1)
        return source, self.step(k), self.slot(k, source)


@dataclass(frozen=True)
class Receiving:
    """Which frames a warpgroup receives, in order: every first + k stride of all, a step's from the next rank on."""

    deal: Deal
    first: int
    stride: int
    slots: int

    def total(self):
        return lax.div(self.deal.steps() * self.deal.ranks - self.first + self.stride - 1, jnp.int32(self.stride))

    def place(self, k):
        """As of `Combining`."""
        i = self.first + k * self.stride
        source = self.deal.peer(lax.rem(i, jnp.int32(self.deal.ranks)) + 1)
        return source, lax.div(i, jnp.int32(self.deal.ranks)), lax.rem(k, jnp.int32(self.slots))
