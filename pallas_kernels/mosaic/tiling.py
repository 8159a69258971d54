"""How messages are cut into tiles: 64 rows of whole blocks, each row at least 128 elements.

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

from pallas_kernels.formats import Format, Geometry

ROWS = 64
GROUP = 8


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
    def row(self) -> int:
        """Elements of a row."""
        return max(128, self.fmt.block)

    def check_alignment(self) -> None:
        """Raises ValueError where messages do not lie in x as tensor copies need it."""
        g, group = self.geometry, GROUP * self.row
        if self.rows < ROWS or (g.messages > 1 and (g.distance % group or g.offset % group)):
            raise ValueError(f"{g}: messages must start at multiples of {group} elements and have {ROWS} rows or more")

    @property
    def rows(self) -> int:
        """R, the rows of a message, in whole groups."""
        return self.geometry.per_message // (GROUP * self.row) * GROUP

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's codes."""
        return self.row * self.fmt.bits // 8

    @property
    def blocks_per_row(self) -> int:
        return self.row // self.fmt.block

    @property
    def owned(self) -> bool:
        """Whether each thread has whole blocks (`owned.py`)."""
        return self.fmt.block == 32 and self.fmt.rotation == "none"

    @property
    def tiles_per_message(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def tiles(self) -> int:
        return self.tiles_per_message * self.geometry.messages

    @property
    def message_bytes(self) -> int:
        return self.fmt.wire_bytes(self.geometry.per_message)

    @property
    def chunk(self) -> int:
        """Columns of the register arrays that a row is held in: a block, a half of one of 256, or all of `owned`."""
        return self.row if self.owned else min(self.fmt.block, 128)

    @property
    def chunks_per_block(self) -> int:
        return max(1, self.fmt.block // 128)

    def locate(self, tile):
        """Tile index -> (message, first row in the message)."""
        message = lax.div(tile, jnp.int32(self.tiles_per_message))
        row = (tile - message * self.tiles_per_message) * ROWS
        return message, jnp.minimum(row, self.rows - ROWS)

    def x_row(self, message, row):
        """The row of x, seen as [*, row], where a message's row lies."""
        g = self.geometry
        return message * (g.distance // self.row) + (row + g.offset // self.row)

    def plane_offset(self, plane: int) -> int:
        """Where a scale plane starts in its message."""
        return self.fmt.sections(self.geometry.per_message)[1 + plane][0]

    @property
    def scale_planes(self) -> int:
        return 0 if self.fmt.scale == "site" else len(self.fmt.sections(self.geometry.per_message)) - 1

    def gaps(self) -> list[tuple[int, int]]:
        """(offset, length) of the bytes of a message that belong to no section; they are zero."""
        sections = self.fmt.sections(self.geometry.per_message)
        ends = [offset for offset, _ in sections[1:]] + [self.message_bytes]
        return [(o + n, end - o - n) for (o, n), end in zip(sections, ends) if end > o + n]
