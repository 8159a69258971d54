"""Blocks (tiles) of 4 or 3 bits: the element int3_4, of which the preset `tah4` is made.

The largest element x_d of a tile of B is sent by itself; the others are rotated, and the tiles with the largest maxima
take 4 bits, a fixed share of all so that a message's length is known before it is made:

    v = bf16(x_d),  d = argmax |x|;   z = H (x with x_d = 0)
    Q = 7 for the ceil(4 M / 5) of M tiles with the largest max|z|, 3 for the others
    s = max(max|z|, 2^-100) / Q as bfloat16, rounded up;   q = round(z / s);   x' = H (s q) with x'_d = v

The squared error of a tile at either number of bits grows with (max|z|)^2, so this choice takes the most off the
message's error. 3.8 + 40 / B bits an element: 4.1125 for B = 128.

Bytes: 4-bit codes (their tiles in order), 3-bit codes (theirs), d, two planes of v, two of s, whose sign bit says that
the tile has 3 bits. A tile with an Inf or NaN has s = NaN and is read as NaN throughout; it takes no place among those
of 4 bits that another could have.

Source: TAH-Quant (arXiv 2506.01352): tiles, 4 bits for 80 % and 3 bits for the rest, Hadamard transform after a pivot
swap. Departures: (1) there the pivot is swapped to where the transform makes it a constant, which the zero point takes
away; sending it by itself is the same without a zero point, and exact. (2) There the entropy of a token's or tile's
energies chooses, before the rotation, so tiles with outliers take 3 bits; squared errors ask for max|z|. (3) There only
tiles with an outlier are rotated; here all. (4) Tiles of 128, not 64: fewer bytes for d, v and s.

Dim letters: M tiles, B elements of a tile; leading dims ("...") are separate messages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import ELEMENTS
from taco_jax.codec import block_scale, wire
from taco_jax.codec.elements import from_codes, to_codes
from taco_jax.codec.hadamard import rotate, unrotate

ELEMENT = "int3_4"
HIGH, LOW = ELEMENTS["int4"], ELEMENTS["int3"]
SHARE = (4, 5)  # of the tiles have 4 bits
_SIGN = 0x8000
_BF16_MAX = float(jnp.finfo(jnp.bfloat16).max)


def check(block: int, scale: str) -> None:
    """Raises ValueError for fields that a codec of int3_4 cannot have."""
    if scale != "bfloat16":
        raise ValueError(f"scale={scale!r} with element={ELEMENT!r}: must be 'bfloat16', whose sign says how many bits")
    if block > 256:
        raise ValueError(f"block={block} with element={ELEMENT!r}: must be at most 256, one byte says which is largest")


def n_high(n_tiles: int) -> int:
    """Tiles of 4 bits among n_tiles."""
    return -(-n_tiles * SHARE[0] // SHARE[1])


def bits(block: int) -> float:
    """Wire bits per element, with what a tile sends beside its codes."""
    return LOW.bits + SHARE[0] / SHARE[1] * (HIGH.bits - LOW.bits) + 8 * 5 / block


def section_lengths(block: int, n_tiles: int) -> list[int]:
    """Bytes of each section of a message: two of codes, then five byte planes."""
    high = n_high(n_tiles)
    return [high * block * HIGH.bits // 8, (n_tiles - high) * block * LOW.bits // 8, *[n_tiles] * 5]


def encode(x: jax.Array, rotation: str, random: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Tiles float32[..., M, B] -> (messages uint8[..., wire_bytes], the largest max|z| / 7 float32[]).

    random: noise of stochastic rounding, x's shape; None rounds to nearest.
    """
    high = n_high(x.shape[-2])
    d = jnp.argmax(jnp.abs(x), axis=-1)
    at_d = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == d[..., None]
    v = jnp.sum(jnp.where(at_d, x, 0.0), axis=-1)
    z = rotate(jnp.where(at_d, 0.0, x), rotation)

    # A value that is not finite is the tile's largest: z alone would not show it.
    whole = block_scale.largest_magnitude(x, -1)
    amax = jnp.where(whole < jnp.inf, block_scale.largest_magnitude(z, -1), whole)
    finite = amax < jnp.inf
    has_high = _first(jnp.argsort(jnp.where(finite, -amax, 1.0), axis=-1, stable=True), high)
    order = _order(has_high)

    # Both are computed for all tiles, and each tile takes its own.
    marked = jnp.where(finite[..., None], z, jnp.nan)
    either = [block_scale.compute("bfloat16", element, marked, None) for element in (HIGH, LOW)]
    choose = lambda pair: jnp.where(has_high, *pair)
    word = choose([wire.join_bytes(scales.planes) for scales in either]) | jnp.where(has_high, 0, _SIGN)
    values = jnp.where(finite[..., None], z * choose([scales.multiplier for scales in either])[..., None], 0.0)

    sections = []
    for element, places in ((HIGH, order[..., :high]), (LOW, order[..., high:])):
        take = lambda a, places=places: jnp.take_along_axis(a, places[..., None], axis=-2)
        packed = wire.pack(to_codes(element, take(values), None if random is None else take(random)), element.bits)
        sections.append(packed.reshape(*packed.shape[:-2], packed.shape[-2] * packed.shape[-1]))
    # bfloat16 ends a little below float32.
    v = jnp.clip(v, -_BF16_MAX, _BF16_MAX).astype(jnp.bfloat16)
    v_word = lax.bitcast_convert_type(v, jnp.uint16)
    sections += [d.astype(jnp.uint8), *wire.split_bytes(v_word, 2), *wire.split_bytes(word, 2)]
    return wire.assemble(sections), either[0].largest


def decode(sections: list[jax.Array], n_tiles: int, block: int, rotation: str) -> jax.Array:
    """The sections of messages -> tiles float32[..., M, B], rotated back."""
    packed, (d, *planes) = sections[:2], sections[2:]
    word = wire.join_bytes(planes[2:])
    order = _order((word & _SIGN) == 0)
    values = []
    for element, codes in zip((HIGH, LOW), packed):
        codes = codes.reshape(*codes.shape[:-1], -1, block * element.bits // 8)
        values.append(from_codes(element, wire.unpack(codes, element.bits)))
    q = jnp.take_along_axis(jnp.concatenate(values, axis=-2), jnp.argsort(order, axis=-1)[..., None], axis=-2)
    s = block_scale.read("bfloat16", HIGH, wire.split_bytes(word & (_SIGN - 1), 2), None, word.shape[-1])
    x = unrotate(q * s[..., None], rotation)
    v = lax.bitcast_convert_type(wire.join_bytes(planes[:2]) << 16, jnp.float32)
    at_d = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == d[..., None].astype(jnp.int32)
    # A tile that is not finite is NaN at d too.
    return jnp.where(at_d & ~jnp.isnan(s)[..., None], v[..., None], x)


def _first(order: jax.Array, n: int) -> jax.Array:
    """bool[..., M]: whether a tile is one of the first n of `order`."""
    return jnp.argsort(order, axis=-1) < n


def _order(has_high: jax.Array) -> jax.Array:
    """The tiles as their codes lie: those of 4 bits, then those of 3, both as in the message."""
    return jnp.argsort(~has_high, axis=-1, stable=True)
