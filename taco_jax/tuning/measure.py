"""The measurement: every way of every codec at every size, compiled side by side and timed in turn."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from taco_jax.compression.compression import SHOTS, Compression
from taco_jax.compression.timings import Way
from taco_jax.config import cli
from taco_jax.tuning import layer
from taco_jax.tuning.layer import FREE
from taco_jax.tuning.report import sentence, size_name
from taco_jax.tuning.result import Point
from taco_jax.tuning.settings import TuneConfig

COMPILERS = 8  # programs that are compiled at the same time
# One-shot is left out at sizes beyond one at which it took so many times as long as two-shot: it sends P/2 times the
# bytes, and needs memory for the messages of all ranks.
HOPELESS = 2.0


def measure(config: TuneConfig, mesh, points: dict[str, list[Point]]) -> str | None:
    """Adds what it measures to `points`. Returns where it had to stop and why, None if it did not: hours of measuring
    smaller messages are not lost with one that finds no memory."""
    algorithms = dict.fromkeys(config.codecs, config.algorithms)
    for operation in config.operations:
        for nbytes in config.sizes:
            for codec in config.codecs:
                try:
                    if nbytes == config.sizes[0] and codec == config.codecs[0]:
                        _prepare(config, mesh, operation, algorithms)
                    found = _points(config, mesh, operation, codec, nbytes, algorithms=algorithms[codec])
                except KeyboardInterrupt:
                    return f"interrupted at {size_name(nbytes)}, {codec}"
                except Exception as error:
                    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    return f"stopped at {size_name(nbytes)}, {codec} ({reason}); try a smaller --largest"
                points[codec] += found
                for point in found:
                    cli.say(sentence(codec, point))
                ratios = {way: _least_ratio(found, way) for way in SHOTS}
                if ratios["one_shot"] > HOPELESS * ratios["two_shot"] < math.inf:
                    algorithms[codec] = ("two_shot",)
    return None


def _least_ratio(points: Sequence[Point], algorithm: str) -> float:
    return min((p.ratio for p in points if p.way.algorithm == algorithm), default=math.inf)


def _points(
    config: TuneConfig, mesh, operation: str, codec: str, nbytes: int, *, algorithms: Sequence[str]
) -> list[Point]:
    """Every way of a codec at one size: each exchange in the fewest chunks, then the fastest one in more of them."""
    chunks = _chunks(config, nbytes)
    found = _time(
        config,
        mesh,
        operation,
        codec,
        nbytes,
        ways=_first_ways(config, mesh, operation, codec, nbytes, algorithms=algorithms),
    )
    separate = [p for p in found if p.way.link == "nccl" and p.way.algorithm != "one_shot"]
    if len(chunks) > 1:
        exchange = min(separate, key=lambda p: p.ratio).way.exchange if separate else config.exchanges[0]
        more = _ways(config, operation, chunks[1:], [exchange], algorithms=algorithms)
        found += _time(config, mesh, operation, codec, nbytes, ways=more)
    return found


def _chunks(config: TuneConfig, nbytes: int) -> list[int]:
    return sorted({c for c in config.chunks if c * config.smallest_chunk <= nbytes}) or [min(config.chunks)]


def _first_ways(
    config: TuneConfig, mesh, operation: str, codec: str, nbytes: int, *, algorithms: Sequence[str]
) -> list[Way]:
    """One kernel over NVLink where there is one, and separate kernels in the fewest chunks."""
    chunks = _chunks(config, nbytes)[:1]
    one_kernel = _in_one_kernel(config, mesh, operation, codec, nbytes)
    shots = algorithms if operation == "psum" else ("auto",)
    kernels = [Way("nvlink", algorithm) for algorithm in shots if one_kernel]
    return kernels + _ways(config, operation, chunks, config.exchanges, algorithms=algorithms)


def _ways(
    config: TuneConfig, operation: str, counts: Sequence[int], exchanges: Sequence[str], *, algorithms: Sequence[str]
) -> list[Way]:
    """Separate kernels: of a sum in two hops with each exchange and in one hop, of others as they are."""
    if operation in ("all_gather", "ppermute"):  # every rank gets the same wire, or only one does
        return [Way(chunks=c) for c in counts]
    if operation == "psum_scatter":
        return [Way(chunks=c, exchange=exchange) for c in counts for exchange in exchanges]
    two_hops = [Way("nccl", "two_shot", c, exchange) for c in counts for exchange in exchanges]
    one_hop = [Way("nccl", "one_shot", c) for c in counts]
    return two_hops * ("two_shot" in algorithms) + one_hop * ("one_shot" in algorithms)


@functools.cache  # a program that was traced before is not traced again, and then nothing is recorded
def _in_one_kernel(config: TuneConfig, mesh, operation: str, codec: str, nbytes: int) -> bool:
    """Returns whether the message goes over NVLink in one kernel: then there are no chunks, and no exchange."""
    from taco_jax.compression import dispatch

    x, w = layer.arguments(config, mesh, nbytes)
    compression = Compression(codec, backend=config.backend, chunks=1, min_bytes=0)
    with dispatch.record() as choices:
        layer.program(mesh, 1, operation, compression).trace(x, w)
    return any(name == "nvlink" for found in choices.values() for name, _ in found)


def _compression(config: TuneConfig, codec: str, way: Way) -> Compression:
    return Compression(codec, backend=config.backend, min_bytes=0, **way._asdict())


def _prepare(config: TuneConfig, mesh, operation: str, algorithms) -> None:
    """Compiles the first programs of all sizes side by side; what fails, fails again where it is timed."""
    wanted = [(nbytes, how) for nbytes in config.sizes for how in (FREE, None)]
    for nbytes in config.sizes:
        for codec in config.codecs:
            try:
                ways = _first_ways(config, mesh, operation, codec, nbytes, algorithms=algorithms[codec])
            except Exception:
                continue
            wanted += [(nbytes, _compression(config, codec, way)) for way in ways]
    _compiled.clear()
    _compile(config, mesh, operation, wanted)


_compiled: dict = {}  # (mesh, operation, bytes, dtype, compression) -> the compiled program; of one operation


def _compile(config: TuneConfig, mesh, operation: str, wanted: Sequence[tuple]) -> None:
    """Compiles what is not compiled yet of pairs (bytes, compression), in threads; leaves out what fails."""

    def compiled(key):
        with contextlib.suppress(Exception):
            shapes = layer.arguments(config, mesh, key[2])
            program = layer.program(mesh, layer.layers_of_call(mesh, key[2]), operation, key[-1])
            _compiled[key] = program.lower(*shapes).compile()

    keys = dict.fromkeys((mesh, operation, nbytes, config.dtype, how) for nbytes, how in wanted)
    missing = [key for key in keys if key not in _compiled]
    # XLA tries ways of a product on the device, and all programs of a size take what the first one found.
    for key in missing:
        if key[-1] == FREE:
            compiled(key)
    with ThreadPoolExecutor(COMPILERS) as threads:
        list(threads.map(compiled, (key for key in missing if key[-1] != FREE)))


def _time(config: TuneConfig, mesh, operation: str, codec: str, nbytes: int, *, ways: Sequence[Way]) -> list[Point]:
    """Medians of the ways, each round of them with an exact layer and one without a collective before it."""
    layers = layer.layers_of_call(mesh, nbytes)
    compressions = [FREE, None, *(_compression(config, codec, way) for way in ways)]
    _compile(config, mesh, operation, [(nbytes, how) for how in compressions])
    arguments = layer.tensors(config, mesh, nbytes)
    # One that could not be compiled says here why.
    programs = [
        _compiled.get((mesh, operation, nbytes, config.dtype, c)) or layer.program(mesh, layers, operation, c)
        for c in compressions
    ]
    for program in programs:
        program(*arguments).block_until_ready()
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(config.repeats):
        for program, times in zip(programs, seconds):
            start = time.perf_counter()
            program(*arguments).block_until_ready()
            times.append((time.perf_counter() - start) / layers)
    medians, spreads = [statistics.median(times) for times in seconds], [_spread(times) for times in seconds]
    free, exact, *others = zip(medians, spreads)
    return [
        Point(
            nbytes,
            way,
            median,
            exact_seconds=exact[0],
            free_seconds=free[0],
            spreads=(spread, exact[1], free[1]),
            operation=operation,
        )
        for way, (median, spread) in zip(ways, others)
    ]


def _spread(times: Sequence[float]) -> float:
    """Half of the interquartile range."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 2
