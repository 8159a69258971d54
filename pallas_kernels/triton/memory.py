"""Where things are: the values of a tile in x, and its codes and scales in a message. Offsets are 64 bits wide.

Sizes come as negated arguments (`elements_`): jax-triton compiles a kernel anew for an integer argument of 1, and
a negated size never is one.
"""

import triton
import triton.language as tl


@triton.jit
def scale_planes(blocks, R: tl.constexpr):
    """Returns of a message (offset of the first scale plane, distance from one plane to the next)."""
    return _round_up(blocks.to(tl.int64) * R.row_bytes, 128), _round_up(blocks.to(tl.int64), 128)


@triton.jit
def message_bytes(blocks, R: tl.constexpr):
    offset, stride = scale_planes(blocks, R)
    if R.is_site:
        return _round_up(offset + 1, 1024)
    else:
        return _round_up(offset + (R.scale_bytes - 1) * stride + blocks, 1024)


@triton.jit
def load_values(x_ptr, available, R: tl.constexpr):
    """The tile of x at x_ptr, of which `available` elements exist, as `parts` tensors [rows, columns]; zeros beyond."""
    available = _within_tile(available, R)
    out = ()
    for i in tl.static_range(R.parts):
        offsets = _offsets(R.block, i * R.columns, R.columns, R)
        out = out + (tl.load(x_ptr + offsets, mask=offsets < available, other=0.0),)
    return out


@triton.jit
def store_values(y_ptr, available, ys, R: tl.constexpr):
    available = _within_tile(available, R)
    for i in tl.static_range(R.parts):
        offsets = _offsets(R.block, i * R.columns, R.columns, R)
        tl.store(y_ptr + offsets, ys[i].to(y_ptr.dtype.element_ty), mask=offsets < available)


@triton.jit
def load_bytes(wire_ptr, first, blocks, R: tl.constexpr):
    """The codes of the tile from block `first`: `slices` tensors int32[rows, code_columns] of each plane in turn.

    Blocks beyond the message are zeros.
    """
    wire_ptr += tl.multiple_of(first.to(tl.int64) * R.row_bytes, 16)
    out = ()
    for plane in tl.static_range(R.planes):
        for s in tl.static_range(R.slices):
            offsets = _offsets(R.row_bytes, plane * R.plane_columns + s * R.code_columns, R.code_columns, R)
            mask = tl.arange(0, R.rows)[:, None] < blocks - first
            out = out + (tl.load(wire_ptr + offsets, mask=mask, other=0).to(tl.int32),)
    return out


@triton.jit
def store_bytes(wire_ptr, first, blocks, data, R: tl.constexpr):
    # A hint that is less than the truth, R.store_bytes: the compiler gives loads of the same shape as many elements
    # for each thread as stores, and loads of more than 16 bytes for each thread are slow.
    wire_ptr += tl.multiple_of(first.to(tl.int64) * R.row_bytes, R.store_bytes)
    for plane in tl.static_range(R.planes):
        for s in tl.static_range(R.slices):
            offsets = _offsets(R.row_bytes, plane * R.plane_columns + s * R.code_columns, R.code_columns, R)
            mask = tl.arange(0, R.rows)[:, None] < blocks - first
            tl.store(wire_ptr + offsets, data[plane * R.slices + s].to(tl.uint8), mask=mask)


@triton.jit
def load_scales(wire_ptr, first, blocks, R: tl.constexpr):
    """The scale bytes of the tile from block `first`: an int32[rows] for each plane, or a message's one byte."""
    offset, stride = scale_planes(blocks, R)
    rows = tl.arange(0, R.rows)
    out = ()
    if R.is_site:
        out = (tl.load(wire_ptr + offset).to(tl.int32),)
    wire_ptr += offset + first
    for plane in tl.static_range(R.scale_bytes):
        out = out + (tl.load(wire_ptr + plane * stride + rows, mask=rows < blocks - first, other=1).to(tl.int32),)
    return out


@triton.jit
def store_scales(wire_ptr, first, blocks, planes, R: tl.constexpr):
    offset, stride = scale_planes(blocks, R)
    wire_ptr += offset + first
    rows = tl.arange(0, R.rows)
    for plane in tl.static_range(R.scale_bytes):
        tl.store(wire_ptr + plane * stride + rows, planes[plane].to(tl.uint8), mask=rows < blocks - first)


@triton.jit
def store_rest(wire_ptr, blocks, code, R: tl.constexpr):
    """Stores what belongs to no tile: zeros between and after sections, and a message's one scale byte (`code`)."""
    offset, stride = scale_planes(blocks, R)
    length = message_bytes(blocks, R)
    _store_zeros(wire_ptr, blocks.to(tl.int64) * R.row_bytes, offset, 128)
    if R.is_site:
        tl.store(wire_ptr + offset, code.to(tl.uint8))
        _store_zeros(wire_ptr, offset + 1, length, 1024)
    for plane in tl.static_range(R.scale_bytes - 1):
        _store_zeros(wire_ptr, offset + plane * stride + blocks, offset + (plane + 1) * stride, 128)
    if R.scale_bytes > 0:
        _store_zeros(wire_ptr, offset + (R.scale_bytes - 1) * stride + blocks, length, 1024)


@triton.jit
def _store_zeros(ptr, start, end, MOST: tl.constexpr):
    offsets = tl.arange(0, MOST)
    tl.store(ptr + start + offsets, tl.zeros((MOST,), tl.uint8), mask=offsets < end - start)


@triton.jit
def _offsets(row_length: tl.constexpr, first: tl.constexpr, columns: tl.constexpr, R: tl.constexpr):
    """Returns the offsets of a tile's elements: rows of `row_length`, of which `columns` from `first` on."""
    return tl.arange(0, R.rows)[:, None] * row_length + (tl.arange(0, columns)[None, :] + first)


@triton.jit
def _within_tile(available, R: tl.constexpr):
    return tl.multiple_of(tl.minimum(tl.maximum(available, 0), R.rows * R.block).to(tl.int32), R.align)


@triton.jit
def _round_up(n, multiple: tl.constexpr):
    return (n + (multiple - 1)) // multiple * multiple
