"""Element formats inside a kernel: float32 values to codes and codes to values, by integer arithmetic.

The arithmetic is `taco_jax/codec/elements.py`'s, bit for bit, in fewer instructions. A float format's code is
(e - e_min) 2^m + round(|v| / 2^(e - m)) with e the exponent of v's binade: adding 2^(e - m + 23) to |v| rounds it to a
multiple of 2^(e - m), to nearest even, and leaves the quotient in the low bits of the sum.
"""

import triton
import triton.language as tl

from pallas_kernels.formats import GOLDEN, HASH_FACTORS

# 1.5 * 2^23: adding it rounds to an integer and leaves that, in two's complement, in the low bits.
_ROUNDER = tl.constexpr(12582912.0)
_FIRST, _SECOND, _GOLDEN = map(tl.constexpr, (*HASH_FACTORS, GOLDEN))


@triton.jit
def to_codes(v, noise, R: tl.constexpr):
    """float32 values, finite and divided by their scale -> int32 codes in the low bits; noise: None or in [0, 1)."""
    if not R.is_float:
        return _integer_codes(v, noise, R)
    elif R.casts and R.bits == 8 and not R.stochastic:
        # The conversion clips by itself.
        cast = v.to(tl.float8e4nv) if R.mantissa == 3 else v.to(tl.float8e5)
        return cast.to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        return _float_codes(v, noise, R)


@triton.jit
def _integer_codes(v, noise, R: tl.constexpr):
    if R.clips:
        v = tl.minimum(tl.maximum(v, -R.maximum), R.maximum)
    if R.stochastic:
        q = tl.minimum(tl.floor(v + noise), R.maximum).to(tl.int32)
    else:
        q = (v + _ROUNDER).to(tl.int32, bitcast=True)
    return q & R.code_mask


@triton.jit
def _float_codes(v, noise, R: tl.constexpr):
    sign = (v.to(tl.int32, bitcast=True) >> (32 - R.bits)) & R.sign_bit
    magnitude = tl.abs(v)
    if R.clips:
        magnitude = tl.minimum(magnitude, R.maximum)
    exponent = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.maximum(exponent, (127 + R.min_exponent) << 23)
    binade = (exponent >> (23 - R.mantissa)) - ((127 + R.min_exponent) << R.mantissa)
    if R.stochastic:
        inverse_spacing = ((127 << 23) - exponent + ((127 + R.mantissa) << 23)).to(tl.float32, bitcast=True)
        quotient = tl.floor(magnitude * inverse_spacing + noise).to(tl.int32)
        code = tl.minimum(binade + quotient, R.top)
    else:
        rounder = (exponent + ((23 - R.mantissa) << 23)).to(tl.float32, bitcast=True)
        quotient = (magnitude + rounder).to(tl.int32, bitcast=True)
        # The mask takes the exponent bits of the sum away.
        code = (binade + quotient) & R.magnitude_mask
    return code | sign


@triton.jit
def from_codes(codes, WIDE: tl.constexpr, R: tl.constexpr):
    """int32 codes, high bits zero -> their values, exactly: float32 where WIDE, else float16, which is enough."""
    if not R.is_float:
        return _integer_values(codes, WIDE, R)
    elif R.casts_back and R.bits == 8 and R.mantissa == 3:
        value = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        return value.to(tl.float32) if WIDE else value
    else:
        return _float_values(codes, WIDE, R)


@triton.jit
def _integer_values(codes, WIDE: tl.constexpr, R: tl.constexpr):
    # 2^23 + code (float16: 2^10) is a float whose low bits are the code's.
    code = codes ^ R.sign_bit
    if WIDE:
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + R.sign_bit)
    else:
        value = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - tl.full((), 1024.0 + R.sign_bit, tl.float16)
    if R.is_site:
        value = tl.where(codes == R.nan, float("nan"), value)
    return value


@triton.jit
def _float_values(codes, WIDE: tl.constexpr, R: tl.constexpr):
    # The code is the top of a wider float that is too small by the difference of the biases; subnormals are as well.
    MANTISSA: tl.constexpr = 23 if WIDE else 26
    FACTOR: tl.constexpr = 2.0 ** ((126 if WIDE else 14) + R.min_exponent)
    bits = (codes << (32 - R.bits)) >> (32 - R.bits - MANTISSA + R.mantissa)
    bits = bits & (-(2**31) + (R.magnitude_mask << (MANTISSA - R.mantissa)))
    if WIDE:
        value = bits.to(tl.float32, bitcast=True) * FACTOR
    else:
        value = (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True) * tl.full((), FACTOR, tl.float16)
    if R.is_site:
        value = tl.where((codes & R.magnitude_mask) > R.top, float("nan"), value)
    return value


@triton.jit
def mix(x):
    """Returns `pallas_kernels.formats.lowbias32` of uint32."""
    x = tl.mul(x ^ (x >> 16), _FIRST, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), _SECOND, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def uniform(index, message, seed0, seed1):
    """Noise in [0, 1) of the element with this index (uint32) in a message, as
    `taco_jax/codec/stochastic_rounding.py` draws it."""
    step = tl.mul(message.to(tl.uint32), _GOLDEN, sanitize_overflow=False)
    h = mix(mix(index ^ seed0) ^ tl.add(seed1, step, sanitize_overflow=False))
    return (h >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)
