"""Bytes on the wire: sub-byte packing, byte planes, and the layout of one message.

Layout (the same in every implementation): codes, then scales. Every section starts at a multiple of 128 bytes and a
message is a multiple of 1,024 bytes; a scale of k bytes is k byte planes (one section each, least significant byte
first).

Codes of b < 8 bits are packed inside their block without shuffles: with g = 8 / gcd(8, b) equal parts of the block,
element j of all parts makes b*g/8 bytes, each its own run of B/g bytes. So int4 byte j = q[j] & 15 | q[j + B/2] << 4;
6 bits pack four quarters into 3 bytes, 5 bits eight eighths into 5, 3 bits eight eighths into 3.

Dim letters: M blocks, B block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import SECTION_BYTES, packing_parts, round_up, section_offsets


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """uint8[..., B] codes in the low `bits` bits -> uint8[..., B * bits / 8]."""
    if bits == 8:
        return codes
    parts = packing_parts(bits)
    q = codes & jnp.uint8((1 << bits) - 1)
    q = q.reshape(*q.shape[:-1], parts, q.shape[-1] // parts)
    planes = []
    for k in range(parts * bits // 8):
        byte = None
        for i in range(parts):
            shift = i * bits - 8 * k
            if -bits < shift < 8:
                part = q[..., i, :] << shift if shift >= 0 else q[..., i, :] >> -shift
                byte = part if byte is None else byte | part
        planes.append(byte)
    return jnp.concatenate(planes, axis=-1)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """The inverse of `pack`: uint8[..., B * bits / 8] -> uint8[..., B], high bits zero."""
    if bits == 8:
        return packed
    parts = packing_parts(bits)
    n_planes = parts * bits // 8
    planes = packed.reshape(*packed.shape[:-1], n_planes, packed.shape[-1] // n_planes)
    out = []
    for i in range(parts):
        code = None
        for k in range(n_planes):
            shift = i * bits - 8 * k
            if -bits < shift < 8:
                byte = planes[..., k, :] >> shift if shift >= 0 else planes[..., k, :] << -shift
                code = byte if code is None else code | byte
        out.append(code & jnp.uint8((1 << bits) - 1))
    return jnp.concatenate(out, axis=-1)


def split_bytes(words: jax.Array, n_bytes: int) -> list[jax.Array]:
    """Byte planes of an unsigned integer array, least significant first."""
    return [(words >> (8 * i)).astype(jnp.uint8) for i in range(n_bytes)]


def join_bytes(planes: list[jax.Array]) -> jax.Array:
    """uint32 words from byte planes, least significant first."""
    words = planes[0].astype(jnp.uint32)
    for i, plane in enumerate(planes[1:], 1):
        words = words | plane.astype(jnp.uint32) << (8 * i)
    return words


def assemble(sections: list[jax.Array]) -> jax.Array:
    """uint8[..., n_i] sections -> one uint8[..., wire_bytes] message; the gaps are zero."""
    if sections[0].ndim == 1:
        # As a row: XLA on CPUs joins the first dim's pieces while it makes them, which asks of every byte whose it is
        # and takes six times as long as the codes.
        return assemble([s[None] for s in sections])[0]
    _, total = section_offsets([s.shape[-1] for s in sections])
    pieces, end = [], 0
    for i, section in enumerate(sections):
        length = section.shape[-1]
        stop = round_up(end + length, SECTION_BYTES) if i + 1 < len(sections) else total
        pieces.append(section)
        if stop > end + length:
            pieces.append(jnp.zeros_like(section, shape=(*section.shape[:-1], stop - end - length)))
        end = stop
    return jnp.concatenate(pieces, axis=-1) if len(pieces) > 1 else pieces[0]


def disassemble(message: jax.Array, lengths: list[int]) -> list[jax.Array]:
    """The sections of a message, given their lengths in bytes."""
    offsets, _ = section_offsets(lengths)
    return [message[..., o : o + n] for o, n in zip(offsets, lengths, strict=True)]
