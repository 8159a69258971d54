"""Which tiles a product has, who computes, sums and receives them, and in which memory.

A tile is 256 rows and 128 columns of the product, four frames of 64 rows. Frame f of every tile is summed by rank
f mod P, so that all ranks have the same share of every tile. CTA c of every rank has the same tiles, and deals only
with the CTAs c of the others.

Dim letters: M rows, K inner dimension, N columns of a product, T tiles, F frames of a tile, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import Format, Geometry
from pallas_kernels.mosaic.pipeline import MAX_CTAS
from pallas_kernels.mosaic.tiling import TILE_ROWS as ROWS
from pallas_kernels.mosaic.tiling import Tiling
from pallas_kernels.nvlink.deal import CTA
from pallas_kernels.product.sizes import FRAMES, TILE_K, TILE_M, TILE_N

# The walk over tiles goes along columns of so many tiles, so that what is read at one time stays in the L2 cache.
WALK = 8


def frame_tiling(fmt: Format) -> Tiling:
    """Of a frame, as if it were a message of its own."""
    elements = ROWS * TILE_N
    return Tiling(fmt, Geometry(elements, 1, elements), any_order=True)


@dataclass(frozen=True)
class Plan:
    """The tiles of x [M, K] @ w, w [K, N] or, `transposed`, [N, K], summed over `ranks` ranks of a mesh axis.

    loopback: the ranks are played by one device, whose x and w stand for everybody's: for measurements and tests.
    """

    fmt: Format
    m: int
    k: int
    n: int
    transposed: bool
    ranks: int
    axis: str | None
    stages: int = 4
    loopback: bool = False

    @property
    def tiling(self) -> Tiling:
        return frame_tiling(self.fmt)

    @property
    def tiles(self) -> int:
        return (self.m // TILE_M) * (self.n // TILE_N)

    @property
    def ctas(self) -> int:
        return min(self.tiles, MAX_CTAS)

    @property
    def steps_k(self) -> int:
        return self.k // TILE_K

    @property
    def own(self) -> int:
        """Frames of a tile that a rank sums."""
        return FRAMES // self.ranks

    def steps(self):
        """How many tiles this CTA has."""
        return lax.div(self.tiles - lax.axis_index(CTA) + self.ctas - 1, jnp.int32(self.ctas))

    def tile(self, step):
        return lax.axis_index(CTA) + step * self.ctas

    def corner(self, tile):
        """The first row and column of a tile."""
        shape = self.m // TILE_M, self.n // TILE_N
        i, j = plgpu.planar_snake(tile, shape, 0, min(WALK, shape[0]))
        return i * TILE_M, j * TILE_N

    def rank(self):
        # A zero that no compiler knows, so that it is the same kernel.
        return jnp.minimum(self.steps(), 0) if self.loopback else lax.axis_index(self.axis)

    def peer(self, distance):
        return lax.rem(self.rank() + distance, jnp.int32(self.ranks))

    def at(self, ref, rank):
        """A ref of a rank's memory."""
        return ref if self.loopback else plgpu.remote_ref(ref, {self.axis: rank})

    def sender(self, rank):
        """The place in a rank's memory of what this rank sends there. In loopback it is what that rank would send."""
        return rank if self.loopback else self.rank()

    def everywhere(self, ref, first, place: int) -> list:
        """Entry first + f of every rank's `ref`, f being this rank's own frame `place` of a tile.

        In loopback those of the frames that the other ranks would send: whatever is in this one stands for them.
        """
        if self.loopback:
            return [ref.at[first + place * self.ranks + rank] for rank in range(self.ranks)]
        f = place * self.ranks + self.rank()
        return [self.at(ref, self.peer(distance)).at[first + f] for distance in range(1, self.ranks + 1)]
