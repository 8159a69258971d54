"""encode: rotate, scale, cast and pack, one pass over memory; what the kernel writes is the wire itself.

z = H x;   s = max(max|z|, 2^-100) / Qmax, rounded up;   q = cast(clip(z / s))     (`taco_jax/codec.py`)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import blocks, copies, pipeline, rotation
from pallas_kernels.mosaic.tiling import ROWS, Tiling

STAGES = 3


def encode(tiling: Tiling, x_RC, exponents, seed, offsets=(0, 0)) -> tuple[jax.Array, jax.Array]:
    """Rows [R, row] of all messages (missing ones are zero) -> (wires uint8[P, W], row maxima of |z| float32[ctas]).

    exponents: int32[1], or int32[P] for scale "site", or None. seed: uint32[2] or None.
    """
    fmt, messages = tiling.fmt, tiling.geometry.messages
    rotator = rotation.Rotator(tiling, "r", rotation.operand_dtype(x_RC.dtype))
    ctas = pipeline.grid(tiling.tiles)
    inputs, scratch = Inputs(tiling, exponents, seed), Writer.scratch(tiling)
    stages = STAGES if x_RC.dtype.itemsize * tiling.row <= 512 else 2

    def kernel(x_g, m_g, e_g, n_g, o_g, max_g, x_s, m_s, codes_s, scales_s, m_bar, x_bars):
        rotator.load(m_g, m_s, m_bar)
        writer = Writer(tiling, o_g, codes_s, scales_s, e_g if inputs.has_exponent else None)
        writer.fill(ctas)

        def load(tile, slot):
            message, row = tiling.locate(tile)
            rows = pl.ds(tiling.x_row(message, row), ROWS)
            plgpu.copy_gmem_to_smem(x_g.at[rows], x_s.at[slot], x_bars.at[slot])

        def work(tile, slot, parity, free, largest):
            message, row = tiling.locate(tile)
            plgpu.barrier_wait(x_bars.at[slot])
            z = rotator.rotate(x_s.at[slot], m_s)
            free()
            noise = inputs.noise(n_g, message, row, offsets)
            return jnp.maximum(largest, writer.write(message, row, parity, z, noise))

        largest = pipeline.run(tiling.tiles, stages, load, work, writer.zeros())
        plgpu.wait_smem_to_gmem(0)
        max_g[lax.axis_index(pipeline.AXIS)] = jnp.max(largest)

    x_type = plgpu.SMEM(
        (stages, ROWS, tiling.row), x_RC.dtype, transforms=rotation.transforms(x_RC.dtype, tiling.chunk)
    )
    out_type = [
        jax.ShapeDtypeStruct((messages, tiling.message_bytes), jnp.uint8),
        jax.ShapeDtypeStruct((ctas,), jnp.float32),
    ]
    return pipeline.call(
        kernel, [x_RC, rotator.operand, *inputs.arrays], out_type,
        [x_type, rotator.scratch, *scratch, plgpu.Barrier(), plgpu.Barrier(num_barriers=stages)], ctas, tiling.interpret,
    )  # fmt: skip


class Inputs:
    """The small arrays that kernels read: exponents and seed; there is always one of each, used or not."""

    def __init__(self, tiling: Tiling, exponents, seed):
        self.tiling = tiling
        self.has_exponent = exponents is not None
        self.has_seed = tiling.fmt.rounding == "stochastic"
        exponents = jnp.zeros((1,), jnp.int32) if exponents is None else exponents
        seed = lax.bitcast_convert_type(seed, jnp.int32) if self.has_seed else jnp.zeros((2,), jnp.int32)
        self.arrays = [exponents, seed]

    def noise(self, n_g, message, row, offsets):
        if not self.has_seed:
            return None
        seed = (n_g[0].astype(jnp.uint32), n_g[1].astype(jnp.uint32))
        return blocks.noise(self.tiling, message, row, seed, offsets)


class Writer:
    """Writes tiles of rotated blocks into wires uint8[P, W]: codes by bulk copies, scale bytes straight."""

    def __init__(self, tiling: Tiling, o_g, codes_s, scales_s, exponents_g, buffers: int = 2):
        self.tiling, self.o_g, self.buffers = tiling, o_g, buffers
        self.codes_s, self.scales_s, self.exponents_g = codes_s, scales_s, exponents_g

    @staticmethod
    def scratch(tiling: Tiling, buffers: int = 2) -> list:
        planes = max(1, tiling.scale_planes)
        return [
            plgpu.SMEM((buffers, ROWS, tiling.row_bytes), jnp.uint8),
            plgpu.SMEM((planes, ROWS, tiling.blocks_per_row), jnp.uint8),
        ]

    def zeros(self):
        return plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))

    def exponent(self, message):
        if self.exponents_g is None:
            return None
        return self.exponents_g[message if self.tiling.fmt.scale == "site" else 0]

    def fill(self, ctas: int) -> None:
        """Zeros the bytes between sections, and writes the one scale byte of a message with scale "site"."""
        t, cta = self.tiling, lax.axis_index(pipeline.AXIS)
        for offset, length in t.gaps():
            total = length * t.geometry.messages

            def zero(k, carry, offset=offset, length=length):
                i = cta + k * ctas
                message = lax.div(i, jnp.int32(length))
                self.o_g[message, offset + i - message * length] = jnp.uint8(0)
                return carry

            lax.fori_loop(0, lax.div(total - cta + ctas - 1, jnp.int32(ctas)), zero, 0)
        if t.fmt.scale == "site":

            def scale(k, carry):
                message = cta + k * ctas
                self.o_g[message, t.plane_offset(0)] = (self.exponent(message) + 127).astype(jnp.uint8)
                return carry

            lax.fori_loop(0, lax.div(t.geometry.messages - cta + ctas - 1, jnp.int32(ctas)), scale, 0)

    def write(self, message, row, parity, z: list, noise) -> jax.Array:
        """Encodes one tile; returns its row maxima of |z|."""
        t = self.tiling
        plgpu.wait_smem_to_gmem(self.buffers - 1, wait_read_only=True)  # the copy before has left the buffer
        buffer = self.codes_s.at[lax.rem(parity, jnp.int32(self.buffers))]
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
                self.o_g[message, pl.ds(start, ROWS)] = planes[0][k].astype(jnp.uint8)
                continue
            for b in range(per_row):
                self.scales_s[k, :, b] = planes[b][k].astype(jnp.uint8)
            plane_g = self.o_g.at[message, pl.ds(start, ROWS * per_row)]
            copies.store_through_registers(self.scales_s.at[k], plane_g, t.interpret is not None)


def largest(row_maxima: jax.Array, tiling: Tiling) -> jax.Array:
    """float32[ctas] -> the largest block scale before rounding, float32[]; NaN where a block was not finite."""
    return jnp.max(row_maxima) * np.float32(tiling.fmt.reciprocal_maximum)
