"""The codec of one tile in registers: block maxima, scales, casts and packing, and the way back.

    s = max(max|z|, 2^-100) / Qmax, rounded up;   q = cast(clip(z / s))               (`taco_jax/codec/codec.py`)

A tile's rotated blocks are a list of float32[64, chunk] arrays in column order: `tiling.chunks_per_block` of them make
a block. A value for each block is an array [64], one entry a row. Unrotated blocks of 32 are one array float32[64, 128]
of four blocks, and values for each block an array [64, 8] (`registers/thread_blocks.py`).

`interpret` is true in the CPU interpreter, which runs no inlined MLIR.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.formats import GOLDEN, MAX_EXPONENT, TINY, UNCALIBRATED, Format, lowbias32, packing_parts
from pallas_kernels.mosaic import elements, interpreter
from pallas_kernels.mosaic.registers import layout, pack_int, thread_blocks
from pallas_kernels.mosaic.tiling import TILE_ROWS, Tiling


class BlockScale(NamedTuple):
    """The scale of each block.

    multiplier: float32, 1 / s; finite: bool, whether all of the block is (with one thread per block int32: all ones or
    zero); planes: the scale bytes as int32, one array a byte plane. For scale "site" the multiplier is one for all.
    """

    multiplier: jax.Array
    finite: jax.Array
    planes: list


def block_max(tiling: Tiling, block: list) -> tuple[jax.Array, jax.Array]:
    """Returns max |z| of each block, and its bits as int32. NaN stays, and is larger than Inf."""
    interpret = tiling.interpret is not None
    if tiling.one_thread_per_block:
        bits = thread_blocks.block_maxima(*block, interpret)
        return lax.bitcast_convert_type(bits, jnp.float32), bits
    if interpret:
        return interpreter.row_maxima(block)
    total = None
    for c in block:
        m = jnp.max(jnp.abs(c), axis=1)
        total = m if total is None else jnp.maximum(total, m)
    return total, lax.bitcast_convert_type(total, jnp.int32)


def block_scale(tiling: Tiling, amax: jax.Array, exponent) -> BlockScale:
    """Returns the scales of blocks with these maxima. exponent: the site's int32 scalar, None where there is none."""
    fmt = tiling.fmt
    finite = amax < np.float32(np.inf)  # False for NaN too
    if fmt.scale == "site":
        multiplier, planes = _float(jnp.minimum(jnp.maximum(127 - exponent, 1), 254) << 23), []
    else:
        multiplier, planes = _scale_bytes(fmt, amax, finite, exponent)
    if tiling.one_thread_per_block:
        finite = jnp.where(finite, np.int32(-1), np.int32(0))
    return BlockScale(multiplier, finite, planes)


def read_scales(fmt: Format, planes: list, exponent) -> jax.Array:
    """Returns float32 scales of scale bytes as int32, one array a byte plane; NaN marks a block that is not finite."""
    word = planes[0]
    for i, plane in enumerate(planes[1:], 1):
        word = word | (plane << (8 * i))
    if fmt.scale in ("float32", "bfloat16"):
        return _float(word << 16 if fmt.scale == "bfloat16" else word)
    s = _e8m0(word, fmt.scale_bias)
    if fmt.scale == "ue5m3" and exponent is not None:
        calibrated, a8 = _site(exponent)
        s = jnp.where(calibrated, _float((word + 896 + a8) << 20), s)
    return jnp.where(word == 255, np.float32(np.nan), s)


