"""Measures on this machine's devices from what message size each codec pays, and how it is best sent.

    python -m taco_jax.tune [--codecs taco int6h] [--output FILE]

For each size and codec it times psum with the codec against psum without, in turn: in two hops, the first as one
all_to_all and as a ring, and in one hop (one-shot); then the faster of the two in chunks, and one-shot too. Prints a
table and puts the result into the file that layers read (`taco_jax.compression.tuned`), under the device's name, the
number of ranks and the link; measure each link by itself (`NCCL_P2P_DISABLE=1 python -m taco_jax.tune`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from taco_jax.codec import CODECS, FLOAT_DTYPES
from taco_jax.compression.compression import BACKENDS, EXCHANGES, MAX_CHUNKS, SHOTS, Compression
from taco_jax.config import ConfigError, cli
from taco_jax.errors import did_you_mean

FACTOR = 4  # from one message size to the next
TARGET_BYTES = 1 << 28  # reduced by one timed call, in as many rounds as that takes
# One-shot is left out at sizes beyond one at which it took so many times as long as two-shot: it sends P/2 times the
# bytes, and needs memory for the messages of all ranks.
HOPELESS = 2.0
RANGE_BITS = {"bfloat16": 160, "float32": 160, "float16": 20}  # that values may grow by, half of it below 1


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """The measurement, and where its result goes."""

    codecs: tuple[str, ...] = ("int8h", "taco", "int6h", "int4h")
    """Codecs to measure."""
    smallest: int = 1 << 16
    """Smallest message, in bytes of the tensor that is reduced; the next ones are 4 times as large."""
    largest: int = 1 << 28
    """No message is larger than this many bytes."""
    chunks: tuple[int, ...] = (1, 2, 4)
    """Numbers of chunks to try."""
    smallest_chunk: int = 1 << 20
    """Chunks of fewer bytes of the tensor are not tried."""
    exchanges: tuple[str, ...] = ("all_to_all", "ring")
    """Ways of the first hop to try: all_to_all, ring."""
    ranks: int | None = None
    """Devices that take part; None takes all."""
    dtype: str = "bfloat16"
    """Type of the tensor: bfloat16, float16 or float32."""
    backend: str = "auto"
    """What encodes and decodes: mosaic or triton (GPU kernels), jnp, or auto, a kernel where the device has one."""
    repeats: int = 7
    """Timed calls of each program; their median counts."""
    output: str | None = None
    """File of the result; None takes the one that layers read."""
    devices: str | None = None
    """'cpu:8' emulates eight devices on the CPU; 'cpu', 'gpu' or None take what JAX finds."""

    @property
    def sizes(self) -> list[int]:
        sizes = [self.smallest]
        while sizes[-1] * FACTOR <= self.largest:
            sizes.append(sizes[-1] * FACTOR)
        return sizes


@dataclasses.dataclass(frozen=True)
class Point:
    """One way of one codec at one size, and the exact psum timed in turn with it."""

    bytes: int
    chunks: int
    exchange: str
    seconds: float
    exact_seconds: float
    algorithm: str = "two_shot"

    @property
    def ratio(self) -> float:
        """To the exact psum: times of two calls compare as ratios to the exact psum of the same call."""
        return self.seconds / self.exact_seconds


class Way(NamedTuple):
    """How a sum goes. exchange is the first hop's of two; a sum in one hop has none."""

    algorithm: str
    chunks: int
    exchange: str = "all_to_all"


def winners(points: Sequence[Point]) -> list[Point]:
    """The fastest of each size."""
    sizes = sorted({p.bytes for p in points})
    return [min((p for p in points if p.bytes == size), key=lambda p: p.ratio) for size in sizes]


class StoppedError(RuntimeError):
    """Measuring failed at one size; what the sizes before it say is written. One line. Exit code 1."""


