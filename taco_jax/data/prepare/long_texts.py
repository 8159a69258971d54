"""Ids of a long text from windows of it, so that its length takes no memory.

A window shares its last characters with the next one. Near a window's edge its tokens may be others than those of the
whole text, but inside of the shared part both windows soon agree: a tokenizer's choice depends on what is near. There
they are joined. Where two windows do not agree (one letter a million times), the text is cut at the window's end; its
tokens still spell the text, only perhaps not by the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from taco_jax.data.prepare.encoding import Encoded, Task, Token

WINDOW_CHARS, OVERLAP_CHARS = 1 << 19, 1 << 12
# Tokens in a row on which two windows must agree to be joined in the middle of them.
AGREEING_TOKENS = 16


def windows(chunks: Iterable[str], window: int, overlap: int) -> Iterator[str]:
    """Yields the windows of a text that comes in chunks. They depend on the text alone.

    Each but the first is longer than `overlap`. `window` must be at least twice that: then the two shared parts of a
    window are apart.
    """
    text = ""
    for chunk in chunks:
        text += chunk
        while len(text) > window:
            yield text[:window]
            text = text[window - overlap :]
    yield text


def agreement(tail: list[Token], head: list[Token]) -> tuple[int, int] | None:
    """Returns (i, j): tail[:i] and head[j:] make one text. None where the two windows do not agree."""
    places = {token: i for i, token in enumerate(tail)}
    longest, end, run, last = 0, (0, 0), 0, -1
    for j, token in enumerate(head):
        i = places.get(token, -1)
        run = 0 if i < 0 else run + 1 if run and i == last + 1 else 1
        last = i
        if run > longest:
            longest, end = run, (i + 1, j + 1)
    if longest < AGREEING_TOKENS:
        return None
    return end[0] - longest // 2, end[1] - longest // 2


class Joiner:
    """Joins the windows of one text, in their order, to the ids of the text.

    encode: encodes a task at once; for windows that do not agree.

    Attributes:
      joined: the first id of the last window that counts; CUT where that window did not agree with the one before and
        was encoded again without the shared part.
    """

    CUT = -1

    def __init__(self, encode: Callable[[Task], Encoded], overlap: int):
        self._encode, self._overlap = encode, overlap
        self._held: np.ndarray | None = None
        self._tail: list[Token] = []
        self.joined = 0

    def add(self, window: str, encoded: Encoded) -> np.ndarray:
        """Returns the ids that are certain now: those up to the place where the window before joins this one."""
        if self._held is None:
            self.go_on(window, encoded, 0)
            return encoded.ids[:0]
        cut = agreement(self._tail, encoded.head)
        # Where there is no agreement, all of the window before counts.
        before, joined = (len(self._tail), self.CUT) if cut is None else cut
        certain = self._held[: len(self._held) - len(self._tail) + before]
        self.go_on(window, encoded, joined)
        return certain

    def go_on(self, window: str, encoded: Encoded, joined: int) -> None:
        """Holds a window that is joined to those before it already, at `joined`."""
        if joined == self.CUT:
            rest = window[self._overlap :]
            encoded = self._encode(Task([rest], min(self._overlap, len(rest))))
        self._held, self._tail, self.joined = encoded.ids[max(joined, 0) :], encoded.tail, joined

    def finish(self, end: int) -> np.ndarray:
        """Returns the ids that are left, and the end token."""
        return np.append(self._held, self._held.dtype.type(end))
