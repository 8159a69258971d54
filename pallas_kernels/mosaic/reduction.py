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
from pallas_kernels.mosaic.source import Wires
from pallas_kernels.mosaic.tiling import ROWS, Tiling
from pallas_kernels.mosaic.writer import Inputs, Writer


def reduce(tiling: Tiling, wires_PW, x_RC, rank, exponents, seed, dtype=None, offsets=(0, 0)):
    """Sums P wires [P, W] and the own rows of x.

    Returns (wire uint8[1, W], largest |z| as bits int32[*, 4]) where `dtype` is None, else the sum dtype[rows, row].
    x_RC and rank (int32[1]) are None where every term is in a wire.
    """
    fmt, ranks = tiling.fmt, tiling.geometry.messages
    one = Tiling(fmt, Geometry(tiling.geometry.per_message, 1, tiling.geometry.per_message), tiling.interpret)
    has_own, to_wire = x_RC is not None, dtype is None
    if has_own:
        tiling.check_alignment()
    operand = jnp.bfloat16 if not to_wire or not has_own else rotation.operand_dtype(x_RC.dtype)
    rotator = rotation.Rotator(tiling, operand)
    source, inputs = Wires(tiling), Inputs(tiling, exponents, seed)
    sources = ranks - has_own
    x_RC = x_RC if has_own else jnp.zeros((8, tiling.row), jnp.bfloat16)
    rank = rank if has_own else jnp.zeros((1,), jnp.int32)
    x_dtype, y_dtype = x_RC.dtype, jnp.dtype(dtype or jnp.bfloat16)
    y_transforms = rotation.transforms(y_dtype, tiling.chunk)

    tile = ROWS * tiling.row
    own_bytes = tile * x_dtype.itemsize if has_own else 0
    out_bytes = Writer.scratch_bytes(one, 1) if to_wire else tile * y_dtype.itemsize
    stage_bytes = sources * source.scratch_bytes() + own_bytes
    # Two stages hide the memory's latency where they fit. A third warpgroup is worth 1 to 8 % on an H200 where memory
    # is the limit, and wanted more where instructions are.
    workers, stages = pipeline.fit(
        one, rotator.bytes, stage_bytes, out_bytes, stages=(2, 1), enough=2, most=3 if to_wire else 2,
        # What costs more instructions (4 % slower), or has a product after the sum (and no register left), does not.
        may_draw=to_wire and fmt.bits == 8,
    )  # fmt: skip
    warpgroups = workers.warpgroups
    # Starting the copies of all wires at once keeps the addresses of each in registers, which three warpgroups have not
    # got beside a product; a loop executes more.
    looped = warpgroups > 2 and rotator.active
    width = Writer.tensor_width(one)

    def reduce_tiles(tickets, codes_g, scales_g, x_g, r_g, m_g, e_g, n_g, *refs):
        outputs, refs = refs[: 1 + to_wire], refs[1 + to_wire :]
        codes_s, in_scales_s, x_s, m_s, out_s, scales_s, m_bar, x_bars, bars = refs
        wg = workers.warpgroup()
        rotator.load(m_g, m_s, m_bar, wg)
        own_rank = r_g[0] if has_own else jnp.int32(ranks)
        exponents_g = e_g if inputs.has_exponent else None
        exponent = e_g[0] if inputs.has_exponent and fmt.scale != "site" else None
        if to_wire:
            writer = Writer(
                one,
                workers,
                outputs[0],
                out_s.at[wg],
                scales_s=scales_s.at[wg],
                exponents_g=exponents_g,
                buffers=1,
                width=width,
            )

        def begin():
            if to_wire:
                writer.fill()
            rotator.wait(m_bar)

        def barrier(slot):
            return wg * stages + slot

        def load(t, slot):
            row = one.locate(t)[1]

            def wire(j, carry):
                message = j + (j >= own_rank).astype(jnp.int32)
                to = codes_s.at[wg, slot, j], in_scales_s.at[wg, slot, j], bars.at[barrier(slot) * sources + j]
                source.load(codes_g, scales_g, message, row, *to)
                return carry

            lax.fori_loop(0, sources, wire, 0, unroll=not looped)
            if has_own:
                rows = pl.ds(tiling.x_row(own_rank, row), ROWS)
                plgpu.copy_gmem_to_smem(x_g.at[rows], x_s.at[wg, slot], x_bars.at[barrier(slot)])

        def work(t, slot, parity, free, largest):
            row = one.locate(t)[1]

            def add(total, z):
                return tuple(a + b for a, b in zip(total, z))

            def wire(p):
                j = p - (p > own_rank).astype(jnp.int32)
                plgpu.barrier_wait(bars.at[barrier(slot) * sources + j])
                codes = blocks.decode(tiling, codes_s.at[wg, slot, j])
                scales = source.scales(scales_g, p, row, in_scales_s.at[wg, slot, j], exponent)
                return tuple(blocks.scale_rows(tiling, codes, scales))

            def own():
                plgpu.barrier_wait(x_bars.at[barrier(slot)])
                return tuple(rotator.rotate(x_s.at[wg, slot], m_s))

            def wires(first, last, total):
                return lax.fori_loop(first, last, lambda p, total: add(total, wire(p)), total)

            def before():
                return wires(jnp.int32(1), own_rank, wire(jnp.int32(0)))

            # A sum begins with a term, not with a zero, which registers would have to be set to: but where a product
            # comes after it, which needs them. -0 changes nothing, the sign of a zero included.
            zero = plgpu.layout_cast(jnp.full((ROWS, tiling.chunk), -0.0, jnp.float32), plgpu.Layout.WGMMA)
            if not has_own:
                total = before()
            elif to_wire:
                total = lax.cond(own_rank == 0, own, lambda: add(before(), own()))
            else:
                total = lax.cond(own_rank == 0, lambda: (zero,) * (tiling.row // tiling.chunk), before)
                total = add(total, own())
            if has_own:
                total = wires(own_rank + 1, jnp.int32(ranks), total)
            free()
            if to_wire:
                noise = inputs.noise(n_g, jnp.int32(0), row, offsets)
                return jnp.maximum(largest, writer.write(jnp.int32(0), row, parity, list(total), noise))
            values = rotator.unrotate(list(total), m_s, y_dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer = out_s.at[wg]
            blocks.store_tile(tiling, buffer, [v.astype(y_dtype) for v in values], y_transforms)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, outputs[0].at[pl.ds(row, ROWS)])
            return largest

        largest = pipeline.run(workers, stages, load, work, carry=Writer.nothing(one), begin=begin, tickets=tickets)
        plgpu.wait_smem_to_gmem(0)
        if to_wire:
            writer.put_largest(outputs[1], largest)

    if to_wire:
        out_s, scales_s = Writer.scratch(one, warpgroups, 1, width)
        out_type = [Writer.out_type(one, width), Writer.maxima_type(workers)]
    else:
        out_s = plgpu.SMEM((warpgroups, ROWS, tiling.row), y_dtype, transforms=y_transforms)
        scales_s = plgpu.SMEM((8,), jnp.uint8)
        out_type = jax.ShapeDtypeStruct((one.rows, tiling.row), y_dtype)
    x_shape = (warpgroups, stages, ROWS, tiling.row) if has_own else (1, 1, 8, tiling.row)
    x_s = plgpu.SMEM(x_shape, x_dtype, transforms=rotation.transforms(x_dtype, tiling.chunk))
    slots = warpgroups * stages
    barriers = [plgpu.Barrier(), plgpu.Barrier(num_barriers=slots), source.barrier(slots * sources)]
    out = pipeline.call(
        reduce_tiles, [*source.arrays(wires_PW), x_RC, rank, rotator.operand, *inputs.arrays], out_type,
        [*source.scratch(warpgroups, stages, sources), x_s, rotator.scratch, out_s, scales_s, *barriers],
        workers,
    )  # fmt: skip
    return (out[0].reshape(1, -1), out[1]) if to_wire else out