def check(config: TuneConfig) -> TuneConfig:
    """Returns `config`, or raises ConfigError with one line."""

    def require(holds, key, value, rule):
        if not holds:
            raise ConfigError(f"{key}={value!r}: {rule}")

    # Its messages are flat, and have no tokens.
    compressed = [name for name, codec in CODECS.items() if not (codec.exact or codec.per_token)]
    require(config.codecs, "codecs", (), "name at least one")
    for name in config.codecs:
        require(name in compressed, "codecs", name, f"no such codec preset; {did_you_mean(name, compressed)}")
    for exchange in config.exchanges:
        require(exchange in EXCHANGES[1:], "exchanges", exchange, did_you_mean(exchange, EXCHANGES[1:]))
    require(config.exchanges, "exchanges", (), "name at least one")
    fits = config.chunks and min(config.chunks) >= 1 and max(config.chunks) <= MAX_CHUNKS
    require(fits, "chunks", config.chunks, f"must be numbers from 1 to {MAX_CHUNKS}")
    require(config.backend in BACKENDS, "backend", config.backend, did_you_mean(config.backend, BACKENDS))
    require(config.dtype in FLOAT_DTYPES, "dtype", config.dtype, did_you_mean(config.dtype, FLOAT_DTYPES))
    require(config.smallest >= 4, "smallest", config.smallest, "must be at least 4 bytes")
    require(config.largest >= config.smallest, "largest", config.largest, f"must be at least {config.smallest}")
    for key, least in (("repeats", 1), ("smallest_chunk", 1), ("ranks", 2)):
        value = getattr(config, key)
        require(value is None or value >= least, key, value, f"must be at least {least}")
    return config


def main(args: Sequence[str]) -> int:
    config = check(
        cli.parse_flags(TuneConfig(), args, prog="python -m taco_jax.tune", description=__doc__.split("\n\n")[0])
    )
    cli.select_devices(config.devices)
    from pallas_kernels import KernelUnavailableError
    from taco_jax.compression import tuned

    try:
        tune(config)
    except (KernelUnavailableError, tuned.TunedFileError) as error:
        raise ConfigError(str(error)) from error
    except StoppedError as error:
        cli.say(f"error: {error}", sys.stderr)
        return 1
    return 0


def tune(config: TuneConfig) -> dict[str, list[Point]]:
    """Measures, prints, and writes the file. Returns the points of each codec, by size.

    Raises:
      ConfigError: too few devices, or more than one process. KernelUnavailableError: a forced backend that cannot run.
      StoppedError: a size could not be measured, or the user wants no more of it.
    """
    import jax

    from taco_jax.compression import dispatch, tuned

    devices = cli.devices(config.devices)
    ranks = len(devices) if config.ranks is None else config.ranks
    if jax.process_count() > 1:
        raise ConfigError("tune runs in one process that drives all devices, this run has several")
    if len(devices) < 2:
        raise ConfigError(
            f"tune needs at least 2 devices, there are {len(devices)} ({devices[0].platform}); "
            "to try it without GPUs, emulate with --devices cpu:4"
        )
    if not 2 <= ranks <= len(devices):
        raise ConfigError(f"ranks={ranks}: must be at least 2 and at most the {len(devices)} devices there are")
    for codec in config.codecs:
        dispatch.check_backend(codec, devices[0], config.dtype, config.backend)
    file = Path(config.output) if config.output else tuned.path("gpu") or tuned.default_path()
    # Raises now what it would raise at the end.
    tuned.check_writable(file)
    tuned.read(file)
    entry = tuned.entry_name(devices[0].device_kind, ranks)
    mesh = jax.make_mesh((ranks,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:ranks])
    cli.say(f"{entry}; psum of {config.dtype}, medians of {config.repeats}")
    points: dict[str, list[Point]] = {codec: [] for codec in config.codecs}
    stopped = _measure(config, mesh, points)
    if any(points.values()):
        _print_table(points)
    result = {
        codec: result_of(found)
        for codec, found in points.items()
        # A codec that did not pay yet might have at the sizes that are missing: that is not written down as never.
        if not stopped or crossover(winners(found)) is not None
    }
    if result:
        tuned.write(file, entry, result)
        for codec, value in result.items():
            pays = "at no measured size" if value.min_bytes is None else f"from {size_name(value.min_bytes)}"
            cli.say(f"{codec} pays {pays}; sums: {tuned.describe_sums(value.sums)}")
        cli.say(f"written to {file}" + (f", read where {tuned.VARIABLE} names it" if tuned.path("gpu") != file else ""))
    if stopped:
        written = f"the sizes before it are written for {', '.join(result)}" if result else "nothing is written"
        raise StoppedError(f"{stopped}; {written}")
    return points


