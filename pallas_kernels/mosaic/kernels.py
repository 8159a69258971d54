"""The three kernels, in the order in which a tile is worked on: encode, reduce (of wires and own rows), decode.

    encode:  z = H x;   s = max(max|z|, 2^-100) / Qmax, rounded up;   q = cast(clip(z / s))
    reduce:  z = sum over p, in rank order, of (p is the own rank ? H x : s_p q_p) in float32; encoded again, or H z
    decode:  x = H (s q) = s (H q): the codes themselves go through the tensor cores, exact in float16

Each is one pass over memory. `encode_tile` is the codec of one tile, in the formulas of `tile_codec.py`. The loop over
tiles is in `pipeline.py`, wires are read and written by `wire_io.py`, the products with H are in `rotation.py`.

Names end in their memory: _g is global memory, _s the CTA's shared memory; what has no such ending is in registers.
The table of each kernel's scratch is its budget, with the numbers of `taco` in bfloat16 (e4m3, blocks of 128). Shared
memory: `tiling.SMEM_BYTES` for a CTA; a barrier takes 8 bytes. Registers are ptxas' count a thread (CUDA 13.0, sm_90a):
a CTA has 65,536, so a thread at most 255 in two warpgroups, 168 in three, 128 in four.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import Geometry
from pallas_kernels.mosaic import pipeline, rotation, tile_codec
from pallas_kernels.mosaic.tiling import TILE_ROWS, Tiling
from pallas_kernels.mosaic.wire_io import CodecInputs, WireReader, WireWriter


def encode_tile(tiling: Tiling, z: list, exponent, noise: list | None, codes_s) -> tuple[jax.Array, list]:
    """Writes the codes of a tile's rotated blocks to memory [64, row_bytes], global one as of `tile_codec.load_codes`.

    Returns the largest |z| of each row as bits (int32[64]) and the scale bytes: blocks x byte planes of int32[64]; with
    one thread per block int32[64, 8]. exponent: the site's int32 scalar or None; noise: as z, or None.
    """
    n, largest, scale_planes, code_planes = tiling.chunks_per_block, None, [], []
    for b in range(len(z) // n):
        block = z[b * n : (b + 1) * n]
        amax, bits = tile_codec.block_max(tiling, block)
        scale = tile_codec.block_scale(tiling, amax, exponent)
        scaled = tile_codec.scale_rows(tiling, block, [scale.multiplier])
        largest = bits if largest is None else jnp.maximum(largest, bits)
        own_noise = None if noise is None else noise[b * n : (b + 1) * n]
        code_planes += tile_codec.cast_and_pack(tiling, scaled, scale, noise=own_noise, codes_s=codes_s, b=b)
        scale_planes.append(scale.planes)
    tile_codec.store_codes(tiling, code_planes, codes_s)
    return largest, scale_planes


class EncodeScratch(NamedTuple):
    """Budget of `encode`, with W warpgroups of S stages each.

    | resource | count | taco in bfloat16: W = 2, S = 3 |
    |---|---|---|
    | x_s | W S tiles of x | 6 x 16,384 bytes |
    | matrices_s | the rotation's, once a CTA | 32,768 bytes |
    | codes_s, scales_s | W BUFFERS tiles of codes, W of scale bytes | 4 x 8,192 + 2 x 64 bytes |
    | matrices_full, x_full | 1 and W S barriers | 7 |
    | registers | z, its scaled values, addresses | 101 of 255 a thread |
    """

    x_s: Any  # [W, S, 64, row]
    matrices_s: Any
    codes_s: Any  # [W, BUFFERS, 64, row_bytes]
    scales_s: Any  # [W, planes, 64, blocks of a row]
    matrices_full: Any
    x_full: Any  # [W S]


class ResidualScratch(NamedTuple):
    """Budget of `encode` that leaves the residual: that of `EncodeScratch`, and what is written back.

    | resource | count | int4h in bfloat16: W = 2, S = 3 |
    |---|---|---|
    | errors_s | W tiles of x's dtype | 2 x 16,384 bytes |
    """

    x_s: Any
    matrices_s: Any
    codes_s: Any
    scales_s: Any
    matrices_full: Any
    x_full: Any
    errors_s: Any  # [W, 64, row]


BUFFERS = 2  # of outgoing tiles: one is written while the other one is copied


def encode(tiling: Tiling, x_RC, exponents, seed, offsets=(0, 0), error_rows: int = 0) -> tuple[jax.Array, ...]:
    """Encodes rows [R, row] of all messages, missing ones zero: (wires uint8[P, W], largest |z| as bits int32[*, 4]).

    error_rows: of the residual x - decode(wires), which is then returned too, in x's dtype[error_rows, row] of messages
    that lie side by side.
    exponents: int32[1], or int32[P] for scale "site", or None. seed: uint32[2] or None. offsets: as of
    `tile_codec.rounding_noise`. One worker, a warpgroup:

        start copies of the first S tiles of x; zero the gaps between the wires' sections
        for each of its tiles:
            wait for x_full[slot]
            z = rotate(x_s[slot])                       tensor cores
            start the copy of the tile that comes next into the slot
            for each block of a row:
                amax = block_max(z)
                scale = block_scale(amax)
                cast_and_pack(z / scale)
            store: codes through codes_s by a copy, scale bytes from registers
            with residuals: errors_s = x_s - scale * unrotate(codes_s), by a copy; only then is the slot free
        put the largest |z| of all tiles
    """
    tiling.check_alignment()
    rotator = rotation.Rotator(tiling, rotation.operand_dtype(x_RC.dtype))
    inputs = CodecInputs(tiling, exponents, seed)
    stage_bytes = TILE_ROWS * tiling.row_elements * x_RC.dtype.itemsize
    # Two warpgroups saturate HBM (H100). Unrotated sub-8-bit codes are ALU-bound, so they get four, and three where x
    # and its values are in registers at the same time.
    most = (3 if error_rows else 4) if not rotator.active and tiling.fmt.bits < 8 else 2
    out_bytes = WireWriter.scratch_bytes(tiling, BUFFERS) + (stage_bytes if error_rows else 0)
    workers, stages = pipeline.fit(
        tiling, rotator.bytes, stage_bytes, out_bytes, stages=(3, 2), enough=most, most=most, may_be_dynamic=True
    )
    x_transforms = rotation.transforms(x_RC.dtype, tiling.chunk)
    warpgroups, width = workers.warpgroups, WireWriter.tensor_width(tiling)

    def encode_tiles(scheduler, s, x_g, matrices_g, exponents_g, seed_g, wires_g, maxima_g, *errors_g):
        wg = workers.warpgroup()
        rotator.load(matrices_g, s.matrices_s, s.matrices_full, wg)
        writer = WireWriter(
            tiling, workers, wires_g, s.codes_s.at[wg], scales_s=s.scales_s.at[wg],
            exponents_g=exponents_g if inputs.has_exponent else None, buffers=BUFFERS, width=width,
        )  # fmt: skip

        def load(tile, slot):
            message, row = tiling.locate(tile)
            rows = pl.ds(tiling.x_row(message, row), TILE_ROWS)
            plgpu.copy_gmem_to_smem(x_g.at[rows], s.x_s.at[wg, slot], s.x_full.at[wg * stages + slot])

        def work(tile, slot, parity, free, largest):
            message, row = tiling.locate(tile)
            plgpu.barrier_wait(s.x_full.at[wg * stages + slot])
            z = rotator.rotate(s.x_s.at[wg, slot], s.matrices_s)
            if not errors_g:
                free()
            noise = inputs.noise(seed_g, message, row, offsets)
            buffer = writer.free_buffer(parity)
            found, scale_planes = encode_tile(tiling, z, writer.exponent(message), noise, buffer)
            writer.store(message, row, buffer, scale_planes)
            if errors_g:
                scales = decoded_scales(tiling, scale_planes, writer.exponent(message))
                put_residual(message, row, s.x_s.at[wg, slot], buffer, scales)
                free()
            return jnp.maximum(largest, found)

        def put_residual(message, row, x_s, buffer, scales):
            codes = tile_codec.load_codes(
                tiling, buffer, jnp.float16 if rotator.active else jnp.float32, swizzled=width is not None
            )
            values = tile_codec.scale_rows(tiling, rotator.unrotate_codes(codes, s.matrices_s), scales)
            # Its last copy came before that of the codes.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            xs = tile_codec.load_values(tiling, x_s)
            # In the dtype of x, as `decode` returns them.
            errors = [x - v.astype(x_RC.dtype).astype(jnp.float32) for x, v in zip(xs, values)]
            out = s.errors_s.at[wg]
            tile_codec.store_tile(tiling, out, [e.astype(x_RC.dtype) for e in errors], x_transforms)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, errors_g[0].at[pl.ds(message * tiling.rows + row, TILE_ROWS)])

        def begin():
            writer.fill()
            rotator.wait(s.matrices_full)

        nothing = WireWriter.no_maxima(tiling)
        largest = pipeline.run(workers, stages, load, work, carry=nothing, begin=begin, scheduler=scheduler)
        plgpu.wait_smem_to_gmem(0)
        writer.put_largest(maxima_g, largest)

    shape = (warpgroups, stages, TILE_ROWS, tiling.row_elements)
    codes_s, scales_s = WireWriter.scratch(tiling, warpgroups, BUFFERS, width)
    scratch = EncodeScratch(
        x_s=plgpu.SMEM(shape, x_RC.dtype, transforms=x_transforms),
        matrices_s=rotator.scratch,
        codes_s=codes_s,
        scales_s=scales_s,
        matrices_full=plgpu.Barrier(),
        x_full=plgpu.Barrier(num_barriers=warpgroups * stages),
    )
    out_type = [WireWriter.out_type(tiling, width), WireWriter.maxima_type(workers)]
    if error_rows:
        errors_s = plgpu.SMEM((warpgroups, TILE_ROWS, tiling.row_elements), x_RC.dtype, transforms=x_transforms)
        scratch = ResidualScratch(*scratch, errors_s)
        out_type.append(jax.ShapeDtypeStruct((error_rows, tiling.row_elements), x_RC.dtype))
        encode_tiles.__name__ = "encode_tiles_with_residual"
    wires, *others = pipeline.call(
        encode_tiles, [x_RC, rotator.operand, *inputs.arrays], out_type, scratch=scratch, workers=workers
    )
    return wires.reshape(tiling.geometry.messages, -1), *others


def decoded_scales(tiling: Tiling, scale_planes: list, exponent) -> list:
    """Returns the scales of a tile's blocks as a decoder reads them from these bytes, as `WireReader.scales`."""
    fmt = tiling.fmt
    if fmt.scale == "site":
        return [tile_codec.read_scales(fmt, [(exponent + 127) & 0xFF], None)] * tiling.blocks_per_row
    return [tile_codec.read_scales(fmt, planes, exponent) for planes in scale_planes]


