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

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from taco_jax.config import ConfigError, cli
from taco_jax.tuning.measure import measure
from taco_jax.tuning.report import pays, pays_in_sums, print_table
from taco_jax.tuning.result import Point, by_operation, crossover, result_of, rows
from taco_jax.tuning.settings import TuneConfig, check


class StoppedError(RuntimeError):
    """Measuring failed at one size; what the sizes before it say is written. One line. Exit code 1."""


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
    stopped = measure(config, mesh, points)
    if any(points.values()):
        print_table(points)
    result = {
        codec: result_of(found, before.get(codec))
        for codec, found in points.items()
        # A codec that did not pay yet might have at the sizes that are missing: that is not written down as never.
        if found and (not stopped or any(crossover(rows(of)) is not None for of in by_operation(found).values()))
    }
    if result:
        tuned.write(file, entry, result)
        for codec, value in result.items():
            others = "".join(f"; {name} {pays(of)}" for name, of in value.times.items() if name != "psum")
            cli.say(f"{codec} pays {pays_in_sums(value)}; sums: {tuned.describe_sums(value.sums)}{others}")
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
