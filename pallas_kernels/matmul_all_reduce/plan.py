"""Which tiles a product has, and which CTA and rank computes, sums and receives them.

A tile is 256 rows and 128 columns of the product: four frames of 64 rows. Rank f mod P owns frame f of every tile, and
sums it, so that all ranks have the same share of every tile. CTA c of every rank has the same tiles. It exchanges
frames only with the CTAs c of the others.

Dim letters: M rows, K inner dimension, N columns of a product, T tiles, F frames of a tile, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import Format, Geometry
from pallas_kernels.matmul_all_reduce.support import FRAMES_PER_TILE, TILE_K, TILE_M, TILE_N
from pallas_kernels.mosaic.pipeline import MAX_CTAS
from pallas_kernels.mosaic.tiling import TILE_ROWS as FRAME_ROWS
from pallas_kernels.mosaic.tiling import Tiling
from pallas_kernels.nvlink.tile_schedule import CTA_AXIS

# Tiles are walked along columns of so many, so that the operands of CTAs that run at one time stay in the L2 cache.
SNAKE_WIDTH_TILES = 8


def frame_tiling(fmt: Format) -> Tiling:
    """Returns the tiling of a frame, as if it were a message of its own."""
    elements = FRAME_ROWS * TILE_N
    return Tiling(fmt, Geometry(elements, 1, elements), any_order=True)


@dataclass(frozen=True)
class Plan:
    """The tiles of x [M, K] @ w, w [K, N] or, `transposed`, [N, K], summed over `ranks` ranks of a mesh axis.

    operand_stages: steps along K whose operands are in shared memory. loopback: one device plays all ranks, and its x
    and w stand for theirs; for measurements and tests.
    """

    fmt: Format
    m: int
    k: int
    n: int
    transposed: bool
    ranks: int
    axis: str | None
    operand_stages: int = 4
    loopback: bool = False

    @property
    def frame_tiling(self) -> Tiling:
        return frame_tiling(self.fmt)

    @property
    def tiles(self) -> int:
        return (self.m // TILE_M) * (self.n // TILE_N)

    @property
    def ctas(self) -> int:
        return min(self.tiles, MAX_CTAS)

    @property
    def k_steps(self) -> int:
        return self.k // TILE_K

    @property
    def frames_per_owner(self) -> int:
        """Returns how many frames of a tile a rank sums."""
        return FRAMES_PER_TILE // self.ranks

    def tile_count(self):
        """Returns how many tiles this CTA has."""
        return lax.div(self.tiles - lax.axis_index(CTA_AXIS) + self.ctas - 1, jnp.int32(self.ctas))

    def tile(self, t):
        """Returns the index of this CTA's t-th tile."""
        return lax.axis_index(CTA_AXIS) + t * self.ctas

    def corner(self, tile):
        """Returns the first row and column of a tile."""
        shape = self.m // TILE_M, self.n // TILE_N
        i, j = plgpu.planar_snake(tile, shape, 0, min(SNAKE_WIDTH_TILES, shape[0]))
        return i * TILE_M, j * TILE_N

    def rank(self):
        # In loopback a zero that no compiler knows, so that the kernel is the same.
        return jnp.minimum(self.tile_count(), 0) if self.loopback else lax.axis_index(self.axis)

    def peer(self, distance):
        """Returns the rank `distance` further on."""
        return lax.rem(self.rank() + distance, jnp.int32(self.ranks))

    def remote_ref(self, ref, rank):
        """Returns the ref of a rank's memory."""
        return ref if self.loopback else plgpu.remote_ref(ref, {self.axis: rank})

    def sender_row(self, rank):
        """Returns the row of a rank's memory that this rank sends to. In loopback it is that rank's own row."""
        return rank if self.loopback else self.rank()

    def owned_frame_on_all(self, ref, first, place: int) -> list:
        """Returns entry first + f of every rank's `ref`; f is this rank's own frame number `place` of a tile.

        In loopback: those of the frames that the other ranks would send. What this rank sends stands for them.
        """
        if self.loopback:
            return [ref.at[first + place * self.ranks + rank] for rank in range(self.ranks)]
        f = place * self.ranks + self.rank()
        return [self.remote_ref(ref, self.peer(distance)).at[first + f] for distance in range(1, self.ranks + 1)]
