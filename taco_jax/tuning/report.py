"""Lines and tables of what was measured, and the words for the sizes at which a codec pays."""

from __future__ import annotations

from collections.abc import Sequence

from taco_jax.compression import timings
from taco_jax.compression.timings import Row
from taco_jax.config import cli
from taco_jax.tuning.result import Point, crossover, rows


def size_name(nbytes: int) -> str:
    """Returns a size in words: 1048576 -> "1 MiB"."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes:,} bytes"


def _row(point: Point) -> tuple[str, ...]:
    way = point.way
    hops = way.algorithm == "two_shot" or (point.operation == "psum_scatter" and way.link == "nccl")
    parts = (
        way.link,
        "" if way.algorithm == "auto" else way.algorithm,
        way.exchange if hops and way.link == "nccl" else "",
        f"{way.chunks} chunks" if way.chunks > 1 else "",
    )
    times = (point.free_seconds, point.exact_seconds, point.seconds)
    return (size_name(point.bytes), " ".join(filter(None, parts)), *(f"{1e6 * t:.1f}" for t in times),
            f"{1 / point.ratio:.2f}")  # fmt: skip


def sentence(codec: str, point: Point) -> str:
    """Returns the line of one way of a codec."""
    size, way, free, exact, ours, ratio = _row(point)
    return f"  {size:>8} {codec} {point.operation}, {way}: {ours} us, exact {exact} us, without {free} us, {ratio}x"


def print_table(points: dict[str, list[Point]]) -> None:
    """Prints a table for each operation. points: of each codec."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for operation in dict.fromkeys(p.operation for found in points.values() for p in found):
        table = Table(title=f"{operation}: us of a layer (*: the way that is taken)")
        for column in ("codec", "message", "way", "without", "exact", "compressed", "ratio"):
            table.add_column(column, justify="left" if column in ("codec", "way") else "right")
        for codec, found in points.items():
            of = [p for p in found if p.operation == operation]
            taken = {row.bytes: timings.decide([row], row.bytes, lambda way: True) for row in rows(of)}
            for point in of:
                size, way, *rest = _row(point)
                chosen = taken[point.bytes] is not None and taken[point.bytes][0] == point.way
                table.add_row(codec, size, f"{way}{' *' if chosen else ''}", *rest)
        with console.capture() as lines:
            console.print(table)
        cli.say(lines.get().rstrip("\n"))


def pays_in_sums(value) -> str:
    """Returns `pays` of a codec's sums in the file, which of a file of before is one size."""
    if "psum" in value.times:
        return pays(value.times["psum"])
    return "at no measured size" if value.min_bytes is None else f"from {size_name(value.min_bytes)}"


def pays(rows: Sequence[Row]) -> str:
    """Returns the measured sizes at which some way pays, in words."""
    sizes = [row.bytes for row in rows if any(map(row.pays, row.ways))]
    if not sizes:
        return "at no measured size"
    if (least := crossover(rows)) is None:
        return f"at {', '.join(map(size_name, sizes))} alone"
    below = sizes[: sizes.index(least)]
    return f"from {size_name(least)}" + (f", and at {', '.join(map(size_name, below))}" if below else "")