def _measure(config: TuneConfig, mesh, points: dict[str, list[Point]]) -> str | None:
    """Adds what it measures to `points`. Returns where it had to stop and why, None if it did not: hours of measuring
    smaller messages are not lost with one that finds no memory."""
    algorithms = dict.fromkeys(config.codecs, SHOTS)
    for nbytes in config.sizes:
        for codec in config.codecs:
            try:
                found = _best(config, mesh, codec, nbytes, algorithms[codec])
            except KeyboardInterrupt:
                return f"interrupted at {size_name(nbytes)}, {codec}"
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                return f"stopped at {size_name(nbytes)}, {codec} ({reason}); try a smaller --largest"
            points[codec] += found
            for point in found:
                cli.say(_sentence(codec, point))
            ratio = {p.algorithm: p.ratio for p in found}
            if ratio.get("one_shot", 0) > HOPELESS * ratio["two_shot"]:
                algorithms[codec] = ("two_shot",)
    return None


def result_of(points: Sequence[Point]):
    """Returns what the file says of a codec."""
    from taco_jax.compression import tuned

    best = [(p.bytes, p.chunks, p.exchange) for p in points if p.algorithm == "two_shot"]
    sums = [(p.bytes, p.chunks, p.algorithm) for p in winners(points)]
    return tuned.Tuned(crossover(winners(points)), tuple(best), tuple(sums))


def crossover(points: Sequence[Point]) -> int | None:
    """The smallest size from which on the codec was faster than the exact psum; None if it is not at the largest."""
    least = None
    for point in sorted(points, key=lambda p: p.bytes, reverse=True):
        if point.seconds >= point.exact_seconds:
            break
        least = point.bytes
    return least


def _best(config: TuneConfig, mesh, codec: str, nbytes: int, algorithms: Sequence[str]) -> list[Point]:
    """The fastest way of each algorithm: of two hops the fastest exchange in the fewest chunks, then that exchange in
    more of them; of one hop the fastest number of chunks."""
    import jax.numpy as jnp

    x = _tensor(mesh, nbytes // jnp.dtype(config.dtype).itemsize, config.dtype)
    chunks = sorted({c for c in config.chunks if c * config.smallest_chunk <= nbytes}) or [min(config.chunks)]
    exchanges = config.exchanges
    if _in_one_kernel(config, mesh, codec, x):
        chunks, exchanges = [1], exchanges[:1]

    def ways(counts: Sequence[int], exchanges: Sequence[str]) -> list[Way]:
        two_hops = [Way("two_shot", c, exchange) for c in counts for exchange in exchanges]
        return two_hops + [Way("one_shot", c) for c in counts if "one_shot" in algorithms]

    def fastest(algorithm: str) -> Point:
        return min((p for p in found if p.algorithm == algorithm), key=lambda p: p.ratio)

    found = _time(config, mesh, codec, x, ways(chunks[:1], exchanges))
    if len(chunks) > 1:
        found += _time(config, mesh, codec, x, ways(chunks[1:], [fastest("two_shot").exchange]))
    return [fastest(algorithm) for algorithm in algorithms]


def _in_one_kernel(config: TuneConfig, mesh, codec: str, x) -> bool:
    """Returns whether the sum goes over NVLink in one kernel: then there are no chunks, and no exchange."""
    from taco_jax.compression import dispatch

    with dispatch.record() as choices:
        _program(mesh, 1, Compression(codec, backend=config.backend, chunks=1, min_bytes=0)).trace(x)
    return any(name == "nvlink" for found in choices.values() for name, _ in found)


def _time(config: TuneConfig, mesh, codec: str, x, ways: Sequence[Way]) -> list[Point]:
    """Medians of the ways, each round of them with an exact psum before it."""
    nbytes = x.nbytes // mesh.devices.size
    rounds = _rounds(mesh, nbytes, config.dtype)
    one_way = lambda way: Compression(codec, backend=config.backend, min_bytes=0, **way._asdict())
    programs = [_program(mesh, rounds, compression) for compression in (None, *map(one_way, ways))]
    for program in programs:
        program(x).block_until_ready()
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(config.repeats):
        for program, times in zip(programs, seconds):
            start = time.perf_counter()
            program(x).block_until_ready()
            times.append((time.perf_counter() - start) / rounds)
    exact, *medians = (statistics.median(times) for times in seconds)
    return [
        Point(nbytes, w.chunks, w.exchange, median, exact_seconds=exact, algorithm=w.algorithm)
        for w, median in zip(ways, medians)
    ]


@functools.cache
def _program(mesh, rounds: int, compression: Compression | None):
    """jit of `rounds` psums, each of the one before it: nothing else runs, and launching the program hardly counts."""
    import jax
    from jax import lax
    from jax.sharding import PartitionSpec as P

    import taco_jax
    from taco_jax.collectives import to_varying

    def local(x_1S):
        one = lambda _, x_S: to_varying(taco_jax.psum(x_S, "tp", compression=compression), "tp")
        return lax.fori_loop(0, rounds, one, x_1S[0])[None]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))


