"""Which way a message takes by measured times: exactly, or as one of the ways of its codec.

A `Row` is one operation at one message size on one link: a layer of a product, the collective and a normalisation,
timed in turn without the collective, with jax.lax's own and with each way of a codec. A way pays at a size where it
beats the exact collective by more than both spreads and by MARGIN of what the exact one costs.

`decide` never takes a way that does not pay. Between two measured sizes it takes a way that pays at both, so that
nothing rests on how a time grows in between: NCCL changes its protocol with the size, XLA the kernel of an exact sum.
Below the smallest measured size it takes none, above the largest what pays there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

OPERATIONS = ("psum", "psum_scatter", "all_gather", "ppermute")  # that are measured, by their names in jax.lax
MARGIN = 0.05


class Time(NamedTuple):
    """Microseconds of a layer: the median of the repeats, and half of their interquartile range."""

    us: float
    spread: float = 0.0


class Way(NamedTuple):
    """How a message of a codec goes. algorithm: of a sum, else auto. exchange: the first hop's of two."""

    link: str = "nccl"
    algorithm: str = "auto"
    chunks: int = 1
    exchange: str = "all_to_all"


@dataclasses.dataclass(frozen=True)
class Row:
    """Times of one operation at one size. free: of the layer without the collective."""

    bytes: int
    free: Time
    exact: Time
    ways: Mapping[Way, Time]

    def pays(self, way: Way) -> bool:
        """Returns whether the way is faster than the exact collective, beyond noise."""
        time, exact = self.ways[way], self.exact
        least = max(time.spread + exact.spread, MARGIN * (exact.us - self.free.us))
        return time.us + least < exact.us


Allowed = Callable[[Way], bool]


def decide(rows: Sequence[Row], nbytes: int, allowed: Allowed, *, forced: bool = False) -> tuple[Way, int] | None:
    """(the fastest way of those that pay, the measured size that says so) for a message; None: it goes exactly.

    Args:
      rows: of one operation, by size.
      allowed: which ways are open to the message.
      forced: it must be compressed, so the fastest way is taken whether it pays or not.
    """
    below, above = [r for r in rows if r.bytes <= nbytes], [r for r in rows if r.bytes >= nbytes]
    if not below:
        if not forced:
            return None
        ends = above[:1]
    elif not above or below[-1].bytes == nbytes:
        ends = below[-1:]
    else:
        ends = [below[-1], above[0]]
    ways = _common(ends, allowed)
    if forced:
        ends, ways = (ends, ways) if ways else (ends[:1], _common(ends[:1], allowed))
    else:
        ways = [way for way in ways if all(row.pays(way) for row in ends)]
    if not ways:
        return None
    return min(ways, key=lambda way: _between(ends, nbytes, lambda row: row.ways[way].us)), ends[0].bytes


def threshold(rows: Sequence[Row], allowed: Allowed) -> int | None:
    """The smallest measured size from which on some way pays at every measured size; None where none is."""
    least = None
    for row in sorted(rows, key=lambda row: row.bytes, reverse=True):
        if not any(row.pays(way) for way in row.ways if allowed(way)):
            break
        least = row.bytes
    return least


def _common(ends: Sequence[Row], allowed: Allowed) -> list[Way]:
    """The ways that are open and measured at every end."""
    return [way for way in ends[0].ways if allowed(way) and all(way in row.ways for row in ends)]


def _between(ends: Sequence[Row], nbytes: int, value: Callable[[Row], float]) -> float:
    """A value of rows at a size between them, on the line through both."""
    first, last = ends[0], ends[-1]
    share = (nbytes - first.bytes) / (last.bytes - first.bytes) if last.bytes > first.bytes else 0.0
    return value(first) + share * (value(last) - value(first))
