"""Measured points, and what the file says of them: the fastest ways, and from what size a codec pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from taco_jax.compression import timings
from taco_jax.compression.timings import Row, Time, Way


@dataclasses.dataclass(frozen=True)
class Point:
    """Seconds of a layer with one way of one codec at one size, and of the two that were timed in turn with it: with
    the exact collective, and without any. Each has its spread, half of the interquartile range."""

    bytes: int
    way: Way
    seconds: float
    exact_seconds: float
    free_seconds: float = 0.0
    spreads: tuple[float, float, float] = (0.0, 0.0, 0.0)
    operation: str = "psum"

    @property
    def ratio(self) -> float:
        """To the exact layer: times of two calls compare as ratios to the exact layer of the same call."""
        return self.seconds / self.exact_seconds


def winners(points: Sequence[Point]) -> list[Point]:
    """The fastest of each size."""
    sizes = sorted({p.bytes for p in points})
    return [min((p for p in points if p.bytes == size), key=lambda p: p.ratio) for size in sizes]


def rows(points: Sequence[Point]) -> tuple[Row, ...]:
    """The file's rows of one operation, by size.

    Ways of one size that were timed in different calls are brought to the exact layer of the first.
    """
    found = []
    for size in sorted({p.bytes for p in points}):
        of_size = [p for p in points if p.bytes == size]
        first, times = of_size[0], lambda p, i, scale=1.0: Time(1e6 * scale * p[i], 1e6 * scale * p[3][i])
        clocks = [((p.seconds, p.exact_seconds, p.free_seconds, p.spreads), p) for p in of_size]
        ways = {p.way: times(c, 0, first.exact_seconds / p.exact_seconds) for c, p in clocks}
        found.append(Row(size, times(clocks[0][0], 2), times(clocks[0][0], 1), ways))
    return tuple(found)


def by_operation(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Returns {operation: its points}, in the order of the first of each."""
    return {name: [p for p in points if p.operation == name] for name in dict.fromkeys(p.operation for p in points)}


def result_of(points: Sequence[Point], before=None):
    """Returns what the file says of a codec. before: what it has said, of which other operations stay."""
    from taco_jax.compression import tuned

    found = by_operation(points)
    times = (dict(before.times) if before else {}) | {name: rows(of) for name, of in found.items()}
    if "psum" not in found:
        return dataclasses.replace(before, times=times)
    fastest = winners(found["psum"])
    two_shot = winners([p for p in found["psum"] if p.way.algorithm == "two_shot"] or found["psum"])
    best = [(p.bytes, p.way.chunks, p.way.exchange) for p in two_shot]
    sums = [(p.bytes, p.way.chunks, p.way.algorithm) for p in fastest]
    return tuned.Tuned(crossover(times["psum"]), tuple(best), tuple(sums), times)


def crossover(rows: Sequence[Row]) -> int | None:
    """The smallest size from which on the codec pays; None if it does not at the largest."""
    return timings.threshold(rows, lambda way: True)
