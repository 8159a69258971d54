"""Codes of 4 to 8 bits to and from bytes. Codes are tuples of int32 tensors, one for each part of a block.

With g = 8 / gcd(8, bits) pieces of a block, element j of all pieces makes g * bits / 8 bytes, each in a run ("plane")
of its own; see `taco_jax/codec/wire.py`. A piece may itself be several tensors ("slices").
"""

import triton
import triton.language as tl


@triton.jit
def pack(codes, R: tl.constexpr):
    """A tuple of `code_parts` codes -> a tuple of bytes, `slices` tensors of each plane in turn."""
    # Eight bits are one piece in one plane: nothing is shifted, and the mask is no instruction.
    out = ()
    for plane in tl.static_range(R.planes):
        for s in tl.static_range(R.slices):
            byte = 0
            for piece in tl.static_range(R.pieces):
                if -R.bits < piece * R.bits - 8 * plane and piece * R.bits - 8 * plane < 8:
                    byte = byte | _shifted(codes[piece * R.slices + s], piece * R.bits - 8 * plane)
            out = out + (byte,)
    return out


@triton.jit
def unpack(data, R: tl.constexpr):
    """The inverse: a tuple of bytes (int32, high bits zero) -> a tuple of `code_parts` codes, high bits zero."""
    out = ()
    for piece in tl.static_range(R.pieces):
        for s in tl.static_range(R.slices):
            code = 0
            for plane in tl.static_range(R.planes):
                if -R.bits < piece * R.bits - 8 * plane and piece * R.bits - 8 * plane < 8:
                    code = code | _shifted(data[plane * R.slices + s], 8 * plane - piece * R.bits)
            out = out + (code & R.code_mask,)
    return out


@triton.jit
def _shifted(x, by: tl.constexpr):
    if by >= 0:
        return x << by
    else:
        return x >> -by


@triton.jit
def halve(xs, PARTS: tl.constexpr, TIMES: tl.constexpr):
    """PARTS tensors [rows, c] -> 2^TIMES PARTS tensors [rows, c / 2^TIMES], in the order of their columns."""
    for level in tl.static_range(TIMES):
        out = ()
        for i in tl.static_range(PARTS << level):
            out = out + _halves(xs[i])
        xs = out
    return xs


@triton.jit
def join(xs, PARTS: tl.constexpr, TIMES: tl.constexpr):
    """The inverse of `halve`: 2^TIMES PARTS tensors -> PARTS tensors."""
    for level in tl.static_range(TIMES):
        out = ()
        for i in tl.static_range(PARTS << (TIMES - 1 - level)):
            out = out + (_joined(xs[2 * i], xs[2 * i + 1]),)
        xs = out
    return xs


@triton.jit
def _halves(x):
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    return first, second


@triton.jit
def _joined(first, second):
    ROWS: tl.constexpr = first.shape[0]
    HALF: tl.constexpr = first.shape[1]
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (ROWS, 2 * HALF))