def largest_scale(bits: jax.Array, tiling: Tiling) -> jax.Array:
    """Returns the largest block scale before rounding, float32[], of bits of largest magnitudes; NaN where one is not
    finite."""
    return lax.bitcast_convert_type(jnp.max(bits), jnp.float32) * tiling.fmt.reciprocal_maximum


class ReduceScratch(NamedTuple):
    """Budget of `reduce`, with W warpgroups of S stages each and N wires: P, or P - 1 where the own term is rows of x.

    | resource | count | taco in bfloat16, P = 4 with the own rows: W = 2, S = 2, N = 3 |
    |---|---|---|
    | codes_s, in_scales_s | W S N tiles of codes, of scale bytes | 12 x (8,192 + 128) bytes |
    | x_s | W S tiles of x | 4 x 16,384 bytes |
    | matrices_s | the rotation's, once a CTA | 32,768 bytes |
    | out_s, scales_s | W tiles of codes and of scale bytes, or of y | 2 x (8,192 + 64) bytes |
    | matrices_full, x_full, codes_full | 1, W S and W S N barriers | 17 |
    | registers | the sum, one term, addresses of N wires | 176 of 255; 255 to values (S = 1) |
    """

    codes_s: Any  # [W, S, N, 64, row_bytes]
    in_scales_s: Any  # [W, S, N, planes, 64 and some, blocks of a row]
    x_s: Any  # [W, S, 64, row]
    matrices_s: Any
    out_s: Any  # [W, 1, 64, row_bytes] or [W, 64, row]
    scales_s: Any
    matrices_full: Any
    x_full: Any  # [W S]
    codes_full: Any  # [W S N]


