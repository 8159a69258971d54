"""Covers what tiles do not: the last rows, and messages that are short or do not start at a row.

A large array is never copied for its tail: the kernel runs over its whole rows, and what is left, under 8 rows, goes
through the same kernel as a tile of its own, whose few bytes are then put in place. Only messages under 64 rows, or
several messages whose length is no multiple of 8 rows, are padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import Format, Geometry
from pallas_kernels.mosaic.tiling import GROUP_ROWS, MIN_ROW_ELEMENTS, TILE_ROWS, Tiling


def row_elements(fmt: Format) -> int:
    """Returns the elements of a row of a tile."""
    return max(MIN_ROW_ELEMENTS, fmt.block)


def tiles_fit(fmt: Format, geometry: Geometry) -> bool:
    """Returns whether the messages are whole groups of 8 rows (all of x as one: at least 64 rows, and a tail)."""
    group = GROUP_ROWS * row_elements(fmt)
    n, g = geometry.per_message, geometry
    if n < TILE_ROWS * row_elements(fmt):
        return False
    all_of_x = g.messages == 1 and g.is_whole and n == g.elements
    return all_of_x or not (n % group or g.distance % group or g.offset % group)


def padded(fmt: Format, geometry: Geometry) -> Geometry:
    """Returns the geometry of the same messages, each padded with zeros to whole tiles, side by side."""
    tile = TILE_ROWS * row_elements(fmt)
    n = -(-geometry.per_message // tile) * tile
    return Geometry(n * geometry.messages, geometry.messages, n)


def whole_elements(fmt: Format, n: int) -> int:
    """Returns how many of n elements are in whole groups of 8 rows, which is what tensor copies take."""
    group = GROUP_ROWS * row_elements(fmt)
    return n // group * group


def rows_of(fmt: Format, x_S: jax.Array) -> jax.Array:
    """Returns the whole rows of x, [R, row]; a prefix, which XLA hands to a kernel without a copy.

    Where x is itself a slice, XLA would hand over the array that it was cut from, and the kernel's copies would begin
    at any byte of it; they need multiples of 16. The barrier makes x an array of its own.
    """
    x_S = lax.optimization_barrier(x_S)
    whole = whole_elements(fmt, x_S.size)
    return (x_S if whole == x_S.size else x_S[:whole]).reshape(-1, row_elements(fmt))


@dataclass(frozen=True)
class Tail:
    """The last elements of x, under 8 rows, that `rows_of` leaves out."""

    message: int
    block: int  # of the message, where they begin
    start: int  # in x
    elements: int


def tail(fmt: Format, geometry: Geometry) -> Tail | None:
    """Returns the part of x's tail that lies in these messages, None where there is none."""
    g = geometry
    start = whole_elements(fmt, g.elements)
    for p in range(g.messages if start < g.elements else 0):
        first = g.offset + p * g.distance
        begin, end = max(start, first), min(g.elements, first + g.per_message)
        if begin < end:
            return Tail(p, (begin - first) // fmt.block, begin, end - begin)
    return None


def tile_of(fmt: Format, x_t: jax.Array) -> jax.Array:
    """Pads less than a tile with zeros to one: [64, row]."""
    row = row_elements(fmt)
    return jnp.concatenate([x_t, jnp.zeros_like(x_t, shape=(TILE_ROWS * row - x_t.size,))]).reshape(TILE_ROWS, row)


def tile_tiling(fmt: Format, messages: int, interpret) -> Tiling:
    """Returns the tiling of `messages` messages of one tile each."""
    n = TILE_ROWS * row_elements(fmt)
    return Tiling(fmt, Geometry(n * messages, messages, n), interpret)


def messages_of(geometry: Geometry, x_S: jax.Array, n: int) -> jax.Array:
    """Returns x as [P, n], each message padded with zeros."""
    g = geometry
    whole = g.messages * g.distance
    if x_S.size < whole:
        x_S = jnp.concatenate([x_S, jnp.zeros_like(x_S, shape=(whole - x_S.size,))])
    x_PN = x_S.reshape(g.messages, g.distance)[:, g.offset : g.offset + g.per_message]
    return jnp.pad(x_PN, ((0, 0), (0, n - g.per_message)))


def relay(fmt: Format, wires: jax.Array, n: int, to: int) -> jax.Array:
    """Turns wires of messages of n elements to such of `to` elements: cuts blocks off, or adds zero bytes."""
    sections = [wires[:, o : o + length] for o, length in fmt.sections(n)]
    return _assemble(fmt, sections, to)


def take_blocks(fmt: Format, wires: jax.Array, n: int, first: int, count: int) -> jax.Array:
    """Returns blocks first..first + count of every message, as wires of messages of one tile."""
    sections = [wires[:, o : o + length] for (o, length) in _pieces(fmt, n, first, count)]
    return _assemble(fmt, sections, TILE_ROWS * row_elements(fmt))


def put_blocks(fmt: Format, wires, n: int, message: int, first: int, count: int, tile_wire, keep=None) -> jax.Array:
    """Puts the first blocks of a tile's wire [1, W] into a message; where `keep` is true, nothing changes."""
    tile = _pieces(fmt, TILE_ROWS * row_elements(fmt), 0, count)
    for (o, length), (o_tile, _) in zip(_pieces(fmt, n, first, count), tile):
        new = tile_wire[:, o_tile : o_tile + length]
        if keep is not None:
            new = jnp.where(keep, wires[message : message + 1, o : o + length], new)
        wires = lax.dynamic_update_slice(wires, new, (message, o))
    return wires


def _pieces(fmt: Format, n: int, first: int, count: int) -> list[tuple[int, int]]:
    """Returns (offset, length) of some blocks' bytes in each section; scale "site" has no bytes of a block."""
    codes, *planes = fmt.sections(n)
    block_bytes = fmt.block * fmt.bits // 8
    out = [(codes[0] + first * block_bytes, count * block_bytes)]
    if fmt.scale == "site":
        return [*out, (planes[0][0], 1)]
    return out + [(o + first, count) for o, _ in planes]


def _assemble(fmt: Format, sections: list[jax.Array], n: int) -> jax.Array:
    """Joins sections, cut or zero-filled to their length, to wires of messages of n elements."""
    wanted, pieces, end = fmt.sections(n), [], 0
    for section, (offset, length) in zip(sections, wanted):
        section = section[:, :length]
        pieces += [_zeros(section, offset - end), section, _zeros(section, length - section.shape[1])]
        end = offset + length
    pieces.append(_zeros(sections[0], fmt.wire_bytes(n) - end))
    return jnp.concatenate([p for p in pieces if p.shape[1]], axis=1)


def _zeros(like: jax.Array, columns: int) -> jax.Array:
    return jnp.zeros_like(like, shape=(like.shape[0], columns))
