"""How a message is cut into shares and chunks, how several arrays are one, and how the wires of a hop change hands.

A message is cut into one share for each rank, and the shares into chunks that travel one after the other. A chunk is
the same piece of every rank's share, so each element has the owner and the block that it has in one piece, and the
values are the same for any number of chunks. Two codecs are exceptions: stochastic rounding draws noise by chunk, and
scale="site" without a calibrated exponent takes one scale for each message, so for each chunk. Chunks depend on nothing
of each other: XLA can encode the next one while this one travels.

In a first hop row r of [P, W] goes to rank r, and row r of the result came from rank r. all_to_all is one collective.
ring is P-1 permutations, each rank sending to the one s further on in step s = 1..P-1: the same bytes and the same
result, for links on which an all_to_all of NCCL does badly. The rank's own row stays where it is. (A second hop cannot
be staged so: the result of a permutation cannot be typed the same on every rank.)

Dim letters: P ranks, W bytes of a wire.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import Geometry
from pallas_kernels.formats import round_up
from taco_jax.codec import Codec
from taco_jax.collectives.async_collective import before_follower
from taco_jax.collectives.manual_region import permute
from taco_jax.collectives.message import Hops, Message
from taco_jax.compat import barrier
from taco_jax.compression import dispatch

# Kernels work in tiles of this many elements.
TILE_ELEMENTS = 8192
# And their copies of groups of 8 rows of 128.
ROW_ELEMENTS = 1024


def chunk_elements(codec: Codec, size: int, ranks: int) -> int:
    """Elements of one rank's share of `size`: whole blocks, and whole tiles or rows of kernels where that costs little.

    Little is under 0.1 % of the bytes for tiles, 1 % for rows, without which a kernel's input would have to be padded.
    """
    n = codec.block * -(-codec.n_blocks(size) // ranks)
    if ROW_ELEMENTS % codec.block:  # no kernel has such blocks
        return n
    for multiple, excess in ((TILE_ELEMENTS, 1.001), (ROW_ELEMENTS, 1.01)):
        larger = round_up(n, multiple)
        if n >= TILE_ELEMENTS and codec.wire_bytes(larger) <= excess * codec.wire_bytes(n):
            return larger
    return n


def cut(geometry: Geometry, chunks: int, block: int) -> list[Geometry]:
    """A whole geometry in at most `chunks` pieces, of whole tiles if they are that long, else of whole blocks."""
    n = geometry.per_message
    piece = -(-n // chunks)
    piece = round_up(piece, TILE_ELEMENTS if piece >= TILE_ELEMENTS and TILE_ELEMENTS % block == 0 else block)
    if piece >= n:
        return [geometry]
    return [
        Geometry(geometry.elements, geometry.messages, min(piece, n - start), start, n) for start in range(0, n, piece)
    ]


def pack(parts: list[jax.Array], block: int) -> jax.Array:
    """Arrays [..., n] side by side in one; each begins at a multiple of `block`, so no block has elements of two."""
    padded = []
    for x in parts:
        widths = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)]
        padded.append(jnp.pad(x, widths) if widths[-1][1] else x)
    return padded[0] if len(padded) == 1 else jnp.concatenate(padded, axis=-1)


def unpack(packed: jax.Array, lengths: list[int], block: int) -> list[jax.Array]:
    """The inverse of `pack` for parts of these lengths."""
    parts, start = [], 0
    for n in lengths:
        parts.append(lax.slice_in_dim(packed, start, start + n, axis=-1))
        start += n + -n % block
    return parts


def after(arrived: list[jax.Array], wire: jax.Array) -> jax.Array:
    """`wire`, sent when the last of `arrived` (the wires of earlier chunks) is there.

    A link carries one after the other in any case; XLA would join gathers or permutations that do not wait for each
    other into one, and nothing could overlap with it. The barrier's own copy of what has arrived takes its place in the
    list, and is what must be read: XLA takes an operand whose result nobody uses out of a barrier.
    """
    if arrived:
        wire, arrived[-1] = barrier(wire, arrived[-1])
    return wire


def send_chunks(
    message: Message, chunks, x_S: jax.Array, exponent, key, send, lost: list | None = None
) -> tuple[list, list, Hops]:
    """A message's first hop: its chunks (geometries over x_S), encoded and sent one after the other.

    send: wires uint8[P, W] -> (what arrives, hops). lost: takes the residual of each chunk, as of
    `dispatch.encode_with_residual`. Returns what arrives and the measure of each chunk, and all hops.
    """
    arrived, measures, hops = [], [], []
    encode = dispatch.encode if lost is None else dispatch.encode_with_residual
    for k, geometry in enumerate(chunks):
        wires, measure, *residual = encode(
            message.codec, geometry, x_S, exponent, message.key(key, 0, k), with_stats=message.with_stats,
            backend=message.backend,
        )  # fmt: skip
        if lost is not None:
            lost += residual
        if k + 1 == len(chunks):
            wires = before_follower(wires)
        received, sent = send(after(arrived, wires))
        arrived.append(received)
        measures.append(measure)
        hops += sent
    return arrived, measures, hops


def gather(message: Message, wire: jax.Array, to: str) -> tuple[jax.Array, Hops]:
    """(every rank's wire uint8[P, W], what was sent). Among groups of the axis the result can only be typed varying."""
    gathered = lax.all_gather(wire, message.axis, axis_index_groups=message.groups, to=to)
    return gathered, [("all-gather", gathered.size)]


def swap(message: Message, wires_PW: jax.Array) -> tuple[jax.Array, Hops]:
    """(received uint8[P, W], what was sent)."""
    p, w = wires_PW.shape
    if message.exchange == "all_to_all":
        groups = message.groups
        return lax.all_to_all(wires_PW, message.axis, 0, 0, axis_index_groups=groups, tiled=True), [
            ("all-to-all", p * w)
        ]
    rank, groups = message.rank, message.groups or [range(p)]
    row = lambda r: lax.dynamic_index_in_dim(wires_PW, r, keepdims=False)
    received = [row(rank)]
    for step in range(1, p):
        perm = [(group[i], group[(i + step) % p]) for group in groups for i in range(p)]
        received.append(permute(row((rank + step) % p), message.axis, perm))
    # What arrived in step s came from rank - s.
    steps = (rank - jnp.arange(p)) % p
    return jnp.take(jnp.stack(received), steps, axis=0), [("collective-permute", w)] * (p - 1)
