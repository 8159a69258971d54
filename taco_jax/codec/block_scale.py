"""Block scales: from the blocks' maxima to the scale bytes on the wire, and back.

    s = max(max|z|, 2^-100) / Qmax, rounded UP to the format, so that nothing clips

| format | bytes a block | value |
|---|---|---|
| float32 | 4 | s itself |
| bfloat16 | 2 | (bits(s) + 0xFFFF) >> 16 |
| e8m0 | 1 | c = clip((bits(s) + 0x7FFFFF) >> 23, 1, 254): 2^(c - 127) |
| e5m0 | 5/8 | c = clip(ceil(log2(s 2^-a)) + 15, 0, 30): 2^(a + c - 15); no site: a = 0 |
| e4m0 | 1/2 | c = clip(ceil(log2(s 2^-a)) + 7, 0, 14): 2^(a + c - 7); no site: a = 0 |
| ue5m3 | 1 | c = clip(((bits(s 2^-a) + 0xFFFFF) >> 20) - 896, 1, 254): 2^a bitcast((c + 896) << 20); no site: e8m0 |
| site | 0 | 2^a for the whole message; the message's one scale byte carries it as e8m0 |
| paper | 8 | alpha = 448 / sqrt(mean z^2 + 1e-6) (rotation keeps the mean), then s = max|alpha z| / 448, no clamps |

255 (e8m0, ue5m3), all ones (e5m0: 31, e4m0: 15) or NaN marks a block that is not finite. Scales are float32 throughout
and multiplied as reciprocals. The short scales of arXiv 2411.09510, e5m0 and e4m0, clip the codes of blocks above their
range, and below it take the smallest scale; they travel packed as codes are (`wire.pack` over all blocks of a message,
filled up with zeros to whole bytes: 8 scales of e5m0 are 5 bytes, 2 of e4m0 one).

Dim letters: M blocks, B block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.formats import (
    MAX_EXPONENT,
    SCALE_BITS,
    SCALE_BYTES,
    TINY,
    UNCALIBRATED,
    Element,
    ocp_bias,
    packing_parts,
    reciprocal_down,
)
from taco_jax.codec import wire

LANES = 16  # int32 of the widest vectors of a CPU


class BlockScales(NamedTuple):
    multiplier: jax.Array  # float32[..., M]: z * multiplier is what the element format rounds
    planes: list[jax.Array]  # the scale sections of the message, uint8
    finite: jax.Array  # bool[..., M]
    largest: jax.Array  # float32[]: max|z| / Qmax of all blocks, neither rounded nor clamped


def bits_per_block(scale: str) -> int:
    return SCALE_BITS[scale] if scale in SCALE_BITS else 8 * SCALE_BYTES[scale]


def compute(scale: str, element: Element, z: jax.Array, exponent) -> BlockScales:
    """Scales of rotated blocks z float32[..., M, B]; `exponent` is the site's int32 a, None where there is none."""
    if scale == "paper":
        return _compute_paper(element, z)
    amax = largest_magnitude(z, -1)
    finite = amax < jnp.inf  # False for NaN too
    # The reciprocal is rounded down, so that a maximum of exactly Qmax 2^k never rounds up to the next scale. A
    # product with a constant is the same on every backend; a quotient is not (XLA may rewrite it, GPUs divide
    # approximately).
    inverse_maximum = reciprocal_down(element.maximum)
    largest = largest_magnitude(amax) * inverse_maximum
    bits = lax.bitcast_convert_type(jnp.maximum(jnp.where(finite, amax, 0), TINY) * inverse_maximum, jnp.int32)
    if scale == "site":
        c = _site_code(bits, exponent)
        s = _e8m0(c, 0)
        return BlockScales(jnp.broadcast_to(1.0 / s, amax.shape), [c.astype(jnp.uint8)], finite, largest)
    if scale == "float32":
        s, planes = _float(bits), _planes(jnp.where(finite, bits, 0x7FC00000), 4)
    elif scale in SCALE_BITS:
        c, s = _short(scale, bits, exponent)
        planes = [_packed(jnp.where(finite, c, _all_ones(scale)).astype(jnp.uint8), SCALE_BITS[scale])]
    elif scale == "bfloat16":
        word = (bits + 0xFFFF) >> 16
        s, planes = _float(word << 16), _planes(jnp.where(finite, word, 0x7FC0), 2)
    else:
        bias = ocp_bias(element.name) if scale == "e8m0" else 0
        c = jnp.clip(((bits + 0x7FFFFF) >> 23) + bias, 1, 254)
        s = _e8m0(c, bias)
        if scale == "ue5m3" and exponent is not None:
            calibrated, a8 = _site(exponent)
            # bits(s 2^-a) >> 20 is (bits(s) >> 20) - 8a: a power of two only moves the exponent field.
            c_site = jnp.clip(((bits + 0xFFFFF) >> 20) - a8 - 896, 1, 254)
            c = jnp.where(calibrated, c_site, c)
            s = jnp.where(calibrated, _ue5m3(c_site, a8), s)
        planes = [jnp.where(finite, c, 255).astype(jnp.uint8)]
    return BlockScales(1.0 / s, planes, finite, largest)