class SumResidualScratch(NamedTuple):
    """Budget of `reduce` that leaves the residual: that of `ReduceScratch`, and errors_s, W tiles of x's dtype."""

    codes_s: Any
    in_scales_s: Any
    x_s: Any
    matrices_s: Any
    out_s: Any
    scales_s: Any
    matrices_full: Any
    x_full: Any
    codes_full: Any
    errors_s: Any  # [W, 64, row]


def reduce(tiling: Tiling, wires_PW, x_RC, rank, exponents, seed, dtype=None, offsets=(0, 0), residual=False):
    """Sums P wires [P, W] and the own rows of x: the middle of an all-reduce.

    Returns (wire uint8[1, W], largest |z| as bits int32[*, 4]) where `dtype` is None, else the sum dtype[rows, row].
    residual: with the wire also the sum less what that says of it, both in x's dtype[rows, row].
    x_RC and rank (int32[1]) are None where every term is in a wire. The own term is not quantised. Of two ranks whose
    wires lie apart, wires_PW is the pair (own [1, W], received [1, W]), with the rank and no x. One worker:

        start copies of the first S tiles, of all wires and of x
        for each of its tiles:
            total = nothing
            for each rank p, in order:
                wait for codes_full or x_full
                total += rotate(x_s) if p is the own rank else scale * codes
            start the copies of the tile that comes next into the slot
            encode_tile(total) and store, as `encode`; or y = unrotate(total), by a copy
        put the largest |z| of all tiles
    """
    fmt, ranks, apart = tiling.fmt, tiling.geometry.messages, isinstance(wires_PW, tuple)
    sum_tiling = Tiling(fmt, Geometry(tiling.geometry.per_message, 1, tiling.geometry.per_message), tiling.interpret)
    has_own, to_wire = x_RC is not None, dtype is None
    if has_own:
        tiling.check_alignment()
    operand = jnp.bfloat16 if not to_wire or not has_own else rotation.operand_dtype(x_RC.dtype)
    rotator = rotation.Rotator(tiling, operand)
    reader, inputs = WireReader(tiling), CodecInputs(tiling, exponents, seed)
    n_wires = ranks - has_own
    x_RC = x_RC if has_own else jnp.zeros((8, tiling.row_elements), jnp.bfloat16)
    rank = rank if has_own or apart else jnp.zeros((1,), jnp.int32)
    x_dtype, y_dtype = x_RC.dtype, jnp.dtype(dtype or jnp.bfloat16)
    y_transforms = rotation.transforms(y_dtype, tiling.chunk)

    tile_elements = TILE_ROWS * tiling.row_elements
    own_bytes = tile_elements * x_dtype.itemsize if has_own else 0
    out_bytes = WireWriter.scratch_bytes(sum_tiling, 1) if to_wire else tile_elements * y_dtype.itemsize
    out_bytes += tile_elements * x_dtype.itemsize if residual else 0
    stage_bytes = n_wires * reader.scratch_bytes() + own_bytes
    # Two stages hide the memory's latency where they fit. A third warpgroup is worth 1 to 8 % on an H200 where memory
    # is the limit, and wanted more where instructions are.
    workers, stages = pipeline.fit(
        sum_tiling, rotator.bytes, stage_bytes, out_bytes, stages=(2, 1), enough=2,
        most=3 if to_wire and not residual else 2,
        # Sums of other formats have more instructions and are 4 % slower with the scheduler; a product after the
        # sum leaves it no register.
        may_be_dynamic=to_wire and fmt.bits == 8 and not residual,
    )  # fmt: skip
    warpgroups = workers.warpgroups
    # An unrolled start of all wires' copies keeps the addresses of each in registers. Three warpgroups (168 a thread)
    # have none left beside a product, so they take a loop, which executes more instructions.
    looped = warpgroups > 2 and rotator.active
    width = WireWriter.tensor_width(sum_tiling)

    sources = [reader.arrays(wires) for wires in (wires_PW if apart else (wires_PW,))]

    def reduce_tiles(scheduler, s, *refs):
        wires_g = [refs[2 * i : 2 * i + 2] for i in range(len(sources))]
        x_g, rank_g, matrices_g, exponents_g, seed_g, *outputs_g = refs[2 * len(sources) :]
        codes_g, scales_g = wires_g[0]
        wg = workers.warpgroup()
        rotator.load(matrices_g, s.matrices_s, s.matrices_full, wg)
        own_rank = rank_g[0] if has_own else jnp.int32(ranks)
        exponent = exponents_g[0] if inputs.has_exponent and fmt.scale != "site" else None
        if to_wire:
            writer = WireWriter(
                sum_tiling, workers, outputs_g[0], s.out_s.at[wg], scales_s=s.scales_s.at[wg],
                exponents_g=exponents_g if inputs.has_exponent else None, buffers=1, width=width,
            )  # fmt: skip

        def begin():
            if to_wire:
                writer.fill()
            rotator.wait(s.matrices_full)

        def barrier(slot):
            return wg * stages + slot

        def load(t, slot):
            row = sum_tiling.locate(t)[1]

            def wire(j, carry):
                message = j + (j >= own_rank).astype(jnp.int32)
                full = s.codes_full.at[barrier(slot) * n_wires + j]
                to = s.codes_s.at[wg, slot, j], s.in_scales_s.at[wg, slot, j], full
                reader.load(codes_g, scales_g, message, row, *to)
                return carry

            if apart:
                load_apart(row, slot)
            else:
                lax.fori_loop(0, n_wires, wire, 0, unroll=not looped)
            if has_own:
                rows = pl.ds(tiling.x_row(own_rank, row), TILE_ROWS)
                plgpu.copy_gmem_to_smem(x_g.at[rows], s.x_s.at[wg, slot], s.x_full.at[barrier(slot)])

        def load_apart(row, slot):
            """Starts the copies of both wires' tile: slots have the order of ranks."""
            for (first, second), here in (((0, 1), rank_g[0] == 0), ((1, 0), rank_g[0] != 0)):

                @pl.when(here)
                def _(order=(first, second)):
                    for j, i in enumerate(order):
                        full = s.codes_full.at[barrier(slot) * n_wires + j]
                        to = s.codes_s.at[wg, slot, j], s.in_scales_s.at[wg, slot, j], full
                        reader.load(*wires_g[i], jnp.int32(0), row, *to)

        def work(t, slot, parity, free, largest):
            row = sum_tiling.locate(t)[1]

            def add(total, z):
                return tuple(a + b for a, b in zip(total, z))

            def wire(p):
                j = p - (p > own_rank).astype(jnp.int32)
                plgpu.barrier_wait(s.codes_full.at[barrier(slot) * n_wires + j])
                codes = tile_codec.load_codes(tiling, s.codes_s.at[wg, slot, j])
                scales = reader.scales(scales_g, p, row, s.in_scales_s.at[wg, slot, j], exponent)
                return tuple(tile_codec.scale_rows(tiling, codes, scales))

            def own():
                plgpu.barrier_wait(s.x_full.at[barrier(slot)])
                return tuple(rotator.rotate(s.x_s.at[wg, slot], s.matrices_s))

            def wires(first, last, total):
                return lax.fori_loop(first, last, lambda p, total: add(total, wire(p)), total)

            def before():
                return wires(jnp.int32(1), own_rank, wire(jnp.int32(0)))

            # A sum begins with a term: a zero costs instructions that set its registers. Where a product comes after
            # it, which needs registers, it begins with -0, which changes no term, the sign of a zero included.
            zero = plgpu.layout_cast(jnp.full((TILE_ROWS, tiling.chunk), -0.0, jnp.float32), plgpu.Layout.WGMMA)
            if not has_own:
                total = before()
            elif to_wire:
                total = lax.cond(own_rank == 0, own, lambda: add(before(), own()))
            else:
                total = lax.cond(own_rank == 0, lambda: (zero,) * (tiling.row_elements // tiling.chunk), before)
                total = add(total, own())
            if has_own:
                total = wires(own_rank + 1, jnp.int32(ranks), total)
            free()
            if to_wire:
                noise = inputs.noise(seed_g, jnp.int32(0), row, offsets)
                buffer = writer.free_buffer(parity)
                found, scale_planes = encode_tile(sum_tiling, list(total), writer.exponent(jnp.int32(0)), noise, buffer)
                writer.store(jnp.int32(0), row, buffer, scale_planes)
                if residual:
                    put_residual(row, list(total), buffer, decoded_scales(sum_tiling, scale_planes, exponent_of_sum()))
                return jnp.maximum(largest, found)
            values = rotator.unrotate(list(total), s.matrices_s, y_dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer = s.out_s.at[wg]
            tile_codec.store_tile(tiling, buffer, [v.astype(y_dtype) for v in values], y_transforms)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, outputs_g[0].at[pl.ds(row, TILE_ROWS)])
            return largest

        def exponent_of_sum():
            return writer.exponent(jnp.int32(0))

        def put_residual(row, total, buffer, scales):
            in_x = lambda values: [v.astype(x_dtype).astype(jnp.float32) for v in values]
            sums = in_x(rotator.unrotate(total, s.matrices_s, x_dtype))
            codes = tile_codec.load_codes(
                sum_tiling, buffer, jnp.float16 if rotator.active else jnp.float32, swizzled=width is not None
            )
            said = in_x(tile_codec.scale_rows(sum_tiling, rotator.unrotate_codes(codes, s.matrices_s), scales))
            # Its last copy ended before the codes were written.
            out = s.errors_s.at[wg]
            errors = [(a - b).astype(x_dtype) for a, b in zip(sums, said)]
            tile_codec.store_tile(sum_tiling, out, errors, rotation.transforms(x_dtype, tiling.chunk))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, outputs_g[2].at[pl.ds(row, TILE_ROWS)])

        nothing = WireWriter.no_maxima(sum_tiling)
        largest = pipeline.run(workers, stages, load, work, carry=nothing, begin=begin, scheduler=scheduler)
        plgpu.wait_smem_to_gmem(0)
        if to_wire:
            writer.put_largest(outputs_g[1], largest)

    if to_wire:
        out_s, scales_s = WireWriter.scratch(sum_tiling, warpgroups, 1, width)
        out_type = [WireWriter.out_type(sum_tiling, width), WireWriter.maxima_type(workers)]
    else:
        out_s = plgpu.SMEM((warpgroups, TILE_ROWS, tiling.row_elements), y_dtype, transforms=y_transforms)
        scales_s = plgpu.SMEM((8,), jnp.uint8)
        out_type = jax.ShapeDtypeStruct((sum_tiling.rows, tiling.row_elements), y_dtype)
    x_shape = (warpgroups, stages, TILE_ROWS, tiling.row_elements) if has_own else (1, 1, 8, tiling.row_elements)
    codes_s, in_scales_s = reader.scratch(warpgroups, stages, n_wires)
    scratch = ReduceScratch(
        codes_s=codes_s,
        in_scales_s=in_scales_s,
        x_s=plgpu.SMEM(x_shape, x_dtype, transforms=rotation.transforms(x_dtype, tiling.chunk)),
        matrices_s=rotator.scratch,
        out_s=out_s,
        scales_s=scales_s,
        matrices_full=plgpu.Barrier(),
        x_full=plgpu.Barrier(num_barriers=warpgroups * stages),
        codes_full=reader.barrier(warpgroups * stages * n_wires),
    )
    if residual:
        transforms = rotation.transforms(x_dtype, tiling.chunk)
        errors_s = plgpu.SMEM((warpgroups, TILE_ROWS, tiling.row_elements), x_dtype, transforms=transforms)
        scratch = SumResidualScratch(*scratch, errors_s)
        out_type.append(jax.ShapeDtypeStruct((sum_tiling.rows, tiling.row_elements), x_dtype))
        reduce_tiles.__name__ = "reduce_tiles_with_residual"
    arrays = [*(array for own in sources for array in own), x_RC, rank, rotator.operand, *inputs.arrays]
    out = pipeline.call(reduce_tiles, arrays, out_type, scratch=scratch, workers=workers)
    return (out[0].reshape(1, -1), *out[1:]) if to_wire else out


class DecodeScratch(NamedTuple):
    """Budget of `decode`, with W warpgroups of S stages each.

    | resource | count | taco to bfloat16: W = 3, S = 3 |
    |---|---|---|
    | codes_s, scales_s | W S tiles of codes, of scale bytes | 9 x (8,192 + 128) bytes |
    | matrices_s | the rotation's, once a CTA | 32,768 bytes |
    | y_s | W BUFFERS tiles of y | 6 x 16,384 bytes |
    | matrices_full, codes_full | 1 and W S barriers | 10 |
    | registers | values of codes, their product, addresses | 125 of 168 |
    """

    codes_s: Any  # [W, S, 64, row_bytes]
    scales_s: Any  # [W, S, planes, 64 and some, blocks of a row]
    matrices_s: Any
    y_s: Any  # [W, BUFFERS, 64, row]
    matrices_full: Any
    codes_full: Any  # [W S]


def decode(tiling: Tiling, wires_PW, rows: int, dtype, exponents) -> jax.Array:
    """Decodes wires of messages that lie side by side: the first `rows` rows of them all, dtype[rows, row].

    One worker:

        start copies of the codes and scale bytes of the first S tiles
        for each of its tiles:
            wait for codes_full[slot]
            codes, scales = codes_s[slot], scales_s[slot]
            start the copies of the tile that comes next into the slot
            y = scales * unrotate(codes)                tensor cores
            store: y through y_s by a copy
    """
    tiling.check_alignment()
    dtype = jnp.dtype(dtype)
    transforms = rotation.transforms(dtype, tiling.chunk)
    rotator = rotation.Rotator(tiling, jnp.float16)
    reader, inputs = WireReader(tiling), CodecInputs(tiling, exponents, None)
    out_bytes = BUFFERS * TILE_ROWS * tiling.row_elements * dtype.itemsize
    # Codes of 4 and 8 bits gain from a third warpgroup and from the scheduler (H200). Those of 5 and 6 bits, with more
    # instructions, gain nothing from it, and lose 0 to 4 % with the scheduler.
    fast = tiling.fmt.bits in (4, 8)
    most = 3 if fast else 2
    workers, stages = pipeline.fit(
        tiling, rotator.bytes, reader.scratch_bytes(), out_bytes, stages=(3, 2), enough=most, most=most,
        may_be_dynamic=fast,
    )  # fmt: skip
    warpgroups = workers.warpgroups

    def decode_tiles(scheduler, s: DecodeScratch, codes_g, scales_g, matrices_g, exponents_g, seed_g, y_g):
        wg = workers.warpgroup()
        rotator.load(matrices_g, s.matrices_s, s.matrices_full, wg)
        exponent = exponents_g[0] if inputs.has_exponent else None

        def load(tile, slot):
            message, row = tiling.locate(tile)
            to = s.codes_s.at[wg, slot], s.scales_s.at[wg, slot], s.codes_full.at[wg * stages + slot]
            reader.load(codes_g, scales_g, message, row, *to)

        def work(tile, slot, parity, free, carry):
            message, row = tiling.locate(tile)
            plgpu.barrier_wait(s.codes_full.at[wg * stages + slot])
            codes = tile_codec.load_codes(
                tiling, s.codes_s.at[wg, slot], jnp.float16 if rotator.active else jnp.float32
            )
            scales = reader.scales(scales_g, message, row, s.scales_s.at[wg, slot], exponent)
            free()
            values = tile_codec.scale_rows(tiling, rotator.unrotate_codes(codes, s.matrices_s), scales)
            plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
            buffer = s.y_s.at[wg, parity]
            tile_codec.store_tile(tiling, buffer, [v.astype(dtype) for v in values], transforms)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, y_g.at[pl.ds(message * tiling.rows + row, TILE_ROWS)])
            return carry

        begin = lambda: rotator.wait(s.matrices_full)
        pipeline.run(workers, stages, load, work, carry=jnp.int32(0), begin=begin, scheduler=scheduler)
        plgpu.wait_smem_to_gmem(0)

    codes_s, scales_s = reader.scratch(warpgroups, stages)
    scratch = DecodeScratch(
        codes_s=codes_s,
        scales_s=scales_s,
        matrices_s=rotator.scratch,
        y_s=plgpu.SMEM((warpgroups, BUFFERS, TILE_ROWS, tiling.row_elements), dtype, transforms=transforms),
        matrices_full=plgpu.Barrier(),
        codes_full=reader.barrier(warpgroups * stages),
    )
    out_type = jax.ShapeDtypeStruct((rows, tiling.row_elements), dtype)
    arrays = [*reader.arrays(wires_PW), rotator.operand, *inputs.arrays]
    return pipeline.call(decode_tiles, arrays, out_type, scratch=scratch, workers=workers)
