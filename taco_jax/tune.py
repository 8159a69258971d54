"""Measures on this machine's devices from what message size each codec pays, and how it is best sent.

    python -m taco_jax.tune [--codecs taco int6h] [--output FILE]

What is timed is a layer, many times in a row: a product, a collective of its result, a normalisation. For each
operation, size and codec the layer with the codec's collective takes turns with the layer with jax.lax's own and with
the layer without any. Ways of a sum are one kernel over NVLink where there is one, and separate kernels in two hops,
the first as one all_to_all and as a ring, and in one hop (one-shot); then the faster of the two in chunks, and one-shot
too. Prints tables and puts the times into the file that layers read (`taco_jax.compression.tuned`), under the device's
name, the number of ranks and the link; measure each link by itself (`NCCL_P2P_DISABLE=1 python -m taco_jax.tune`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from taco_jax.codec import CODECS, FLOAT_DTYPES
from taco_jax.compression import timings
from taco_jax.compression.compression import BACKENDS, EXCHANGES, MAX_CHUNKS, SHOTS, Compression
from taco_jax.compression.timings import Row, Time, Way
from taco_jax.config import ConfigError, cli
from taco_jax.errors import did_you_mean

TARGET_BYTES = 1 << 28  # sent by one timed call, in as many layers as that takes
LAYERS = 100  # of one timed call at most
WIDTH, INNER = 4096, 1024  # of a layer's result, and the inner dimension of its product, at most
COMPILERS = 8  # programs that are compiled at the same time
# One-shot is left out at sizes beyond one at which it took so many times as long as two-shot: it sends P/2 times the
# bytes, and needs memory for the messages of all ranks.
HOPELESS = 2.0


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """The measurement, and where its result goes."""

    codecs: tuple[str, ...] = ("int8h", "taco", "int6h", "int4h")
    """Codecs to measure."""
    smallest: int = 1 << 16
    """Smallest message, in bytes of the tensor that is summed, scattered, sent, or gathered."""
    largest: int = 1 << 28
    """No message is larger than this many bytes."""
    factor: int = 4
    """From one message size to the next."""
    operations: tuple[str, ...] = timings.OPERATIONS
    """Collectives to measure: psum, psum_scatter, all_gather, ppermute. The others join a file that has psum."""
    algorithms: tuple[str, ...] = SHOTS
    """Algorithms of a sum to try: one_shot, two_shot."""
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
        while sizes[-1] * self.factor <= self.largest:
            sizes.append(sizes[-1] * self.factor)
        return sizes


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
    for key, valid in (("operations", timings.OPERATIONS), ("algorithms", SHOTS)):
        require(getattr(config, key), key, (), "name at least one")
        for value in getattr(config, key):
            require(value in valid, key, value, did_you_mean(value, valid))
    fits = config.chunks and min(config.chunks) >= 1 and max(config.chunks) <= MAX_CHUNKS
    require(fits, "chunks", config.chunks, f"must be numbers from 1 to {MAX_CHUNKS}")
    require(config.backend in BACKENDS, "backend", config.backend, did_you_mean(config.backend, BACKENDS))
    require(config.dtype in FLOAT_DTYPES, "dtype", config.dtype, did_you_mean(config.dtype, FLOAT_DTYPES))
    require(config.smallest >= 4, "smallest", config.smallest, "must be at least 4 bytes")
    require(config.largest >= config.smallest, "largest", config.largest, f"must be at least {config.smallest}")
    for key, least in (("repeats", 1), ("smallest_chunk", 1), ("ranks", 2), ("factor", 2)):
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

    config = _each_once(config)
    devices = cli.devices(config.devices)
    ranks = len(devices) if config.ranks is None else config.ranks
    if jax.process_count() > 1:
        raise ConfigError("tune runs in one process that drives all devices, this run has several")
    if len(devices) < 2:
        raise ConfigError(
            f"tune needs at least 2 devices, there is {len(devices)} ({devices[0].platform}); "
            "to try it without GPUs, emulate with --devices cpu:4"
        )
    if not 2 <= ranks <= len(devices):
        raise ConfigError(f"ranks={ranks}: must be at least 2 and at most the {len(devices)} devices there are")
    for codec in config.codecs:
        dispatch.check_backend(codec, devices[0], config.dtype, config.backend)
    file = Path(config.output) if config.output else tuned.path("gpu") or tuned.default_path()
    # Raises now what it would raise at the end.
    tuned.check_writable(file)
    entry = tuned.entry_name(devices[0].device_kind, ranks)
    before = tuned.read(file).get(entry, {})
    without = [codec for codec in config.codecs if "psum" not in config.operations and codec not in before]
    if without:
        raise ConfigError(f"operations={config.operations}: {file} has no sums of {', '.join(without)} that they could "
                          "join; name psum too")  # fmt: skip
    mesh = jax.make_mesh((ranks,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:ranks])
    operations = ", ".join(config.operations)
    cli.say(f"{entry}; {operations} of {config.dtype}, medians of {config.repeats}, each in a layer")
    points: dict[str, list[Point]] = {codec: [] for codec in config.codecs}
    stopped = _measure(config, mesh, points)
    if any(points.values()):
        _print_table(points)
    result = {
        codec: result_of(found, before.get(codec))
        for codec, found in points.items()
        # A codec that did not pay yet might have at the sizes that are missing: that is not written down as never.
        if found and (not stopped or any(crossover(rows(of)) is not None for of in by_operation(found).values()))
    }
    if result:
        tuned.write(file, entry, result)
        for codec, value in result.items():
            others = "".join(f"; {name} {_pays(of)}" for name, of in value.times.items() if name != "psum")
            cli.say(f"{codec} pays {_pays_in_sums(value)}; sums: {tuned.describe_sums(value.sums)}{others}")
        cli.say(f"written to {file}" + (f", read where {tuned.VARIABLE} names it" if tuned.path("gpu") != file else ""))
    if stopped:
        written = f"the sizes before it are written for {', '.join(result)}" if result else "nothing is written"
        raise StoppedError(f"{stopped}; {written}")
    return points


def _each_once(config: TuneConfig) -> TuneConfig:
    """The config without repetitions, and with sums first, which other operations join."""
    once = lambda name: {name: tuple(dict.fromkeys(getattr(config, name)))}
    lists = once("codecs") | once("algorithms") | once("chunks") | once("exchanges")
    operations = tuple(sorted(dict.fromkeys(config.operations), key=lambda name: name != "psum"))
    return dataclasses.replace(config, operations=operations, **lists)


def _pays_in_sums(value) -> str:
    """`_pays` of what the file says of a codec's sums, which of a file of before is one size."""
    if "psum" in value.times:
        return _pays(value.times["psum"])
    return "at no measured size" if value.min_bytes is None else f"from {size_name(value.min_bytes)}"


