"""Stop strings in text that comes in pieces: a stop string may begin in one token and end in another."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Text goes in as it comes and is let out once no stop string can begin in it. stopped: one was found.

    Where several are found in the same piece, the text ends before the one that begins first.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.stopped = tuple(stops), "", False

    def add(self, text: str) -> str:
        """What can be let out now."""
        if self.stopped:
            return ""
        held = self._held + text
        begins = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if begins:
            self.stopped, self._held = True, ""
            return held[: min(begins)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How much of the text's end the stop string may begin with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
