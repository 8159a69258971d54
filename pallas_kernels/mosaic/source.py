"""How kernels read wires: codes as tiles by bulk or tensor copies, scale bytes straight into registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic import blocks, copies, scales
from pallas_kernels.mosaic.tiling import ROWS, Tiling


class Wires:
    """Wires uint8[P, W] as the inputs of a kernel: one view for codes, one for scales, both without a copy."""

    def __init__(self, tiling: Tiling):
        self.tiling = tiling
        # Rows of 64 or 128 bytes can be swizzled in shared memory and are then read without bank conflicts.
        self.swizzle = blocks.swizzle(tiling)

    def arrays(self, wires: jax.Array) -> list[jax.Array]:
        t = self.tiling
        codes = wires.reshape(-1, t.row_bytes) if self.swizzle else wires
        per_row = t.blocks_per_row
        return [codes, wires if per_row == 1 else wires.reshape(wires.shape[0], -1, per_row)]

    def scratch(self, *slots: int):
        return blocks.codes_scratch(self.tiling, self.swizzle, *slots)

    def load(self, codes_g, message, row, codes_s, barrier) -> None:
        t = self.tiling
        if self.swizzle:
            start = message * (t.message_bytes // t.row_bytes) + row
            plgpu.copy_gmem_to_smem(codes_g.at[pl.ds(start, ROWS)], codes_s, barrier)
        else:
            bytes_g = codes_g.at[message, pl.ds(row * t.row_bytes, ROWS * t.row_bytes)]
            copies.load(bytes_g, codes_s, barrier, t.interpret is not None)

    def scale_bytes(self, scales_g, message, row) -> list[list[jax.Array]]:
        """Blocks x byte planes of uint8[64], or of scale "site" the one byte: loads that nobody waits for yet."""
        t = self.tiling
        per_row = t.blocks_per_row
        if t.fmt.scale == "site":
            offset = t.plane_offset(0)
            byte = scales_g[message, offset] if per_row == 1 else scales_g[message, offset // per_row, 0]
            return [[byte]] * per_row
        out = []
        for b in range(per_row):
            planes = []
            for k in range(t.scale_planes):
                rows = pl.ds(t.plane_offset(k) // per_row + row, ROWS)
                ref = scales_g.at[message, rows] if per_row == 1 else scales_g.at[message, rows, b]
                planes.append(compat.load(ref, plgpu.Layout.WGMMA.reduce(1), optimized=False))
            out.append(planes)
        return out

    def scales(self, scale_bytes, exponent) -> list:
        """Scale of each block of a row: float32[64], or one float32[] for scale "site"."""
        words = [[plane.astype(jnp.int32) & 0xFF for plane in planes] for planes in scale_bytes]
        return [scales.read(self.tiling.fmt, planes, exponent) for planes in words]