def _pays(rows: Sequence[Row]) -> str:
    """At which of the measured sizes some way pays."""
    sizes = [row.bytes for row in rows if any(map(row.pays, row.ways))]
    if not sizes:
        return "at no measured size"
    if (least := crossover(rows)) is None:
        return f"at {', '.join(map(size_name, sizes))} alone"
    below = sizes[: sizes.index(least)]
    return f"from {size_name(least)}" + (f", and at {', '.join(map(size_name, below))}" if below else "")


def _measure(config: TuneConfig, mesh, points: dict[str, list[Point]]) -> str | None:
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
                    cli.say(_sentence(codec, point))
                ratios = {way: _least_ratio(found, way) for way in SHOTS}
                if ratios["one_shot"] > HOPELESS * ratios["two_shot"] < math.inf:
                    algorithms[codec] = ("two_shot",)
    return None


def _least_ratio(points: Sequence[Point], algorithm: str) -> float:
    return min((p.ratio for p in points if p.way.algorithm == algorithm), default=math.inf)


def by_operation(points: Sequence[Point]) -> dict[str, list[Point]]:
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

    x, w = _arguments(config, mesh, nbytes)
    compression = Compression(codec, backend=config.backend, chunks=1, min_bytes=0)
    with dispatch.record() as choices:
        _program(mesh, 1, operation, compression).trace(x, w)
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
            shapes = _arguments(config, mesh, key[2])
            _compiled[key] = _program(mesh, _layers(mesh, key[2]), operation, key[-1]).lower(*shapes).compile()

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
    layers = _layers(mesh, nbytes)
    compressions = [FREE, None, *(_compression(config, codec, way) for way in ways)]
    _compile(config, mesh, operation, [(nbytes, how) for how in compressions])
    arguments = _tensors(config, mesh, nbytes)
    # One that could not be compiled says here why.
    programs = [
        _compiled.get((mesh, operation, nbytes, config.dtype, c)) or _program(mesh, layers, operation, c)
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


FREE = "free"  # the layer without a collective


@functools.cache
def _program(mesh, layers: int, operation: str, compression: Compression | str | None):
    """jit of x [ranks, T, K], w [ranks, K, D] -> [ranks, T, K] after so many layers, each of the result of the one
    before: launching the program hardly counts."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec as P

    import taco_jax
    from taco_jax.collectives import to_varying

    ranks = mesh.devices.size

    def send(y_TD):
        part = y_TD[: len(y_TD) // ranks]
        if compression == FREE:
            return y_TD if operation != "psum_scatter" else part
        if operation == "psum":
            return to_varying(taco_jax.psum(y_TD, "tp", compression=compression), "tp")
        if operation == "psum_scatter":
            return taco_jax.psum_scatter(y_TD, "tp", tiled=True, compression=compression)
        if operation == "all_gather":
            return taco_jax.all_gather(part, "tp", tiled=True, compression=compression)
        perm = [(r, (r + 1) % ranks) for r in range(ranks)]
        return taco_jax.ppermute(y_TD, "tp", perm, compression=compression)

    def layer(_, carry):
        x_TK, w_KD = carry
        z = send(x_TK @ w_KD)
        # Normalised, so that values stay finite, and every value is read; then as wide and long as x.
        scale = lax.rsqrt(jnp.square(z.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6).astype(z.dtype)
        z = (z * scale).reshape(len(z), -1, x_TK.shape[1]).mean(1).astype(x_TK.dtype)
        return jnp.tile(z, (len(x_TK) // len(z), 1)), w_KD

    def local(x_1TK, w_1KD):
        return lax.fori_loop(0, layers, layer, (x_1TK[0], w_1KD[0]))[0][None]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))


def _layers(mesh, nbytes: int) -> int:
    """Layers of a timed call."""
    return 2 if mesh.devices.flat[0].platform == "cpu" else max(2, min(LAYERS, TARGET_BYTES // nbytes))


def layer_shape(elements: int, ranks: int) -> tuple[int, int, int]:
    """(T, K, D) of a layer whose result has so many elements: T tokens, which the ranks divide, of width D, made of K.

    Of the widest layer that leaves out at most 1/32 of them, else of one of width 1.
    """
    width = WIDTH
    tokens = lambda: elements // width // ranks * ranks
    while width > 1 and 32 * (elements - tokens() * width) > elements:
        width //= 2
    return max(ranks, tokens()), min(width, INNER), width


def _arguments(config: TuneConfig, mesh, nbytes: int):
    """Shapes of x [ranks, T, K] and w [ranks, K, D] on the mesh."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    ranks = mesh.devices.size
    tokens, inner, width = layer_shape(nbytes // jnp.dtype(config.dtype).itemsize, ranks)
    shapes = (ranks, tokens, inner), (ranks, inner, width)
    return [jax.ShapeDtypeStruct(shape, config.dtype, sharding=NamedSharding(mesh, P("tp"))) for shape in shapes]


def _tensors(config: TuneConfig, mesh, nbytes: int):
    """Values of `_arguments`, normal ones: the weights so that a product's are as large as x's."""
    import jax

    x, w = _arguments(config, mesh, nbytes)

    def make():
        keys = jax.random.split(jax.random.key(0))
        return jax.random.normal(keys[0], x.shape, x.dtype), jax.random.normal(keys[1], w.shape, w.dtype) * w.shape[
            1
        ] ** -0.5

    return jax.jit(make, out_shardings=(x.sharding, w.sharding))()


def size_name(nbytes: int) -> str:
    """1048576 -> "1 MiB"."""
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


def _sentence(codec: str, point: Point) -> str:
    size, way, free, exact, ours, ratio = _row(point)
    return f"  {size:>8} {codec} {point.operation}, {way}: {ours} us, exact {exact} us, without {free} us, {ratio}x"


def _print_table(points: dict[str, list[Point]]) -> None:
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


if __name__ == "__main__":
    sys.exit(cli.run(main))