def _rounds(mesh, nbytes: int, dtype: str) -> int:
    """Psums of a timed call. Each multiplies the values by the number of ranks: they must stay finite."""
    ranks, bits = mesh.devices.size, RANGE_BITS[dtype]
    wanted = 2 if mesh.devices.flat[0].platform == "cpu" else max(2, min(100, TARGET_BYTES // nbytes))
    return min(wanted, int(bits / math.log2(ranks)))


def _tensor(mesh, elements: int, dtype: str):
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def make():
        x = jax.random.normal(jax.random.key(0), (mesh.devices.size, elements), dtype)
        return x * 2.0 ** (-RANGE_BITS[dtype] / 2)

    return jax.jit(make, out_shardings=NamedSharding(mesh, P("tp")))()


def size_name(nbytes: int) -> str:
    """1048576 -> "1 MiB"."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes:,} bytes"


def _row(point: Point) -> tuple[str, ...]:
    times = (f"{1e3 * point.exact_seconds:.3f}", f"{1e3 * point.seconds:.3f}", f"{1 / point.ratio:.2f}")
    exchange = point.exchange if point.algorithm == "two_shot" else ""
    return (size_name(point.bytes), point.algorithm, *times, str(point.chunks), exchange)


def _sentence(codec: str, point: Point) -> str:
    size, algorithm, exact, ours, ratio, chunks, exchange = _row(point)
    line = f"  {size:>8} {codec} {algorithm}: {ours} ms, exact {exact} ms, {ratio}x, chunks {chunks}"
    return f"{line}, {exchange}" if exchange else line


def _print_table(points: dict[str, list[Point]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="psum: time of the codec against the exact sum (*: the faster algorithm)")
    for column in ("codec", "message", "algorithm", "exact, ms", "codec, ms", "ratio", "chunks", "exchange"):
        table.add_column(column, justify="left" if column in ("codec", "algorithm", "exchange") else "right")
    for codec, found in points.items():
        best = winners(found)
        for point in found:
            size, algorithm, *rest = _row(point)
            table.add_row(codec, size, f"{algorithm}{' *' if point in best else ''}", *rest)
    console = Console()
    with console.capture() as lines:
        console.print(table)
    cli.say(lines.get().rstrip("\n"))


if __name__ == "__main__":
    sys.exit(cli.run(main))
