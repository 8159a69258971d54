"""From the rotated blocks of a tile to bytes, and back, in registers.

A tile's blocks are a list of float32[64, chunk] arrays in column order: `tiling.chunks_per_block` of them make a block.
Unrotated blocks of 32 are one array, and go another way: `owned.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic import elements, interleaving, owned, packing, scales, words
from pallas_kernels.mosaic.tiling import ROWS, Tiling


def encode(tiling: Tiling, z: list, exponent, noise: list | None, codes_s) -> tuple[jax.Array, list]:
    """Writes the codes of a tile to memory [64, row_bytes], global one as of `decode`.

    Returns the largest |z| of each row as bits (int32[64]) and the scale bytes: blocks x byte planes of int32[64]; of
    `owned` blocks int32[64, 8].
    """
    if tiling.owned:
        return owned.encode(tiling, *z, exponent, None if noise is None else noise[0], codes_s)
    fmt, n, interpret = tiling.fmt, tiling.chunks_per_block, tiling.interpret is not None
    block_bytes = fmt.block * fmt.bits // 8
    pitch = tiling.row_bytes if codes_s.ndim == 1 else None
    largest, planes, pieces = None, [], []
    for b in range(tiling.blocks_per_row):
        block = z[b * n : (b + 1) * n]
        amax, bits = _row_maxima(block, interpret)
        multiplier, finite, block_planes = scales.compute(fmt, amax, exponent)
        scaled = [c * _columns(multiplier, c) for c in block]
        planes.append(block_planes)
        largest = bits if largest is None else jnp.maximum(largest, bits)
        if words.writes(fmt) and not interpret:
            integers = [elements.rounded(elements.clip(fmt, v, interpret)) for v in scaled]
            words.store(fmt, codes_s, b * block_bytes, _parts(tiling, integers), finite=finite, pitch=pitch)
            continue
        scaled = [jnp.where(_columns(finite, v), v, np.float32(0)) for v in scaled]
        codes = []
        for i, (c, v) in enumerate(zip(block, scaled)):
            q = elements.to_codes(fmt, v, None if noise is None else noise[b * n + i], interpret)
            if fmt.scale == "site":
                q = jnp.where(_columns(finite, c), q.astype(jnp.int32), jnp.int32(fmt.nan))
                q = q.astype(jnp.uint8) if fmt.bits == 8 else q
            codes.append(q)
        pieces += codes if fmt.bits == 8 else packing.pack(fmt, _parts(tiling, codes))
    if not pieces:
        return largest, planes
    if _interleaves(tiling):
        start = 0
        for piece in pieces:
            interleaving.store(codes_s, piece, start, interpret, pitch)
            start += piece.shape[1]
    else:
        row = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)
        compat.store(codes_s, row, optimized=False)
    return largest, planes


def decode(tiling: Tiling, codes_s, dtype=jnp.float32) -> list[jax.Array]:
    """Codes in memory [64, row_bytes] -> their values, [64, chunk] arrays, without the scales.

    In global memory, which has no reshapes, they are uint8[64 * row_bytes], and in `any_order`.

    They are exact in float32 and in float16, which the caller prefers; `dtype` is not promised.
    """
    if tiling.owned:
        return [owned.decode(tiling, codes_s)]
    width, chunk = interleaving.run_columns(tiling.fmt), tiling.chunk
    blocks = _values(tiling, codes_s, dtype)
    return [_join(runs, i * chunk, chunk, width) for runs in blocks for i in range(tiling.chunks_per_block)]


def _values(tiling: Tiling, codes_s, dtype) -> list[list]:
    """The values of each block, in runs of columns that a plane of bytes holds."""
    fmt, interpret = tiling.fmt, tiling.interpret is not None
    width, block_bytes = interleaving.run_columns(fmt), fmt.block * fmt.bits // 8
    starts = range(0, tiling.row_bytes, block_bytes)
    pitch = tiling.row_bytes if codes_s.ndim == 1 else None
    if words.reads(fmt) and not interpret:
        return [words.values(fmt, codes_s, start, dtype, pitch) for start in starts]
    swizzled = swizzle(tiling) is not None
    whole = compat.load(codes_s, plgpu.Layout.WGMMA, optimized=True) if swizzled else None

    def plane(start):
        if _interleaves(tiling):
            return interleaving.load(codes_s, start, width, interpret, pitch)
        if swizzled:
            return whole[:, start : start + width]
        return compat.load(codes_s.at[:, pl.ds(start, width)], plgpu.Layout.WGMMA, optimized=False)

    out = []
    for start in starts:
        planes = [plane(start + k) for k in range(0, block_bytes, width)]
        codes = planes if fmt.bits == 8 else packing.unpack(fmt, planes)
        out.append([elements.from_codes(fmt, q) for q in codes])
    return out


def swizzle(tiling: Tiling) -> int | None:
    """Bytes of the shared-memory swizzle of a tile's codes, None where their rows allow none or need none."""
    ordered = tiling.owned or _interleaves(tiling)
    return tiling.row_bytes if tiling.row_bytes in (64, 128) and not ordered else None


