"""`TokenStream`: the tokens of one or many files, joined to one sequence and read in place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

# A digest looks at so many runs of so many tokens, evenly spread.
DIGEST_RUNS, DIGEST_LENGTH = 64, 64


class TokenStream:
    """The pieces of some arrays, one behind the other. A slice is read when it is asked for, and nothing before.

    arrays: sequences of ids (memory maps as a rule): `len`, and slices that are numpy arrays. pieces: int64[P, 3] of
    (array, first id in it, number of ids), in their order; None: all of every array.
    """

    def __init__(self, arrays: Sequence[Any], pieces: np.ndarray | None = None):
        if pieces is None:
            pieces = np.array([(i, 0, len(array)) for i, array in enumerate(arrays)], np.int64).reshape(-1, 3)
        self._arrays, self._pieces = arrays, pieces[pieces[:, 2] > 0]
        self._ends = np.cumsum(self._pieces[:, 2])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, key: slice) -> np.ndarray:
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError(f"tokens are read in runs, not in steps of {step}")
        runs, at = [], start
        piece = int(np.searchsorted(self._ends, start, side="right"))
        while at < stop:
            array, first, length = map(int, self._pieces[piece])
            offset = at - (int(self._ends[piece]) - length)
            take = min(length - offset, stop - at)
            runs.append(np.asarray(self._arrays[array][first + offset : first + offset + take]))
            at, piece = at + take, piece + 1
        return runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else np.zeros(0, np.uint16)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns all ids, in memory."""
        return np.asarray(self[:], dtype=dtype)

    def part(self, start: int, stop: int) -> TokenStream:
        """Returns the stream of the ids from `start` to before `stop`; reads none of them."""
        return TokenStream([self], np.array([(0, start, max(stop - start, 0))], np.int64))

    def digest(self) -> str:
        """Returns a digest of the number of ids and of a sample of them, whatever files and types they are held in."""
        size = len(self)
        content = hashlib.sha256(str(size).encode())
        for run in range(DIGEST_RUNS):
            start = max(size - DIGEST_LENGTH, 0) * run // (DIGEST_RUNS - 1)
            content.update(self[start : start + DIGEST_LENGTH].astype("<i8").tobytes())
        return content.hexdigest()[:16]
