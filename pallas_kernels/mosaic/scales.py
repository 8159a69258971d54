"""Block scales in registers: `taco_jax/codec/block_scale.py` for the rows of a tile. Arrays are [64], one entry a
row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.formats import MAX_EXPONENT, TINY, UNCALIBRATED, Format


def compute(fmt: Format, amax: jax.Array, exponent) -> tuple[jax.Array, jax.Array, list]:
    """Row maxima -> (multiplier float32, finite bool, scale bytes as int32, one array a byte plane).

    `exponent` is the site's int32 scalar, None where there is none; for scale "site" it is always there, and the
    multiplier is one for all rows.
    """
    finite = amax < np.float32(np.inf)  # False for NaN too
    if fmt.scale == "site":
        multiplier = _float(jnp.minimum(jnp.maximum(127 - exponent, 1), 254) << 23)
        return multiplier, finite, []
    clean = jnp.maximum(jnp.where(finite, amax, np.float32(0)), TINY)
    bits = lax.bitcast_convert_type(clean * fmt.reciprocal_maximum, jnp.int32)
    if fmt.scale == "float32":
        s, word, n_bytes, nan = _float(bits), bits, 4, 0x7FC00000
    elif fmt.scale == "bfloat16":
        word = (bits + 0xFFFF) >> 16
        s, n_bytes, nan = _float(word << 16), 2, 0x7FC0
    else:
        word = _clip(((bits + 0x7FFFFF) >> 23) + fmt.scale_bias)
        s, n_bytes, nan = _e8m0(word, fmt.scale_bias), 1, 255
        if fmt.scale == "ue5m3" and exponent is not None:
            calibrated, a8 = _site(exponent)
            c = _clip(((bits + 0xFFFFF) >> 20) - a8 - 896)
            word = jnp.where(calibrated, c, word)
            s = jnp.where(calibrated, _float((c + 896 + a8) << 20), s)
    word = jnp.where(finite, word, nan)
    return np.float32(1.0) / s, finite, [(word >> (8 * i)) & 0xFF for i in range(n_bytes)]


def read(fmt: Format, planes: list, exponent) -> jax.Array:
    """Scale bytes as int32 -> float32 scales; NaN marks a block that is not finite."""
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


def _site(exponent):
    a = jnp.minimum(jnp.maximum(exponent, -MAX_EXPONENT), MAX_EXPONENT)
    return exponent != UNCALIBRATED, 8 * a


def _clip(c):
    return jnp.minimum(jnp.maximum(c, 1), 254)


def _e8m0(c, bias):
    return _float(_clip(c - bias if bias else c) << 23)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)
