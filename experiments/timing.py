"""How the benchmarks time programs: launched one after the other, so that starting them costs nothing."""

from __future__ import annotations

import statistics
import time

import jax


def seconds(program, *arguments, calls: int, programs: int, repeats: int) -> float:
    """Of one of the `calls` that a compiled program makes: the median over repeats of so many programs queued."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(programs):
            out = program(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / programs / calls)
    return statistics.median(times)
