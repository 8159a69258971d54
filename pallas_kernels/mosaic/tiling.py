"""Cuts messages into tiles: 64 rows of whole blocks, each row at least 128 elements; and says what has no kernel.

Tensor copies into swizzled memory move groups of 8 rows: a tile begins at a multiple of 8 rows, in x as in its message.
(Messages of 4,097 rows were read wrongly, without an error: rows that cross a group are outside the copy's box.)

A row is one block of 128 or 256 elements, or 128 elements that hold two blocks of 64 or four of 32. Messages are whole
rows here; what does not fit is in `ragged.py`. The last tile of a message is moved back so that it ends with the
message: it repeats rows of the tile before, and both write the same bytes.

Dim letters: P messages, R rows of a message, T tiles of all messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import (
    SCALE_BYTES,
    Format,
    Geometry,
    packing_parts,
    why_no_kernels,
)

TILE_ROWS = 64  # the rows of one product of the tensor cores (wgmma m64)
GROUP_ROWS = 8  # of a tensor copy into swizzled memory
MIN_ROW_ELEMENTS = 128
# A kernel may use 227 KiB of a multiprocessor's shared memory, less barriers and the scratch of reductions.
SMEM_BYTES = 232448 - 4096
# Wires of more ranks do not fit the shared memory beside the rest.
MAX_RANKS = 16
MAX_MESSAGE_BYTES = 2**31 - 1  # offsets are int32


# The operations of `encode_with_residual` and `reduce_encode_with_residual`, as `why_unsupported` takes them.
RESIDUAL, RESIDUAL_OF_SUM = "encode with residual", "reduce with residual"


@dataclass(frozen=True)
class Tiling:
    """One operation's tiles. `interpret` is what `plgpu.kernel` takes: None on a GPU.

    any_order: the bytes of a row may lie in any order, where no other implementation reads them.
    """

    fmt: Format
    geometry: Geometry
    interpret: Any = None
    any_order: bool = False

    @property
    def row_elements(self) -> int:
        """Returns how many elements a row has."""
        return max(MIN_ROW_ELEMENTS, self.fmt.block)

    def check_alignment(self) -> None:
        """Raises ValueError where messages do not lie in x as tensor copies need it."""
        g, group = self.geometry, GROUP_ROWS * self.row_elements
        if self.rows < TILE_ROWS or (g.messages > 1 and (g.distance % group or g.offset % group)):
            raise ValueError(
                f"{g}: messages must start at multiples of {group} elements and have {TILE_ROWS} rows or more"
            )

    @property
    def rows(self) -> int:
        """R, the rows of a message, in whole groups."""
        return self.geometry.per_message // (GROUP_ROWS * self.row_elements) * GROUP_ROWS

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's codes."""
        return self.row_elements * self.fmt.bits // 8

    @property
    def blocks_per_row(self) -> int:
        return self.row_elements // self.fmt.block

    @property
    def one_thread_per_block(self) -> bool:
        """Returns whether each thread has whole blocks (`registers/thread_blocks.py`)."""
        return self.fmt.block == 32 and self.fmt.rotation == "none"

    @property
    def consecutive_bytes(self) -> bool:
        """Returns whether a thread's codes are consecutive bytes of their row (`registers/layout.py`)."""
        return self.fmt.rotation != "none" or self.any_order or self.one_thread_per_block

    @property
    def swizzle_bytes(self) -> int | None:
        """Bytes of the shared-memory swizzle of a tile's codes; None where their rows allow none or need none."""
        return self.row_bytes if self.row_bytes in (64, 128) and not self.consecutive_bytes else None

    @property
    def tiles_per_message(self) -> int:
        return -(-self.rows // TILE_ROWS)

    @property
    def tiles(self) -> int:
        return self.tiles_per_message * self.geometry.messages

    @property
    def message_bytes(self) -> int:
        return self.fmt.wire_bytes(self.geometry.per_message)

    @property
    def chunk(self) -> int:
        """Columns of the register arrays that hold a row: a block, half of one of 256, or a row of several whose
        threads have whole blocks."""
        return self.row_elements if self.one_thread_per_block else min(self.fmt.block, 128)

    @property
    def chunks_per_block(self) -> int:
        return max(1, self.fmt.block // 128)

    def locate(self, tile):
        """Returns (message, first row in the message) of a tile's index."""
        message = lax.div(tile, jnp.int32(self.tiles_per_message))
        row = (tile - message * self.tiles_per_message) * TILE_ROWS
        return message, jnp.minimum(row, self.rows - TILE_ROWS)

    def x_row(self, message, row):
        """Returns the row of x, seen as [*, row], where a message's row lies."""
        g = self.geometry
        return message * (g.distance // self.row_elements) + (row + g.offset // self.row_elements)

    def plane_offset(self, plane: int) -> int:
        """Returns the byte where a scale plane starts in its message."""
        return self.fmt.sections(self.geometry.per_message)[1 + plane][0]

    @property
    def scale_planes(self) -> int:
        return 0 if self.fmt.scale == "site" else len(self.fmt.sections(self.geometry.per_message)) - 1

    def gaps(self) -> list[tuple[int, int]]:
        """Returns (offset, length) of the bytes of a message that belong to no section; they are zero."""
        sections = self.fmt.sections(self.geometry.per_message)
        ends = [offset for offset, _ in sections[1:]] + [self.message_bytes]
        return [(o + n, end - o - n) for (o, n), end in zip(sections, ends) if end > o + n]


def why_unsupported(fmt: Format, operation: str, dtype: str, geometry: Geometry | int = 1) -> str | None:
    """Returns why `operation` (encode, reduce, decode, `RESIDUAL`...) has no kernel; None where it has. Needs no GPU.

    geometry: or a count of elements.
    """
    if (reason := why_no_kernels("mosaic", fmt, dtype)) is not None:
        return reason
    if fmt.block // packing_parts(fmt.bits) < 8:
        return f"mosaic packs parts of 8 elements and more, and a block of {fmt.block} in {fmt.bits} bits has smaller"
    need = _least_smem_bytes(fmt, operation, dtype, geometry.messages if isinstance(geometry, Geometry) else 1)
    if need > SMEM_BYTES:
        return (
            f"blocks of {fmt.block} of {dtype} with rotation {fmt.rotation!r} need {need} bytes of shared memory "
            f"to {operation}, and a multiprocessor has {SMEM_BYTES}"
        )
    if operation == RESIDUAL_OF_SUM:
        row = GROUP_ROWS * max(MIN_ROW_ELEMENTS, fmt.block)
        g = geometry if isinstance(geometry, Geometry) else Geometry(geometry, 1, geometry)
        if any(n % row for n in (g.elements, g.per_message, g.distance, g.offset)) or 8 * row > g.per_message:
            return "sums of messages that are no whole groups of rows are encoded without their residual"
        if dtype == "float16" or g.messages == 1:
            return "sums of float16 are encoded without their residual"
    if isinstance(geometry, Geometry):
        if operation in ("reduce", RESIDUAL_OF_SUM) and geometry.messages > MAX_RANKS:
            return f"mosaic reduces over at most {MAX_RANKS} ranks, not {geometry.messages}"
        if fmt.wire_bytes(geometry.per_message) > MAX_MESSAGE_BYTES:
            return f"a message of {geometry.per_message} elements is over 2 GiB; more ranks or chunks make it smaller"
    return None


def _least_smem_bytes(fmt: Format, operation: str, dtype: str, messages: int) -> int:
    """Returns the bytes of the smallest kernel, of one warpgroup: matrices, tiles of codes, of x or y, and scales."""
    row = max(MIN_ROW_ELEMENTS, fmt.block)
    tile, codes = TILE_ROWS * row * (4 if dtype == "float32" else 2), TILE_ROWS * row * fmt.bits // 8
    scales = TILE_ROWS * max(1, SCALE_BYTES[fmt.scale]) * (row // fmt.block)
    # A block of 256 is two halves: of its four matrices three are alike, or with signs two.
    distinct = {"none": 0, "hadamard": 2, "signed_hadamard": 3}[fmt.rotation] if fmt.block == 256 else 1
    matrices = (distinct * min(fmt.block, 128) ** 2 if fmt.rotation != "none" else 64 * 64) * 2
    if operation in ("encode", RESIDUAL):
        return matrices + (3 if operation == RESIDUAL else 2) * tile + 2 * codes + scales
    if operation == "decode":
        return matrices + 2 * codes + 2 * tile
    tiles = 3 if operation == RESIDUAL_OF_SUM else 2
    return matrices + max(1, messages - 1) * codes + tiles * tile + scales
