"""reduce: the middle of an all-reduce in one pass over memory.

    z = sum over p, in rank order, of (p is the own rank ? H x : s_p q_p) in float32; then encoded again, or H z

The own term is the unquantised chunk of x; without one (`rank` None) every term is a wire's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import Geometry
from pallas_kernels.mosaic import blocks, pipeline, rotation
from pallas_kernels.mosaic.encode import Inputs, Writer
from pallas_kernels.mosaic.source import Wires
from pallas_kernels.mosaic.tiling import ROWS, Tiling

# Two CTAs share the 227 KiB of a multiprocessor.
SHARED_BYTES = 110 * 1024


def reduce(tiling: Tiling, wires_PW, x_RC, rank, exponents, seed, dtype=None, offsets=(0, 0)):
    """Sums P wires [P, W] and the own rows of x.

    Returns (wire uint8[1, W], row maxima float32[ctas]) where `dtype` is None, else the sum itself, dtype[rows, row].
    x_RC and rank (int32[1]) are None where every term is in a wire.
    """
    fmt, ranks = tiling.fmt, tiling.geometry.messages
    one = Tiling(fmt, Geometry(tiling.geometry.per_message, 1, tiling.geometry.per_message), tiling.interpret)
    has_own, to_wire = x_RC is not None, dtype is None
    operand = jnp.bfloat16 if not to_wire or not has_own else rotation.operand_dtype(x_RC.dtype)
    rotator = rotation.Rotator(tiling, ("r" if has_own else "") + ("" if to_wire else "u") or "r", operand)
    source, inputs = Wires(tiling), Inputs(tiling, exponents, seed)
    sources = ranks - has_own
    ctas = pipeline.grid(one.tiles)
    x_RC = x_RC if has_own else jnp.zeros((8, tiling.row), jnp.bfloat16)
    rank = rank if has_own else jnp.zeros((1,), jnp.int32)
    x_dtype, y_dtype = x_RC.dtype, jnp.dtype(dtype or jnp.bfloat16)

    tile = ROWS * tiling.row
    fixed = rotator.operand.size * rotator.operand.dtype.itemsize + has_own * tile * x_dtype.itemsize
    fixed += ROWS * tiling.row_bytes if to_wire else tile * y_dtype.itemsize
    stages = 2 if fixed + 2 * sources * ROWS * tiling.row_bytes <= SHARED_BYTES else 1

    def kernel(codes_g, scales_g, x_g, r_g, m_g, e_g, n_g, *refs):
        outputs, (codes_s, x_s, m_s, out_s, scales_s, m_bar, x_bar, bars) = refs[: 1 + to_wire], refs[1 + to_wire :]
        rotator.load(m_g, m_s, m_bar)
        own_rank = r_g[0] if has_own else jnp.int32(ranks)
        exponent = e_g[0] if inputs.has_exponent and fmt.scale != "site" else None
        writer = Writer(one, outputs[0], out_s, scales_s, e_g if inputs.has_exponent else None, buffers=1)
        if to_wire:
            writer.fill(ctas)

        def load_own(t):
            if has_own:
                rows = pl.ds(tiling.x_row(own_rank, one.locate(t)[1]), ROWS)
                plgpu.copy_gmem_to_smem(x_g.at[rows], x_s, x_bar)

        def load(t, slot):
            row = one.locate(t)[1]
            for j in range(sources):
                message = j + (j >= own_rank).astype(jnp.int32)
                source.load(codes_g, message, row, codes_s.at[slot, j], bars.at[slot * sources + j])

        def work(t, slot, parity, free, largest):
            row = one.locate(t)[1]

            def own():
                plgpu.barrier_wait(x_bar)
                return tuple(rotator.rotate(x_s, m_s))

            def term(p):
                scale_bytes = source.scale_bytes(scales_g, p, row)
                site_byte = source.site_byte(scales_g, p)
                j = p - (p > own_rank).astype(jnp.int32)
                plgpu.barrier_wait(bars.at[slot * sources + j])
                codes = blocks.decode(tiling, codes_s.at[slot, j])
                return tuple(blocks.scale_rows(tiling, codes, source.scales(scale_bytes, site_byte, exponent)))

            total = None
            for p in range(ranks):
                z = lax.cond(own_rank == p, own, lambda p=p: term(jnp.int32(p))) if has_own else term(jnp.int32(p))
                total = z if total is None else tuple(a + b for a, b in zip(total, z))
            free()
            if has_own:

                @pl.when(t + ctas < one.tiles)
                def _():
                    load_own(t + ctas)

            if to_wire:
                noise = inputs.noise(n_g, jnp.int32(0), row, offsets)
                return jnp.maximum(largest, writer.write(jnp.int32(0), row, parity, list(total), noise))
            values = rotator.unrotate(list(total), m_s)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i, v in enumerate(values):
                out_s[:, pl.ds(i * tiling.chunk, tiling.chunk)] = v.astype(y_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, outputs[0].at[pl.ds(row, ROWS)])
            return largest

        load_own(lax.axis_index(pipeline.AXIS))
        largest = pipeline.run(one.tiles, stages, load, work, writer.zeros())
        plgpu.wait_smem_to_gmem(0)
        if to_wire:
            outputs[1][lax.axis_index(pipeline.AXIS)] = jnp.max(largest)

    if to_wire:
        out_s, scales_s = Writer.scratch(one, buffers=1)
        out_type = [
            jax.ShapeDtypeStruct((1, one.message_bytes), jnp.uint8), jax.ShapeDtypeStruct((ctas,), jnp.float32)
        ]  # fmt: skip
    else:
        out_s = plgpu.SMEM((ROWS, tiling.row), y_dtype, transforms=rotation.transforms(y_dtype, tiling.chunk))
        scales_s = plgpu.SMEM((8,), jnp.uint8)
        out_type = jax.ShapeDtypeStruct((one.rows, tiling.row), y_dtype)
    x_s = plgpu.SMEM((ROWS, tiling.row), x_dtype, transforms=rotation.transforms(x_dtype, tiling.chunk))
    barriers = [plgpu.Barrier(), plgpu.Barrier(), plgpu.Barrier(num_barriers=stages * sources)]
    return pipeline.call(
        kernel, [*source.arrays(wires_PW), x_RC, rank, rotator.operand, *inputs.arrays], out_type,
        [source.scratch(stages, sources), x_s, rotator.scratch, out_s, scales_s, *barriers], ctas, tiling.interpret,
    )  # fmt: skip
