"""decode: unpack, rotate back, scale and cast; one pass over memory.

x = H (s q) = s (H q): the codes themselves go through the tensor cores, exact in float16, and the scale comes after.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import blocks, pipeline, rotation
from pallas_kernels.mosaic.encode import Inputs
from pallas_kernels.mosaic.source import Wires
from pallas_kernels.mosaic.tiling import ROWS, Tiling

STAGES = 3


def decode(tiling: Tiling, wires_PW, rows: int, dtype, exponents) -> jax.Array:
    """Wires of messages that lie side by side -> the first `rows` rows of them all, dtype[rows, row]."""
    dtype = jnp.dtype(dtype)
    rotator = rotation.Rotator(tiling, "u", jnp.float16)
    source, inputs = Wires(tiling), Inputs(tiling, exponents, None)

    def kernel(codes_g, scales_g, m_g, e_g, n_g, y_g, codes_s, m_s, y_s, m_bar, bars):
        rotator.load(m_g, m_s, m_bar)
        exponent = e_g[0] if inputs.has_exponent else None

        def load(tile, slot):
            message, row = tiling.locate(tile)
            source.load(codes_g, message, row, codes_s.at[slot], bars.at[slot])

        def work(tile, slot, parity, free, carry):
            message, row = tiling.locate(tile)
            scale_bytes = source.scale_bytes(scales_g, message, row)  # on their way while the codes arrive
            site_byte = source.site_byte(scales_g, message)
            plgpu.barrier_wait(bars.at[slot])
            codes = blocks.decode(tiling, codes_s.at[slot])
            free()
            values = rotator.unrotate_codes(codes, m_s)
            values = blocks.scale_rows(tiling, values, source.scales(scale_bytes, site_byte, exponent))
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer = y_s.at[parity]
            for i, v in enumerate(values):
                buffer[:, pl.ds(i * tiling.chunk, tiling.chunk)] = v.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, y_g.at[pl.ds(message * tiling.rows + row, ROWS)])
            return carry

        pipeline.run(tiling.tiles, STAGES, load, work, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    y_type = plgpu.SMEM((2, ROWS, tiling.row), dtype, transforms=rotation.transforms(dtype, tiling.chunk))
    return pipeline.call(
        kernel, [*source.arrays(wires_PW), rotator.operand, *inputs.arrays],
        jax.ShapeDtypeStruct((rows, tiling.row), dtype),
        [source.scratch(STAGES), rotator.scratch, y_type, plgpu.Barrier(), plgpu.Barrier(num_barriers=STAGES)],
        pipeline.grid(tiling.tiles), tiling.interpret,
    )  # fmt: skip
