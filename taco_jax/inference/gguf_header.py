"""The header of a GGUF file, walked through before anything is made of the sizes that it claims.

magic u32, version u32, tensors u64, keys u64; then the keys: name, kind u32, value; then the tensors: name, number of
dims u32, dims u64, type u32, offset u64; then, at a multiple of general.alignment, their data. A string is its length
as u64 and its bytes, an array the kind of its elements as u32, their number as u64 and the elements.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from pathlib import Path

MAGIC = b"GGUF"
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the kinds of values that are numbers."""
UINT32, STRING, ARRAY = 4, 8, 9
MOST_DIMS = 4
MOST_ELEMENTS = 1 << 23
"""Of all arrays together; the largest vocabularies in use, with their merges, have under 2^21. Readers make several
objects of each element."""


def check(path: Path) -> None:
    """Raises ValueError for a header that does not fit into its file. Costs what the header is long."""
    from gguf.constants import GGML_QUANT_SIZES

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Walk(data).file({int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()})


class _Walk:
    def __init__(self, data: mmap.mmap):
        self._data, self._at, self._alignment = data, 0, 32
        self._elements = 0

    def file(self, types: dict[int, tuple[int, int]]) -> None:
        """types: {type of a tensor: (elements, bytes) of a block}."""
        if self._take(4, "a magic number") != MAGIC:
            raise ValueError("does not begin with GGUF")
        version = self._number("I")
        if version & 0xFFFF == 0:  # written where bytes have the other order
            raise ValueError("its numbers are big-endian, but only little-endian files are read")
        tensors, keys = self._number("Q"), self._number("Q")
        self._count(keys, 8 + 4 + 1, "keys")
        for _ in range(keys):
            self._key()
        self._count(tensors, 8 + 4 + 4 + 8, "tensors")
        places = [self._tensor(types) for _ in range(tensors)]
        start = -(-self._at // self._alignment) * self._alignment
        for begin, end, name in places:
            if start + end > len(self._data):
                raise ValueError(f"the tensor {name} ends at byte {start + end}, the file at {len(self._data)}")
            if begin % self._alignment:
                raise ValueError(f"the tensor {name} begins at byte {begin}: must be a multiple of {self._alignment}")
        for (_, end, before), (begin, _, name) in itertools.pairwise(sorted(places)):
            if begin < end:
                raise ValueError(f"the tensor {name} begins at byte {begin}, before {before} ends, at {end}")

    def _key(self) -> None:
        name, kind = self._string("a key"), self._number("I")
        if name == b"general.alignment" and kind == UINT32:
            self._alignment = self._number("I")
            if self._alignment == 0 or self._alignment & (self._alignment - 1):
                raise ValueError(f"general.alignment={self._alignment}: must be a power of two")
        else:
            self._value(kind, _shown(name))

    def _value(self, kind: int, name: str) -> None:
        if kind == STRING:
            self._skip(self._number("Q"), name)
        elif kind == ARRAY:
            kind, count = self._number("I"), self._number("Q")
            self._count(count, 1, f"elements of {name}")
            self._elements += count
            if self._elements > MOST_ELEMENTS:
                raise ValueError(f"its arrays have more than {MOST_ELEMENTS} elements together, with {name}")
            if kind == STRING:
                for _ in range(count):
                    self._skip(self._number("Q"), name)
            elif kind in SIZES:
                self._skip(count * SIZES[kind], name)
            else:
                raise ValueError(f"{name} is an array of kind {kind}")
        elif kind in SIZES:
            self._skip(SIZES[kind], name)
        else:
            raise ValueError(f"{name} is of kind {kind}")

    def _tensor(self, types: dict[int, tuple[int, int]]) -> tuple[int, int, str]:
        """(where its data begin and end, from where all data begin; its name)."""
        name = _shown(self._string("a tensor's name"))
        dims = self._number("I")
        if dims > MOST_DIMS:
            raise ValueError(f"the tensor {name} has {dims} dims; at most {MOST_DIMS} are possible")
        elements = 1
        for _ in range(dims):
            elements *= self._number("Q")
        kind, offset = self._number("I"), self._number("Q")
        if kind not in types:
            raise ValueError(f"the tensor {name} is of type {kind}")
        per_block, size = types[kind]
        return offset, offset + -(-elements // per_block) * size, name

    def _string(self, what: str) -> bytes:
        return self._take(self._number("Q"), what)

    def _number(self, kind: str) -> int:
        return struct.unpack("<" + kind, self._take(struct.calcsize(kind), "a number"))[0]

    def _count(self, count: int, least: int, what: str) -> None:
        left = len(self._data) - self._at
        if count * least > left:
            raise ValueError(f"claims {count} {what}, but {left} bytes are left")

    def _take(self, size: int, what: str) -> bytes:
        self._skip(size, what)
        return self._data[self._at - size : self._at]

    def _skip(self, size: int, what: str) -> None:
        left = len(self._data) - self._at
        if size > left:
            raise ValueError(f"claims {size} bytes of {what}, but {left} are left")
        self._at += size


def _shown(name: bytes) -> str:
    return repr(name[:100].decode("utf-8", "replace"))