def scale_rows(tiling: Tiling, values: list, scales: list) -> list[jax.Array]:
    """Returns values[chunk] * scales[its block], row by row."""
    if tiling.one_thread_per_block:
        return [values[0] * thread_blocks.spread(scales[0])]
    n = tiling.chunks_per_block
    return [v * _columns(scales[i // n], v) for i, v in enumerate(values)]


def cast_and_pack(tiling: Tiling, scaled: list, scale: BlockScale, noise: list | None, codes_s, b: int) -> list:
    """Rounds block b, already scaled, and packs its codes. noise: as `scaled`, for stochastic rounding.

    Returns byte planes that are still to be stored (`store_codes`). There are none where inlined code has rounded,
    packed and written them to codes_s at once: it goes one of three ways.

    | way | blocks |
    |---|---|
    | `thread_blocks.pack` | unrotated blocks of 32 |
    | `pack_int.pack_block` | rotated integers |
    | `elements.to_codes`, `elements.pack` | others: rotated floats, unrotated blocks from 64 on, noise, scale "site" |
    """
    fmt, interpret = tiling.fmt, tiling.interpret is not None
    if tiling.one_thread_per_block and thread_blocks.can_pack(fmt) and noise is None and not interpret:
        thread_blocks.pack(fmt, codes_s, elements.clip(fmt, *scaled, interpret), scale.finite)
        return []
    if pack_int.can_pack(fmt) and not interpret:
        integers = [elements.rounded(elements.clip(fmt, v, interpret)) for v in scaled]
        start, pitch = b * fmt.block * fmt.bits // 8, _pitch(tiling, codes_s)
        pack_int.pack_block(fmt, codes_s, start, _parts(tiling, integers), finite=scale.finite, pitch=pitch)
        return []
    finite = thread_blocks.spread(scale.finite) != 0 if tiling.one_thread_per_block else scale.finite
    scaled = [jnp.where(_columns(finite, v), v, np.float32(0)) for v in scaled]
    codes = []
    for i, v in enumerate(scaled):
        q = elements.to_codes(fmt, v, None if noise is None else noise[i], interpret)
        if fmt.scale == "site":
            q = jnp.where(_columns(finite, v), q.astype(jnp.int32), jnp.int32(fmt.nan))
            q = q.astype(jnp.uint8) if fmt.bits == 8 else q
        codes.append(q)
    return codes if fmt.bits == 8 else elements.pack(fmt, _parts(tiling, codes))


def store_codes(tiling: Tiling, planes: list, codes_s) -> None:
    """Writes the byte planes of a tile's blocks, uint8[64, w] each, to memory [64, row_bytes]."""
    if not planes:
        return
    if tiling.one_thread_per_block or not tiling.consecutive_bytes:
        row = planes[0] if len(planes) == 1 else jnp.concatenate(planes, axis=1)
        if tiling.one_thread_per_block:
            layout.store_run(codes_s, row, 0, tiling.interpret is not None)
        else:
            compat.store(codes_s, row, optimized=False)
        return
    start = 0
    for plane in planes:
        layout.store_run(codes_s, plane, start, tiling.interpret is not None, _pitch(tiling, codes_s))
        start += plane.shape[1]


def load_codes(tiling: Tiling, codes_s, dtype=jnp.float32, *, swizzled: bool = True) -> list[jax.Array]:
    """Returns the values of codes in memory [64, row_bytes], [64, chunk] arrays without the scales.

    swizzled: the memory is, where the tiling says so. In global memory, which has no reshapes, codes are
    uint8[64 * row_bytes], and in `any_order`. Values are exact in float32 and in float16, which the caller prefers;
    `dtype` is not promised.
    """
    fmt, interpret = tiling.fmt, tiling.interpret is not None
    width, chunk, block_bytes = layout.run_columns(fmt), tiling.chunk, fmt.block * fmt.bits // 8
    starts, pitch = range(0, tiling.row_bytes, block_bytes), _pitch(tiling, codes_s)
    if tiling.one_thread_per_block:
        return [_load_thread_blocks(tiling, codes_s)]
    if pack_int.can_unpack(fmt) and not interpret:
        blocks = [pack_int.unpack_block(fmt, codes_s, start, dtype, pitch) for start in starts]
    else:
        swizzled = swizzled and tiling.swizzle_bytes is not None
        whole = compat.load(codes_s, plgpu.Layout.WGMMA, optimized=True) if swizzled else None

        def plane(start):
            if tiling.consecutive_bytes:
                return layout.load_run(codes_s, start, width, interpret, pitch)
            if swizzled:
                return whole[:, start : start + width]
            return compat.load(codes_s.at[:, pl.ds(start, width)], plgpu.Layout.WGMMA, optimized=False)

        blocks = []
        for start in starts:
            planes = [plane(start + k) for k in range(0, block_bytes, width)]
            codes = planes if fmt.bits == 8 else elements.unpack(fmt, planes)
            blocks.append([elements.from_codes(fmt, q) for q in codes])
    return [_join(runs, i * chunk, chunk, width) for runs in blocks for i in range(tiling.chunks_per_block)]


def load_values(tiling: Tiling, x_s) -> list[jax.Array]:
    """Returns the chunks of a tile [64, row] in swizzled shared memory as float32."""
    if tiling.one_thread_per_block:
        return [thread_blocks.load_tile(x_s, tiling.interpret is not None)]
    x = compat.load(x_s, plgpu.Layout.WGMMA).astype(jnp.float32)
    width = tiling.chunk
    return [x[:, start : start + width] for start in range(0, tiling.row_elements, width)]


def store_tile(tiling: Tiling, y_s, values: list, transforms: tuple) -> None:
    """Writes a row's chunks, in the dtype of `y_s`, to shared memory [64, row] with these transforms."""
    interpret = tiling.interpret is not None
    if tiling.one_thread_per_block:
        thread_blocks.store_tile(y_s, *values, interpret)
        return
    for i, value in enumerate(values):
        compat.store_tile(y_s.at[:, pl.ds(i * tiling.chunk, tiling.chunk)], value, transforms, interpret)


def rounding_noise(tiling: Tiling, message, row, seed: tuple, offsets: tuple[int, int]) -> list[jax.Array]:
    """Returns uniform noise of a tile's elements: a counter hash of message, element and seed
    (`taco_jax/codec/stochastic_rounding.py`).

    offsets: (index of the first message, index of the first element) where the tile's array is a piece of a larger one.
    """
    start = row.astype(jnp.uint32) * np.uint32(tiling.row_elements) + np.uint32(offsets[1])
    key = seed[1] + (message.astype(jnp.uint32) + np.uint32(offsets[0])) * np.uint32(GOLDEN)
    out = []
    for i in range(tiling.row_elements // tiling.chunk):
        shape = (TILE_ROWS, tiling.chunk)
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA).astype(jnp.uint32)
        columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA).astype(jnp.uint32)
        if tiling.one_thread_per_block or layout.applies(tiling.fmt):
            run = tiling.row_elements if tiling.one_thread_per_block else layout.run_columns(tiling.fmt)
            columns = layout.column_of(columns, run)
        index = rows * np.uint32(tiling.row_elements) + columns + (start + np.uint32(i * tiling.chunk))
        h = lowbias32(lowbias32(index ^ seed[0]) ^ key)
        out.append((h >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24))
    return out


def _scale_bytes(fmt: Format, amax, finite, exponent) -> tuple[jax.Array, list]:
    """Returns 1 / s and the scale bytes of `taco_jax/codec/block_scale.py`."""
    clean = jnp.maximum(jnp.where(finite, amax, np.float32(0)), TINY)
    bits = lax.bitcast_convert_type(clean * fmt.reciprocal_maximum, jnp.int32)
    if fmt.scale == "float32":
        s, word, n_bytes, nan = _float(bits), bits, 4, 0x7FC00000
    elif fmt.scale == "bfloat16":
        word = (bits + 0xFFFF) >> 16
        s, n_bytes, nan = _float(word << 16), 2, 0x7FC0
    else:
        word = _clip_byte(((bits + 0x7FFFFF) >> 23) + fmt.scale_bias)
        s, n_bytes, nan = _e8m0(word, fmt.scale_bias), 1, 255
        if fmt.scale == "ue5m3" and exponent is not None:
            calibrated, a8 = _site(exponent)
            c = _clip_byte(((bits + 0xFFFFF) >> 20) - a8 - 896)
            word = jnp.where(calibrated, c, word)
            s = jnp.where(calibrated, _float((c + 896 + a8) << 20), s)
    word = jnp.where(finite, word, nan)
    return np.float32(1.0) / s, [(word >> (8 * i)) & 0xFF for i in range(n_bytes)]


def _load_thread_blocks(tiling: Tiling, codes_s) -> jax.Array:
    fmt, interpret = tiling.fmt, tiling.interpret is not None
    if thread_blocks.can_pack(fmt) and not interpret:
        return thread_blocks.unpack(fmt, codes_s)
    row = layout.load_run(codes_s, 0, tiling.row_bytes, interpret)
    if fmt.bits == 8:
        return elements.from_codes(fmt, row)
    width = tiling.row_elements // packing_parts(fmt.bits)
    parts = elements.unpack(fmt, [row[:, start : start + width] for start in range(0, tiling.row_bytes, width)])
    return elements.from_codes(fmt, jnp.concatenate(parts, axis=1))


def _pitch(tiling: Tiling, codes: Any) -> int | None:
    """Returns the bytes from one row to the next where the memory has no second dimension that says it."""
    return tiling.row_bytes if codes.ndim == 1 else None


def _parts(tiling, chunks) -> list:
    """Returns the parts of a block's chunks that share bytes."""
    if tiling.one_thread_per_block:
        width = tiling.row_elements // packing_parts(tiling.fmt.bits)
        return [chunks[0][:, start : start + width] for start in range(0, tiling.row_elements, width)]
    width, chunk = layout.run_columns(tiling.fmt), tiling.chunk
    starts = range(0, tiling.fmt.block, width)
    return [chunks[o // chunk][:, o % chunk : o % chunk + width] for o in starts]


def _join(parts, start, size, width):
    """Returns columns start..start + size of the concatenation of parts of `width` columns each."""
    if width >= size:
        part = parts[start // width]
        return part if width == size else part[:, start % width : start % width + size]
    return jnp.concatenate(parts[start // width : (start + size) // width], axis=1)


def _columns(values, like):
    """Returns a value for each row along the columns; one for all, or one for each element, stays."""
    return lax.broadcast_in_dim(values, like.shape, [0]) if values.ndim == 1 else values


def _site(exponent):
    a = jnp.minimum(jnp.maximum(exponent, -MAX_EXPONENT), MAX_EXPONENT)
    return exponent != UNCALIBRATED, 8 * a


def _clip_byte(c):
    return jnp.minimum(jnp.maximum(c, 1), 254)


def _e8m0(c, bias):
    return _float(_clip_byte(c - bias if bias else c) << 23)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)