def read(scale: str, element: Element, planes: list[jax.Array], exponent, n_blocks: int) -> jax.Array:
    """Scale sections of a message -> float32[..., M] (site: [..., 1]); NaN marks a block that is not finite."""
    if scale in SCALE_BITS:
        c = wire.unpack(planes[0], SCALE_BITS[scale])[..., :n_blocks].astype(jnp.int32)
        return jnp.where(c == _all_ones(scale), jnp.nan, _of_short(scale, c, exponent))
    if scale == "paper":
        alpha = _float(wire.join_bytes(planes[:4]))
        return _float(wire.join_bytes(planes[4:])) / alpha
    if scale in ("float32", "bfloat16"):
        word = wire.join_bytes(planes)
        return _float(word << 16 if scale == "bfloat16" else word)
    c = planes[0].astype(jnp.int32)
    s = _e8m0(c, ocp_bias(element.name) if scale == "e8m0" else 0)
    if scale == "ue5m3" and exponent is not None:
        calibrated, a8 = _site(exponent)
        s = jnp.where(calibrated, _ue5m3(c, a8), s)
    return jnp.where(c == 255, jnp.nan, s)


def largest_magnitude(x: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """max |x| of float32 over `axis` (None: all), NaN where any of them is NaN.

    By the bits: as integers, magnitudes are in order and NaN lies above Inf. XLA's own maximum over an axis drops NaN
    on CPUs once it is vectorised (0.10.2 to 0.12.0.1), and with it the only trace of a message that is not finite.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    if axis == -1:
        # XLA on CPUs works through a long last dim one element at a time, halves of it as vectors: a third of the time.
        while bits.shape[-1] > LANES and bits.shape[-1] % 2 == 0:
            bits = jnp.maximum(*jnp.split(bits, 2, axis=-1))
    return lax.bitcast_convert_type(jnp.max(bits, axis=axis), jnp.float32)


def ceil_log2(s: jax.Array) -> jax.Array:
    """ceil(log2(s)) of positive normal float32, exactly, as int32."""
    return ((lax.bitcast_convert_type(s, jnp.int32) + 0x7FFFFF) >> 23) - 127


def _short(scale: str, bits: jax.Array, exponent) -> tuple[jax.Array, jax.Array]:
    """(code, value) of the bits of s, both [..., M]."""
    c = ((bits + 0x7FFFFF) >> 23) - 127 - _site_exponent(exponent) + _short_bias(scale)
    c = jnp.clip(c, 0, _all_ones(scale) - 1)
    return c, _of_short(scale, c, exponent)


def _of_short(scale: str, c: jax.Array, exponent) -> jax.Array:
    return _float((c - _short_bias(scale) + _site_exponent(exponent) + 127) << 23)


def _site_exponent(exponent) -> jax.Array | int:
    """a where the site is calibrated, else 0."""
    if exponent is None:
        return 0
    calibrated, a8 = _site(exponent)
    return jnp.where(calibrated, a8 >> 3, 0)


def _short_bias(scale: str) -> int:
    return (1 << (SCALE_BITS[scale] - 1)) - 1


def _all_ones(scale: str) -> int:
    return (1 << SCALE_BITS[scale]) - 1


def _packed(codes: jax.Array, bits: int) -> jax.Array:
    """uint8[..., M] -> the bytes of M codes, filled up with zeros."""
    missing = -codes.shape[-1] % packing_parts(bits)
    if missing:
        codes = jnp.concatenate([codes, jnp.zeros_like(codes, shape=(*codes.shape[:-1], missing))], axis=-1)
    return wire.pack(codes, bits)


def _compute_paper(element: Element, z: jax.Array) -> BlockScales:
    alpha = element.maximum / jnp.sqrt(jnp.mean(z * z, axis=-1) + 1e-6)
    amax = largest_magnitude(z * alpha[..., None], -1)
    s = amax * np.float32(1 / element.maximum)
    largest = largest_magnitude(z) * np.float32(1 / element.maximum)
    # Without clamps a block of zeros has s = 0; its codes are zeros, whatever 0 / 0 would be.
    multiplier = jnp.where(s == 0, 0.0, alpha * (1.0 / s))
    words = [lax.bitcast_convert_type(a, jnp.int32) for a in (alpha, s)]
    return BlockScales(multiplier, _planes(words[0], 4) + _planes(words[1], 4), amax < jnp.inf, largest)


def _site_code(bits: jax.Array, exponent) -> jax.Array:
    """The byte (e8m0) of the message's one scale, int32[..., 1]: 2^a, or the least power of two that clips nothing."""
    dynamic = jnp.clip((jnp.max(bits, axis=-1, keepdims=True) + 0x7FFFFF) >> 23, 1, 254)
    if exponent is None:
        return dynamic
    calibrated, a8 = _site(exponent)
    return jnp.where(calibrated, (a8 >> 3) + 127, dynamic)


def _site(exponent) -> tuple[jax.Array, jax.Array]:
    exponent = jnp.asarray(exponent, jnp.int32)
    return exponent != UNCALIBRATED, 8 * jnp.clip(exponent, -MAX_EXPONENT, MAX_EXPONENT)


def _ue5m3(c: jax.Array, a8: jax.Array) -> jax.Array:
    return _float((c + 896 + a8) << 20)


def _e8m0(c: jax.Array, bias: int) -> jax.Array:
    return _float(jnp.clip(c - bias, 1, 254) << 23)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _planes(words: jax.Array, n_bytes: int) -> list[jax.Array]:
    return wire.split_bytes(lax.bitcast_convert_type(words, jnp.uint32), n_bytes)
