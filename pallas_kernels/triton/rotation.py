"""The Hadamard rotation of blocks that are tuples of tensors [rows, columns], one for each part of a block.

A part goes through a matrix product with +-1 on the tensor cores; between parts there is a butterfly. Products of
bfloat16 and float16 are exact there. A float32 is three bfloat16 (8 bits of its significand each, cut off and not
rounded, so that no part overflows), which are exact too. Sums are in float32.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.elements import mix


@triton.jit
def hadamard(DTYPE: tl.constexpr, R: tl.constexpr):
    """The +-1 matrix of one part, [columns, columns]: entry (i, j) is the parity of i & j."""
    i = tl.arange(0, R.columns)
    v = i[:, None] & i[None, :]
    v = v ^ (v >> 4)
    v = v ^ (v >> 2)
    v = v ^ (v >> 1)
    signs = (1 - 2 * (v & 1)).to(tl.float32)
    return signs.to(tl.float16 if DTYPE == tl.float16 else tl.bfloat16)


@triton.jit
def rotate(xs, h, R: tl.constexpr):
    """x -> z = H x / sqrt(B) in float32, of blocks x that lie as they do in memory."""
    ys = ()
    for i in tl.static_range(R.parts):
        x = xs[i]
        if R.signed:
            x = x * _signs(i, R)[None, :].to(x.dtype)
        ys = ys + (_product(x, h, R),)
    ys = _butterfly(ys, R)
    out = ()
    for i in tl.static_range(R.parts):
        out = out + (ys[i] * R.rotation_scale if R.rotated else ys[i],)
    return out


@triton.jit
def unrotate(zs, scale, h, R: tl.constexpr):
    """z -> x = H (scale z) / sqrt(B) in float32; scale: float32[rows], or None."""
    ys = ()
    for i in tl.static_range(R.parts):
        ys = ys + (_product(zs[i], h, R),)
    ys = _butterfly(ys, R)
    out = ()
    for i in tl.static_range(R.parts):
        y = ys[i]
        if scale is not None:
            # In this order: a sum of codes is exact, and so mostly is its product with the scale.
            y = y * scale[:, None]
        if R.rotated:
            y = y * R.rotation_scale
        if R.signed:
            y = y * _signs(i, R)[None, :]
        out = out + (y,)
    return out


@triton.jit
def _butterfly(ys, R: tl.constexpr):
    for level in tl.static_range(R.part_levels if R.rotated else 0):
        out = ()
        for i in tl.static_range(R.parts):
            if i & (1 << level) == 0:
                out = out + (ys[i] + ys[i + (1 << level)],)
            else:
                out = out + (ys[i - (1 << level)] - ys[i],)
        ys = out
    return ys


@triton.jit
def _product(x, h, R: tl.constexpr):
    if not R.rotated:
        return x.to(tl.float32)
    elif x.dtype == tl.float32:
        high = _cut(x)
        rest = x - high
        middle = _cut(rest)
        y = tl.dot((rest - middle).to(tl.bfloat16), h)
        y = tl.dot(middle.to(tl.bfloat16), h, y)
        return tl.dot(high.to(tl.bfloat16), h, y)
    else:
        return tl.dot(x, h)


@triton.jit
def _cut(x):
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _signs(part: tl.constexpr, R: tl.constexpr):
    """The fixed random signs of a part's elements, float32[columns]."""
    index = (tl.arange(0, R.columns) + (part * R.columns + 1)).to(tl.uint32)
    return 1.0 - 2.0 * (mix(index) & 1).to(tl.int32).to(tl.float32)
