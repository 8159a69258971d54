"""Block scales inside a kernel: from the bits of maxima to scale bytes, and back. See `taco_jax/codec/block_scale.py`.

Maxima are compared as the bits of magnitudes: as integers these are in order and NaN lies above Inf, which a maximum of
floats would drop.
"""

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
_UNCALIBRATED = tl.constexpr(-(2**31))
_MAX_EXPONENT = tl.constexpr(111)


@triton.jit
def block_maxima(zs, R: tl.constexpr):
    """Tuple of float32[rows, columns] -> the bits of the largest magnitude of each block, int32[rows]."""
    largest = zs[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for i in tl.static_range(1, R.parts):
        largest = tl.maximum(largest, zs[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.max(largest, axis=1)


@triton.jit
def compute(maxima, exponent, message_maximum, R: tl.constexpr):
    """Bits of block maxima int32[rows] -> (multiplier float32[rows], tuple of scale bytes int32[rows]).

    The multiplier is what values are multiplied with before they are rounded. `exponent` is the site's; where the
    message has one scale, message_maximum holds the bits of the largest finite block maximum.
    """
    finite = maxima < INFINITY
    bits = _scale_bits(tl.where(finite, maxima, 0), R)
    if R.is_site:
        scale = _e8m0(tl.zeros_like(bits) + site_code(exponent, message_maximum, R), 0)
        planes = ()
    elif R.scale_bytes == 4:
        word = tl.where(finite, bits, 0x7FC00000)
        scale = bits.to(tl.float32, bitcast=True)
        planes = (word & 0xFF, (word >> 8) & 0xFF, (word >> 16) & 0xFF, (word >> 24) & 0xFF)
    elif R.scale_bytes == 2:
        rounded = (bits + 0xFFFF) >> 16
        word = tl.where(finite, rounded, 0x7FC0)
        scale = (rounded << 16).to(tl.float32, bitcast=True)
        planes = (word & 0xFF, word >> 8)
    else:
        c = _clip(((bits + 0x7FFFFF) >> 23) + R.e8m0_bias, 1, 254)
        scale = _e8m0(c, R.e8m0_bias)
        if R.is_ue5m3:
            a8 = _eighths(exponent)
            c_site = _clip(((bits + 0xFFFFF) >> 20) - a8 - 896, 1, 254)
            calibrated = exponent != _UNCALIBRATED
            c = tl.where(calibrated, c_site, c)
            scale = tl.where(calibrated, _ue5m3(c_site, a8), scale)
        planes = (tl.where(finite, c, 255),)
    # A division that rounds as it should: `/` does not.
    return tl.div_rn(1.0, scale), planes


@triton.jit
def read(planes, exponent, R: tl.constexpr):
    """Tuple of scale bytes int32[rows] -> scales float32[rows], NaN for a block that is not finite."""
    if R.scale_bytes == 4:
        word = planes[0] | (planes[1] << 8) | (planes[2] << 16) | (planes[3] << 24)
        return word.to(tl.float32, bitcast=True)
    elif R.scale_bytes == 2:
        return ((planes[0] << 16) | (planes[1] << 24)).to(tl.float32, bitcast=True)
    else:
        c = planes[0]
        scale = _e8m0(c, R.e8m0_bias)
        if R.is_ue5m3:
            scale = tl.where(exponent != _UNCALIBRATED, _ue5m3(c, _eighths(exponent)), scale)
        return tl.where(c == 255, float("nan"), scale)


@triton.jit
def site_code(exponent, message_maximum, R: tl.constexpr):
    """The byte of a message's one scale: 2^exponent, or the least power of two that clips nothing."""
    dynamic = _clip((_scale_bits(message_maximum, R) + 0x7FFFFF) >> 23, 1, 254)
    return tl.where(exponent != _UNCALIBRATED, (_eighths(exponent) >> 3) + 127, dynamic)


@triton.jit
def _scale_bits(maxima, R: tl.constexpr):
    amax = tl.maximum(maxima.to(tl.float32, bitcast=True), R.tiny)
    return (amax * R.reciprocal_maximum).to(tl.int32, bitcast=True)


@triton.jit
def _eighths(exponent):
    # Within these bounds every scale byte is a normal float32; UNCALIBRATED becomes a number that does no harm.
    return 8 * _clip(exponent, -_MAX_EXPONENT, _MAX_EXPONENT)


@triton.jit
def _ue5m3(c, a8):
    return ((c + 896 + a8) << 20).to(tl.float32, bitcast=True)


@triton.jit
def _e8m0(c, BIAS: tl.constexpr):
    return (_clip(c - BIAS, 1, 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _clip(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)
