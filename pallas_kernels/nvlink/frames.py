"""A tile as it crosses NVLink: its codes, then its block scales, in one piece of memory and so one copy.

Nobody but these kernels reads a frame, so the bytes of a row may lie in any order (`Tiling.any_order`); codes and
scales themselves are the wire's. Of `taco` a frame is 64 rows of 128 codes and 64 scale bytes, padded to 8,320 bytes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic import kernels, tile_codec
from pallas_kernels.mosaic.registers import thread_blocks
from pallas_kernels.mosaic.tiling import TILE_ROWS as ROWS
from pallas_kernels.mosaic.tiling import Tiling

# Mosaic makes bulk copies of multiples of 128 bytes.
ALIGNMENT = 128


class Frames:
    """The frames of one tiling's tiles."""

    def __init__(self, tiling: Tiling):
        self.tiling = tiling
        self.code_bytes = ROWS * tiling.row_bytes
        self.plane_bytes = ROWS * tiling.blocks_per_row
        end = self.code_bytes + tiling.scale_planes * self.plane_bytes
        self.bytes = -(-end // ALIGNMENT) * ALIGNMENT

    def scratch(self, *slots: int):
        """Shared memory for frames uint8[*slots, bytes]."""
        return plgpu.SMEM((*slots, self.bytes), jnp.uint8)

    def buffer(self, *frames: int) -> jax.ShapeDtypeStruct:
        """Global memory for frames uint8[*frames, bytes]."""
        return jax.ShapeDtypeStruct((*frames, self.bytes), jnp.uint8)

    def write(self, frame_s, z: list, exponent) -> jax.Array:
        """Encodes rotated blocks into a frame; returns the largest |z| of its rows as bits (`kernels.encode_tile`)."""
        t = self.tiling
        largest, planes = kernels.encode_tile(t, z, exponent, None, self._codes(frame_s))
        for k in range(t.scale_planes):
            if t.one_thread_per_block:
                thread_blocks.store_scales(self._plane(frame_s, k), planes[0][k], t.interpret is not None)
                continue
            for b in range(t.blocks_per_row):
                compat.store(self._column(frame_s, k, b), planes[b][k].astype(jnp.uint8), optimized=False)
        return largest

    def codes(self, frame_s, dtype=jnp.float32) -> list[jax.Array]:
        """The codes' values, without their scales (`tile_codec.load_codes`)."""
        return tile_codec.load_codes(self.tiling, self._codes(frame_s), dtype)

    def scales(self, frame_s, exponent) -> list[jax.Array]:
        """The scale of each block of a row, float32[64]; with one thread per block float32[64, 8]."""
        t = self.tiling
        if t.one_thread_per_block:
            found = [
                thread_blocks.load_scales(
                    self._plane(frame_s, k).reshape(ROWS, t.blocks_per_row), t.interpret is not None
                )
                for k in range(t.scale_planes)
            ]
            return [tile_codec.read_scales(t.fmt, found, exponent)]
        out = []
        for b in range(t.blocks_per_row):
            found = []
            for k in range(t.scale_planes):
                plane = compat.load(self._column(frame_s, k, b), plgpu.Layout.WGMMA.reduce(1), optimized=False)
                found.append(plane.astype(jnp.int32) & 0xFF)
            out.append(tile_codec.read_scales(t.fmt, found, exponent))
        return out

    def values(self, frame_s, exponent) -> list[jax.Array]:
        """What a frame says, still rotated: float32[64, chunk] each."""
        return tile_codec.scale_rows(self.tiling, self.codes(frame_s), self.scales(frame_s, exponent))

    def _codes(self, frame_s):
        return frame_s.at[pl.ds(0, self.code_bytes)].reshape(ROWS, self.tiling.row_bytes)

    def _plane(self, frame_s, k: int):
        return frame_s.at[pl.ds(self.code_bytes + k * self.plane_bytes, self.plane_bytes)]

    def _column(self, frame_s, k: int, b: int):
        """Of a scale plane the bytes of every row's block b, uint8[64]."""
        plane_s, per_row = self._plane(frame_s, k), self.tiling.blocks_per_row
        return plane_s.reshape(ROWS, per_row).at[:, b] if per_row > 1 else plane_s
