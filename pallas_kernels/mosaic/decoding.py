"""decode: unpack, rotate back, scale and cast; one pass over memory.

x = H (s q) = s (H q): the codes themselves go through the tensor cores, exact in float16, and the scale comes after.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import blocks, pipeline, rotation
from pallas_kernels.mosaic.source import Wires
from pallas_kernels.mosaic.tiling import ROWS, Tiling
from pallas_kernels.mosaic.writer import Inputs

BUFFERS = 2


def decode(tiling: Tiling, wires_PW, rows: int, dtype, exponents) -> jax.Array:
    """Wires of messages that lie side by side -> the first `rows` rows of them all, dtype[rows, row]."""
    tiling.check_alignment()
    dtype = jnp.dtype(dtype)
    transforms = rotation.transforms(dtype, tiling.chunk)
    rotator = rotation.Rotator(tiling, jnp.float16)
    source, inputs = Wires(tiling), Inputs(tiling, exponents, None)
    out_bytes = BUFFERS * ROWS * tiling.row * dtype.itemsize
    # Measured on an H200. Those of 5 and 6 bits, with more instructions, gain nothing from more workers, and lose 0 to
    # 4 % where these draw their tiles.
    fast = tiling.fmt.bits in (4, 8)
    most = 3 if fast else 2
    workers, stages = pipeline.fit(
        tiling, rotator.bytes, source.scratch_bytes(), out_bytes, stages=(3, 2), enough=most, most=most, may_draw=fast
    )

    def decode_tiles(tickets, codes_g, scales_g, m_g, e_g, n_g, y_g, codes_s, scales_s, m_s, y_s, m_bar, bars):
        wg = workers.warpgroup()
        rotator.load(m_g, m_s, m_bar, wg)
        exponent = e_g[0] if inputs.has_exponent else None

        def load(tile, slot):
            message, row = tiling.locate(tile)
            to = codes_s.at[wg, slot], scales_s.at[wg, slot], bars.at[wg * stages + slot]
            source.load(codes_g, scales_g, message, row, *to)

        def work(tile, slot, parity, free, carry):
            message, row = tiling.locate(tile)
            plgpu.barrier_wait(bars.at[wg * stages + slot])
            codes = blocks.decode(tiling, codes_s.at[wg, slot], jnp.float16 if rotator.active else jnp.float32)
            scales = source.scales(scales_g, message, row, scales_s.at[wg, slot], exponent)
            free()
            values = blocks.scale_rows(tiling, rotator.unrotate_codes(codes, m_s), scales)
            plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
            buffer = y_s.at[wg, parity]
            blocks.store_tile(tiling, buffer, [v.astype(dtype) for v in values], transforms)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, y_g.at[pl.ds(message * tiling.rows + row, ROWS)])
            return carry

        pipeline.run(
            workers, stages, load, work, carry=jnp.int32(0), begin=lambda: rotator.wait(m_bar), tickets=tickets
        )
        plgpu.wait_smem_to_gmem(0)

    shape = (workers.warpgroups, BUFFERS, ROWS, tiling.row)
    y_type = plgpu.SMEM(shape, dtype, transforms=transforms)
    barriers = [plgpu.Barrier(), source.barrier(workers.warpgroups * stages)]
    return pipeline.call(
        decode_tiles, [*source.arrays(wires_PW), rotator.operand, *inputs.arrays],
        jax.ShapeDtypeStruct((rows, tiling.row), dtype),
        [*source.scratch(workers.warpgroups, stages), rotator.scratch, y_type, *barriers], workers,
    )  # fmt: skip
