"""Element formats: how one scaled value becomes a code of 3 to 8 bits, and back.

Integers are symmetric two's complement (int4: -7..7). Floats follow OCP: e4m3 and e5m2 (8 bits), e3m2 and e2m3 (6),
e2m1 (4), and so do the floats of 3 to 5 bits that it has no names for and arXiv 2411.09510 compares: e3m1, e2m2, e1m3
(5), e1m2 (4), e1m1 (3), with bias 2^(e-1) - 1, subnormals, neither Inf nor NaN. With one exponent bit all values are
equally far apart.

Values are clipped to the format's own maximum first: XLA turns f32 above 464 into an e4m3 NaN while the hardware cast
saturates, and only after a clip do all implementations agree. Codes are made by integer arithmetic, not by a cast: XLA
on GPUs drops a pair of casts f32 -> e4m3 -> f32 that meet in one program (it may keep excess precision), and with it
the rounding. On CPUs it is faster as well.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.formats import Element


def _round(v: jax.Array, noise: jax.Array | None) -> jax.Array:
    # Nearest even, or stochastic: floor(v + u), u uniform in [0, 1), is unbiased for either sign.
    return jnp.round(v) if noise is None else jnp.floor(v + noise)


def to_codes(element: Element, v: jax.Array, noise: jax.Array | None = None) -> jax.Array:
    """float32 values (already divided by the scale) -> uint8 codes in the low `element.bits` bits.

    Rounds to nearest even, or stochastically where `noise` (uniform in [0, 1), v's shape) is given. Values beyond the
    maximum clip.
    """
    v = jnp.clip(v, -element.maximum, element.maximum)
    if not element.is_float:
        q = jnp.clip(_round(v, noise), -element.maximum, element.maximum)
        return q.astype(jnp.int8).astype(jnp.uint8) & jnp.uint8((1 << element.bits) - 1)
    # The magnitude codes of a float format are its values in order, so with the spacing 2^(e - m) of v's binade the
    # code is (e - e_min) * 2^m + round(|v| / spacing); a round-up into the next binade lands on the right code by
    # itself.
    bits = lax.bitcast_convert_type(v, jnp.int32)
    e = jnp.maximum((bits >> 23 & 0xFF) - 127, element.min_exponent)
    inverse_spacing = lax.bitcast_convert_type((127 - e + element.mantissa) << 23, jnp.float32)
    magnitude = (e - element.min_exponent) << element.mantissa
    magnitude = magnitude + _round(jnp.abs(v) * inverse_spacing, noise).astype(jnp.int32)
    top = _magnitude_code(element, element.maximum)
    sign = (bits >> 31 & 1) << (element.bits - 1)
    return (jnp.minimum(magnitude, top) | sign).astype(jnp.uint8)


def from_codes(element: Element, codes: jax.Array) -> jax.Array:
    """uint8 codes -> float32 values, exactly. The nan code of an integer format is not interpreted here."""
    if not element.is_float:
        unused = 8 - element.bits
        signed = lax.bitcast_convert_type(codes << unused, jnp.int8)
        return (signed >> unused).astype(jnp.float32)
    m = element.mantissa
    magnitude = (codes & jnp.uint8((1 << (element.bits - 1)) - 1)).astype(jnp.int32)
    exponent = jnp.maximum((magnitude >> m) - 1, 0)
    significand = (magnitude - (exponent << m)).astype(jnp.float32)
    value = significand * lax.bitcast_convert_type((exponent + element.min_exponent - m + 127) << 23, jnp.float32)
    if element.nan is not None:
        value = jnp.where(magnitude > _magnitude_code(element, element.maximum), jnp.nan, value)
    negative = (codes >> (element.bits - 1) & jnp.uint8(1)) != 0
    return jnp.where(negative, -value, value)


def _magnitude_code(element: Element, value: float) -> int:
    e = max(int(np.floor(np.log2(value))), element.min_exponent)
    return ((e - element.min_exponent) << element.mantissa) + int(value / 2.0 ** (e - element.mantissa))
