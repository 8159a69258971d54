"""Codes of scaled values, in registers: casts (`taco_jax/codec/elements.py`) and packing (`taco_jax/codec/wire.py`).

8-bit floats rounded to nearest use the hardware's cast, which agrees with the definition after a clip. Everything else
is integer arithmetic on the bits, as in the definition.

Parts of a block share bytes: element j of all parts makes b g / 8 bytes. The parts are runs of columns of one thread's
own registers, so that nothing moves between threads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.formats import Format, packing_parts
from pallas_kernels.mosaic.registers.pack_int import ROUND_TO_INT

HARDWARE_CASTS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def to_codes(fmt: Format, v: jax.Array, noise: jax.Array | None, interpret: bool) -> jax.Array:
    """Rounds scaled float32 values: uint8 codes of an 8-bit format, else int32 in the low `fmt.bits` bits."""
    hardware = noise is None and fmt.element in HARDWARE_CASTS
    # A GPU's cast saturates by itself.
    if interpret or not hardware:
        v = clip(fmt, v, interpret)
    if not fmt.is_float:
        return _integer_codes(fmt, v, noise)
    if hardware:
        return lax.bitcast_convert_type(v.astype(HARDWARE_CASTS[fmt.element]), jnp.uint8)
    return _float_codes(fmt, v, noise)


def rounded(v: jax.Array) -> jax.Array:
    """Rounds scaled and clipped float32: int32 whose low bits are the nearest integer's."""
    return lax.bitcast_convert_type(v + ROUND_TO_INT, jnp.int32)


def clip(fmt: Format, v: jax.Array, interpret: bool) -> jax.Array:
    """Clips to +-Qmax. Values exceed it only where the scale may be below max|z| / Qmax: a site's, or mxint8's, whose
    byte ends 2^6 earlier."""
    if interpret or fmt.scale in ("ue5m3", "site") or fmt.scale_bias:
        return jnp.minimum(jnp.maximum(v, np.float32(-fmt.maximum)), np.float32(fmt.maximum))
    return v


def from_codes(fmt: Format, codes: jax.Array) -> jax.Array:
    """Returns the float32 values of uint8 codes of an 8-bit format or int32 codes in the low bits, exactly."""
    if fmt.element in HARDWARE_CASTS:
        return lax.bitcast_convert_type(codes, HARDWARE_CASTS[fmt.element]).astype(jnp.float32)
    if not fmt.is_float:
        # Two's complement with its sign bit flipped counts from -2^(bits-1); in the low bits of 2^23 it needs no
        # conversion, which GPUs do slowly.
        sign = 1 << (fmt.bits - 1)
        word = codes.astype(jnp.int32) & 0xFF if fmt.bits == 8 else codes
        out = lax.bitcast_convert_type((word ^ sign) | 0x4B000000, jnp.float32) - np.float32(8388608 + sign)
        return jnp.where(word == sign, np.float32(np.nan), out) if fmt.scale == "site" else out
    # Moved into a float16 the bits mean the value times a power of two, subnormals included.
    sign = 1 << (fmt.bits - 1)
    half = ((codes & (sign - 1)) << (10 - fmt.mantissa)) | ((codes & sign) << (16 - fmt.bits))
    half = lax.bitcast_convert_type(half.astype(jnp.int16), jnp.float16)
    return half.astype(jnp.float32) * np.float32(2.0 ** (14 + fmt.min_exponent))


def pack(fmt: Format, parts: list) -> list:
    """Returns uint8 byte planes of int32 codes of each part."""
    planes = []
    for k in range(len(parts) * fmt.bits // 8):
        byte = None
        for i, part in enumerate(parts):
            shift = i * fmt.bits - 8 * k
            if -fmt.bits < shift < 8:
                moved = part << shift if shift > 0 else part >> -shift if shift < 0 else part
                byte = moved if byte is None else byte | moved
        planes.append((byte & 0xFF).astype(jnp.uint8))
    return planes


def unpack(fmt: Format, planes: list) -> list:
    """Returns int32 codes of each part, high bits zero, of uint8 byte planes."""
    words = [plane.astype(jnp.int32) & 0xFF for plane in planes]
    parts = []
    for i in range(packing_parts(fmt.bits)):
        code = None
        for k, word in enumerate(words):
            shift = i * fmt.bits - 8 * k
            if -fmt.bits < shift < 8:
                moved = word >> shift if shift > 0 else word << -shift if shift < 0 else word
                code = moved if code is None else code | moved
        parts.append(code & ((1 << fmt.bits) - 1))
    return parts


def _integer_codes(fmt, v, noise):
    if noise is None:
        q = rounded(v)
    else:
        floor = _floor(v + noise)
        q = jnp.minimum(floor, np.float32(fmt.maximum)).astype(jnp.int32)
    if fmt.bits == 8:
        return (q & 0xFF).astype(jnp.uint8)
    return q & ((1 << fmt.bits) - 1)


def _float_codes(fmt, v, noise):
    m, word = fmt.mantissa, lambda x: lax.bitcast_convert_type(x, jnp.int32)
    sign, low = 1 << (fmt.bits - 1), (127 + fmt.min_exponent) << 23
    magnitude = jnp.abs(v)
    exponent = jnp.maximum(word(magnitude) & 0x7F800000, low)  # of the binade, and of that of subnormals
    binade = (exponent >> (23 - m)) - (low >> (23 - m))
    if noise is None:
        # 2^(e - m + 23) rounds |v| to a multiple of 2^(e - m), and leaves the quotient in the low bits of the sum.
        rounder = lax.bitcast_convert_type(exponent + ((23 - m) << 23), jnp.float32)
        codes = (binade + word(magnitude + rounder)) & (sign - 1)
    else:
        inverse_spacing = lax.bitcast_convert_type((127 << 23) - exponent + ((127 + m) << 23), jnp.float32)
        steps = (magnitude * inverse_spacing + noise).astype(jnp.int32)  # towards zero: the floor
        codes = jnp.minimum(binade + steps, _largest_code(fmt))
    codes = codes | ((word(v) >> (32 - fmt.bits)) & sign)
    return codes.astype(jnp.uint8) if fmt.bits == 8 else codes


def _largest_code(fmt: Format) -> int:
    e = max(int(np.floor(np.log2(fmt.maximum))), fmt.min_exponent)
    return ((e - fmt.min_exponent) << fmt.mantissa) + int(fmt.maximum / 2.0 ** (e - fmt.mantissa))


def _floor(x):
    nearest = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return nearest - jnp.where(nearest > x, np.float32(1), np.float32(0))
