"""How kernels read wires: codes as tiles by bulk or tensor copies, and their scale bytes beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic import blocks, copies, owned, scales
from pallas_kernels.mosaic.tiling import ROWS, Tiling

# Bulk copies start at multiples of 16 bytes, and Mosaic makes them of multiples of 128.
ALIGNMENT, COPY = 16, 128


class Wires:
    """Wires uint8[P, W] as the inputs of a kernel: one view for codes, one for scales, both without a copy."""

    def __init__(self, tiling: Tiling):
        self.tiling = tiling
        # Rows of 64 or 128 bytes can be swizzled in shared memory and are then read without bank conflicts.
        self.swizzle = blocks.swizzle(tiling)
        # A scale plane of a tile, as much again as its start may lie behind a multiple of the alignment, and the rest.
        per_row = tiling.blocks_per_row
        self.scale_rows = -(-(ROWS * per_row + ALIGNMENT) // COPY) * COPY // per_row

    def arrays(self, wires: jax.Array) -> list[jax.Array]:
        # Else XLA may hand over the array that a caller cut them from, and copies would begin at any byte of it.
        wires = lax.optimization_barrier(wires)
        return [wires.reshape(-1, self.tiling.row_bytes) if self.swizzle else wires, wires]

    def scratch(self, *slots: int) -> list:
        """Shared memory for the codes and for the scales of tiles."""
        t = self.tiling
        shape = (*slots, max(1, t.scale_planes), self.scale_rows, t.blocks_per_row)
        return [blocks.codes_scratch(t, self.swizzle, *slots), plgpu.SMEM(shape, jnp.uint8)]

    def scratch_bytes(self) -> int:
        """Of one slot."""
        t = self.tiling
        return ROWS * t.row_bytes + max(1, t.scale_planes) * self.scale_rows * t.blocks_per_row

    def barrier(self, slots: int):
        """A barrier for each slot, which the copies of its codes and scale planes arrive at."""
        return plgpu.Barrier(num_arrivals=1 + self.tiling.scale_planes, num_barriers=slots)

    def load(self, codes_g, scales_g, message, row, codes_s, scales_s, barrier) -> None:
        """Starts the copies of a tile's codes [64, row_bytes] and scales [planes, 64 and some, blocks of a row]."""
        t, interpret = self.tiling, self.tiling.interpret is not None
        if self.swizzle:
            start = message * (t.message_bytes // t.row_bytes) + row
            plgpu.copy_gmem_to_smem(codes_g.at[pl.ds(start, ROWS)], codes_s, barrier)
        else:
            bytes_g = codes_g.at[message, pl.ds(row * t.row_bytes, ROWS * t.row_bytes)]
            copies.load(bytes_g, codes_s, barrier, interpret)
        for k in range(t.scale_planes):
            bytes_g = scales_g.at[message, pl.ds(self._start(k, row), self.scale_rows * t.blocks_per_row)]
            copies.load(bytes_g, scales_s.at[k], barrier, interpret)

    def scales(self, scales_g, message, row, scales_s, exponent) -> list:
        """Scale of each block of a tile's rows: float32[64], or one float32[] for scale "site"; of `owned` blocks one
        array float32[64, 8]."""
        t = self.tiling
        if t.fmt.scale == "site":
            byte = scales_g[message, t.plane_offset(0)].astype(jnp.int32) & 0xFF
            return [scales.read(t.fmt, [byte], None)] * t.blocks_per_row
        first = lambda k: lax.div(t.plane_offset(k) - self._start(k, row), jnp.int32(t.blocks_per_row)) + row
        rows = [scales_s.at[k, pl.ds(first(k), ROWS)] for k in range(t.scale_planes)]
        if t.owned:
            planes = [owned.load_scales(ref, t.interpret is not None) for ref in rows]
            return [scales.read(t.fmt, planes, exponent)]
        out = []
        for b in range(t.blocks_per_row):
            planes = []
            for k in range(t.scale_planes):
                ref = scales_s.at[k, pl.ds(first(k), ROWS), b]
                plane = compat.load(ref, plgpu.Layout.WGMMA.reduce(1), optimized=False)
                planes.append(plane.astype(jnp.int32) & 0xFF)
            out.append(scales.read(t.fmt, planes, exponent))
        return out

    def _start(self, plane: int, row):
        """The byte of a message from which a tile's scale plane is copied: at or before its first."""
        t = self.tiling
        first = t.plane_offset(plane) + row * t.blocks_per_row
        last = t.message_bytes - self.scale_rows * t.blocks_per_row
        return jnp.minimum(lax.div(first, jnp.int32(ALIGNMENT)) * ALIGNMENT, last)
