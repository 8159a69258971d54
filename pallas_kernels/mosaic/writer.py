"""How kernels write wires: codes as tiles by bulk copies, scale bytes straight from registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic import blocks, copies
from pallas_kernels.mosaic.pipeline import Workers
from pallas_kernels.mosaic.tiling import ROWS, Tiling


class Inputs:
    """The small arrays that kernels read: exponents and seed; there is always one of each, used or not."""

    def __init__(self, tiling: Tiling, exponents, seed):
        self.tiling = tiling
        self.has_exponent = exponents is not None
        self.has_seed = tiling.fmt.rounding == "stochastic" and seed is not None
        exponents = jnp.zeros((1,), jnp.int32) if exponents is None else exponents
        seed = lax.bitcast_convert_type(seed, jnp.int32) if self.has_seed else jnp.zeros((2,), jnp.int32)
        self.arrays = [exponents, seed]

    def noise(self, n_g, message, row, offsets):
        if not self.has_seed:
            return None
        seed = (n_g[0].astype(jnp.uint32), n_g[1].astype(jnp.uint32))
        return blocks.noise(self.tiling, message, row, seed, offsets)


class Writer:
    """Writes tiles of rotated blocks into wires uint8[P, W]; one for each worker.

    codes_s [buffers, 64, row_bytes] and scales_s [planes, 64, blocks of a row] are the worker's own shared memory.
    """

    def __init__(self, tiling: Tiling, workers: Workers, o_g, codes_s, scales_s, exponents_g, buffers: int):
        self.tiling, self.workers, self.o_g, self.buffers = tiling, workers, o_g, buffers
        self.codes_s, self.scales_s, self.exponents_g = codes_s, scales_s, exponents_g

    @staticmethod
    def scratch(tiling: Tiling, warpgroups: int, buffers: int) -> list:
        planes = max(1, tiling.scale_planes)
        return [
            plgpu.SMEM((warpgroups, buffers, ROWS, tiling.row_bytes), jnp.uint8),
            plgpu.SMEM((warpgroups, planes, ROWS, tiling.blocks_per_row), jnp.uint8),
        ]

    @staticmethod
    def scratch_bytes(tiling: Tiling, buffers: int) -> int:
        """Shared memory of one worker."""
        return ROWS * (buffers * tiling.row_bytes + max(1, tiling.scale_planes) * tiling.blocks_per_row)

    @staticmethod
    def nothing():
        """The largest magnitude of no rows, as bits: int32[64]."""
        return plgpu.layout_cast(jnp.zeros((ROWS,), jnp.int32), plgpu.Layout.WGMMA.reduce(1))

    def exponent(self, message):
        if self.exponents_g is None:
            return None
        return self.exponents_g[message if self.tiling.fmt.scale == "site" else 0]

    def fill(self) -> None:
        """Zeros the bytes between sections, and writes the one scale byte of a message with scale "site"."""
        t = self.tiling
        for offset, length in t.gaps():

            def zero(i, offset=offset, length=length):
                message = lax.div(i, jnp.int32(length))
                self.o_g[message, offset + i - message * length] = jnp.uint8(0)

            self.workers.for_each(length * t.geometry.messages, zero)
        if t.fmt.scale == "site":

            def scale(message):
                self.o_g[message, t.plane_offset(0)] = (self.exponent(message) + 127).astype(jnp.uint8)

            self.workers.for_each(t.geometry.messages, scale)

    def write(self, message, row, parity, z: list, noise) -> jax.Array:
        """Encodes one tile; returns the largest |z| of its rows as bits, int32[64]."""
        t = self.tiling
        plgpu.wait_smem_to_gmem(self.buffers - 1, wait_read_only=True)  # the copy before has left the buffer
        buffer = self.codes_s.at[parity if self.buffers == 2 else 0]
        largest, planes = blocks.encode(t, z, self.exponent(message), noise, buffer)
        plgpu.commit_smem()
        size = ROWS * t.row_bytes
        copies.store(buffer, self.o_g.at[message, pl.ds(row * t.row_bytes, size)], t.interpret is not None)
        self._write_scales(message, row, planes)
        return largest

    def _write_scales(self, message, row, planes):
        t = self.tiling
        per_row = t.blocks_per_row
        for k in range(t.scale_planes):
            start = t.plane_offset(k) + row * per_row
            if per_row == 1:
                to = self.o_g.at[message, pl.ds(start, ROWS)]
                compat.store(to, planes[0][k].astype(jnp.uint8), optimized=False)
                continue
            for b in range(per_row):
                compat.store(self.scales_s.at[k, :, b], planes[b][k].astype(jnp.uint8), optimized=False)
            plane_g = self.o_g.at[message, pl.ds(start, ROWS * per_row)]
            copies.store_through_registers(self.scales_s.at[k], plane_g, t.interpret is not None)
