"""encode: rotate, scale, cast and pack, one pass over memory; what the kernel writes is the wire itself.

z = H x;   s = max(max|z|, 2^-100) / Qmax, rounded up;   q = cast(clip(z / s))     (`taco_jax/codec/codec.py`)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import pipeline, rotation
from pallas_kernels.mosaic.tiling import ROWS, Tiling
from pallas_kernels.mosaic.writer import Inputs, Writer

BUFFERS = 2


def encode(tiling: Tiling, x_RC, exponents, seed, offsets=(0, 0)) -> tuple[jax.Array, jax.Array]:
    """Rows [R, row] of all messages (missing ones are zero) -> (wires uint8[P, W], largest |z| as bits int32[*, 4]).

    exponents: int32[1], or int32[P] for scale "site", or None. seed: uint32[2] or None.
    """
    tiling.check_alignment()
    rotator = rotation.Rotator(tiling, rotation.operand_dtype(x_RC.dtype))
    inputs = Inputs(tiling, exponents, seed)
    stage_bytes = ROWS * tiling.row * x_RC.dtype.itemsize
    # Measured on an H200: two keep up with the memory, but where small values are made of many integer operations.
    most = 4 if not rotator.active and tiling.fmt.bits < 8 else 2
    workers, stages = pipeline.fit(
        tiling, rotator.bytes, stage_bytes, Writer.scratch_bytes(tiling, BUFFERS), stages=(3, 2), enough=most,
        most=most, may_draw=True,
    )  # fmt: skip
    width = Writer.tensor_width(tiling)

    def encode_tiles(tickets, x_g, m_g, e_g, n_g, o_g, max_g, x_s, m_s, codes_s, scales_s, m_bar, x_bars):
        wg = workers.warpgroup()
        rotator.load(m_g, m_s, m_bar, wg)
        exponents_g = e_g if inputs.has_exponent else None
        writer = Writer(
            tiling,
            workers,
            o_g,
            codes_s.at[wg],
            scales_s=scales_s.at[wg],
            exponents_g=exponents_g,
            buffers=BUFFERS,
            width=width,
        )

        def load(tile, slot):
            message, row = tiling.locate(tile)
            rows = pl.ds(tiling.x_row(message, row), ROWS)
            plgpu.copy_gmem_to_smem(x_g.at[rows], x_s.at[wg, slot], x_bars.at[wg * stages + slot])

        def work(tile, slot, parity, free, largest):
            message, row = tiling.locate(tile)
            plgpu.barrier_wait(x_bars.at[wg * stages + slot])
            z = rotator.rotate(x_s.at[wg, slot], m_s)
            free()
            noise = inputs.noise(n_g, message, row, offsets)
            return jnp.maximum(largest, writer.write(message, row, parity, z, noise))

        def begin():
            writer.fill()
            rotator.wait(m_bar)

        largest = pipeline.run(workers, stages, load, work, carry=Writer.nothing(tiling), begin=begin, tickets=tickets)
        plgpu.wait_smem_to_gmem(0)
        writer.put_largest(max_g, largest)

    shape = (workers.warpgroups, stages, ROWS, tiling.row)
    x_type = plgpu.SMEM(shape, x_RC.dtype, transforms=rotation.transforms(x_RC.dtype, tiling.chunk))
    scratch = Writer.scratch(tiling, workers.warpgroups, BUFFERS, width)
    out_type = [Writer.out_type(tiling, width), Writer.maxima_type(workers)]
    barriers = [plgpu.Barrier(), plgpu.Barrier(num_barriers=workers.warpgroups * stages)]
    wires, bits = pipeline.call(
        encode_tiles, [x_RC, rotator.operand, *inputs.arrays], out_type, [x_type, rotator.scratch, *scratch, *barriers],
        workers,
    )  # fmt: skip
    return wires.reshape(tiling.geometry.messages, -1), bits


def largest(bits: jax.Array, tiling: Tiling) -> jax.Array:
    """Bits of largest magnitudes -> the largest block scale before rounding, float32[]; NaN where one is not finite."""
    return lax.bitcast_convert_type(jnp.max(bits), jnp.float32) * tiling.fmt.reciprocal_maximum