def _interleaves(tiling: Tiling) -> bool:
    """Whether a thread's codes are consecutive bytes of their row."""
    return interleaving.applies(tiling.fmt) or tiling.any_order


def codes_scratch(tiling: Tiling, swizzled: int | None, *slots: int):
    """Shared memory for tiles of codes [*slots, 64, row_bytes]."""
    shape = (*slots, ROWS, tiling.row_bytes)
    if not swizzled:
        return plgpu.SMEM(shape, jnp.uint8)
    transforms = plgpu.TilingTransform((8, swizzled)), plgpu.SwizzleTransform(swizzled)
    return plgpu.SMEM(shape, jnp.uint8, transforms=transforms)


def noise(tiling: Tiling, message, row, seed: tuple, offsets: tuple[int, int]) -> list[jax.Array]:
    """Uniform noise of a tile's elements: a counter hash of message, element and seed
    (`taco_jax/codec/stochastic_rounding.py`).

    offsets: (index of the first message, index of the first element) where the tile's array is a piece of a larger one.
    """
    start = row.astype(jnp.uint32) * np.uint32(tiling.row) + np.uint32(offsets[1])
    key = seed[1] + (message.astype(jnp.uint32) + np.uint32(offsets[0])) * np.uint32(0x9E3779B9)
    out = []
    for i in range(tiling.row // tiling.chunk):
        shape = (ROWS, tiling.chunk)
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA).astype(jnp.uint32)
        columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA).astype(jnp.uint32)
        if tiling.owned or interleaving.applies(tiling.fmt):
            run = tiling.row if tiling.owned else interleaving.run_columns(tiling.fmt)
            columns = interleaving.column(columns, run)
        index = rows * np.uint32(tiling.row) + columns + (start + np.uint32(i * tiling.chunk))
        h = _mix(_mix(index ^ seed[0]) ^ key)
        out.append((h >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24))
    return out


def scale_rows(tiling: Tiling, values: list, scale: list) -> list[jax.Array]:
    """values[chunk] * scale[its block], row by row."""
    if tiling.owned:
        return [owned.scale(*values, scale[0])]
    n = tiling.chunks_per_block
    return [v * _columns(scale[i // n], v) for i, v in enumerate(values)]


def store_tile(tiling: Tiling, ref, values: list, transforms: tuple) -> None:
    """A row's chunks, in the dtype of `ref`, to shared memory [64, row] with these transforms."""
    interpret = tiling.interpret is not None
    if tiling.owned:
        owned.store_tile(ref, *values, interpret)
        return
    for i, value in enumerate(values):
        compat.store_tile(ref.at[:, pl.ds(i * tiling.chunk, tiling.chunk)], value, transforms, interpret)


def _mix(x):
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _parts(tiling, chunks) -> list:
    """A block's chunks -> its parts that share bytes."""
    width, chunk = interleaving.run_columns(tiling.fmt), tiling.chunk
    starts = range(0, tiling.fmt.block, width)
    return [chunks[o // chunk][:, o % chunk : o % chunk + width] for o in starts]


def _join(parts, start, size, width):
    """Columns start..start + size of the concatenation of parts of `width` columns each."""
    if width >= size:
        part = parts[start // width]
        return part if width == size else part[:, start % width : start % width + size]
    return jnp.concatenate(parts[start // width : (start + size) // width], axis=1)


def _columns(rows, like):
    """A value for each row, or one for all, along the columns."""
    return rows if not rows.ndim else lax.broadcast_in_dim(rows, like.shape, [0])


def _row_maxima(block, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """max |z| of each row, and its bits. A GPU's maximum keeps NaN; XLA's on a CPU does not, but that of the bits does:
    NaN lies above Inf."""
    total = None
    for c in block:
        m = lax.bitcast_convert_type(c, jnp.int32) & 0x7FFFFFFF if interpret else jnp.abs(c)
        m = jnp.max(m, axis=1)
        total = m if total is None else jnp.maximum(total, m)
    if interpret:
        return lax.bitcast_convert_type(total, jnp.float32), total
    return total, lax.bitcast_convert_type(total, jnp.int32)
