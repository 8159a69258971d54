"""How a message is cut: into one share for each rank, and the shares into chunks that travel one after the other.

A chunk is the same piece of every rank's share, so each element has the owner and the block that it has in one piece,
and the values are the same for any number of chunks. Two codecs are exceptions: stochastic rounding draws noise by
chunk, and scale="site" without a calibrated exponent takes one scale for each message, so for each chunk. Chunks depend
on nothing of each other: XLA can encode the next one while this one travels.
"""

from __future__ import annotations

from pallas_kernels import Geometry
from taco_jax.codec import Codec
from taco_jax.codec.wire import round_up

# Kernels work in tiles of this many elements.
TILE = 8192
# And their copies of groups of 8 rows of 128.
ROWS = 1024


def chunk_elements(codec: Codec, size: int, ranks: int) -> int:
    """Elements of one rank's share of `size`: whole blocks, and whole tiles or rows of kernels where that costs little.

    Little is under 0.1 % of the bytes for tiles, 1 % for rows, without which a kernel's input would have to be padded.
    """
    n = codec.block * -(-codec.n_blocks(size) // ranks)
    if ROWS % codec.block:  # no kernel has such blocks
        return n
    for multiple, excess in ((TILE, 1.001), (ROWS, 1.01)):
        larger = round_up(n, multiple)
        if n >= TILE and codec.wire_bytes(larger) <= excess * codec.wire_bytes(n):
            return larger
    return n


def cut(geometry: Geometry, chunks: int, block: int) -> list[Geometry]:
    """A whole geometry in at most `chunks` pieces, of whole tiles if they are that long, else of whole blocks."""
    n = geometry.per_message
    piece = -(-n // chunks)
    piece = round_up(piece, TILE if piece >= TILE and TILE % block == 0 else block)
    if piece >= n:
        return [geometry]
    return [
        Geometry(geometry.elements, geometry.messages, min(piece, n - start), start, n) for start in range(0, n, piece)
    ]
