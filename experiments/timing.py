"""How the benchmarks time programs: launched one after the other, so that starting them costs nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import jax

WARM_UP = 5  # rounds of `in_turn` that are not counted


def seconds(program, *arguments, calls: int, programs: int, repeats: int) -> float:
    """Returns the seconds of one of a program's `calls`: the median over repeats of so many programs queued."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(programs):
            out = program(*arguments)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / programs / calls)
    return statistics.median(times)


def in_turn(functions: Mapping[str, Callable], arguments: tuple, *, rounds: int, calls: int) -> dict[str, dict]:
    """Microseconds of a call of each function: rounds of a few calls, each function in its turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(WARM_UP + rounds):
        for name, function in functions.items():
            jax.block_until_ready(function(*arguments))
            start = time.perf_counter()
            for _ in range(calls):
                y = function(*arguments)
            jax.block_until_ready(y)
            times[name].append(1e6 * (time.perf_counter() - start) / calls)
    counted = {name: t[WARM_UP:] for name, t in times.items()}
    return {
        name: {"us": statistics.median(t), "fastest_us": min(t), "slowest_us": max(t)} for name, t in counted.items()
    }


def beside_product(head: str, rows: Mapping[str, Mapping[str, dict]]) -> list[str]:
    """A table of what `in_turn` gave: microseconds, and how many more than the function called product."""
    names = list(next(iter(rows.values())))
    lines = [f"| {head} | " + " | ".join(names) + " |", "|---" * (head.count("|") + 1 + len(names)) + "|"]
    for first, row in rows.items():
        alone = row["product"]["us"]
        cells = [f"{row[n]['us']:.0f}" + (f" ({row[n]['us'] - alone:+.0f})" if n != "product" else "") for n in names]
        lines.append(f"| {first} | " + " | ".join(cells) + " |")
    return lines
