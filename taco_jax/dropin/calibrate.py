"""`calibrated`: somebody's program runs exactly as it is, and leaves a plan file for its collectives.

    with taco_jax.calibrated("plan.json", bits=4.5) as calibration:
        for batch in batches:
            state, metrics = train_step(state, batch)
    print(calibration)

`taco_jax.compressed("plan.json")` takes the file. docs/drop-in.md says what is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import glob
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence

import jax
import numpy as np

import taco_jax
from taco_jax.codec import as_codec
from taco_jax.compression import plan_file
from taco_jax.compression.plan_file import CollectivePlan, PlanFile
from taco_jax.dropin import hook, host_calls, observer
from taco_jax.dropin.allocation import EXACT, Budget, Option, allocate, snr_of
from taco_jax.dropin.hlo_proto import SIZES
from taco_jax.dropin.observe import NOT_MEASURED, Measuring
from taco_jax.dropin.plan import parse_measured_axes, parse_plan
from taco_jax.dropin.report import DropInError, Program, Report, Site
from taco_jax.errors import ConfigError, check_writable

CODECS = ("mxfp4", "int4h", "int5h", "int6h", "int8h")
STEPS = 4


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurement of the collectives of one op_name, operation and axis.

    sent: elements that one device sent in the whole run, those of a gather counted as many times as they travel.
    elements: of one message, on one device. calls: of the whole run, on one device. direction: as of `Site`.
    options: codecs by what they cost and lose, "none" among them. chosen: under the budget. messages: equal numbers
    of a program are of rows that become one message where their codec is one; so it is.
    """

    axis: str
    operation: str
    direction: str
    op_name: str
    elements: int
    calls: int
    sent: float
    kurtosis: float
    options: tuple[Option, ...]
    messages: frozenset[tuple[str, int]] = frozenset()
    chosen: Option | None = None

    def line(self) -> CollectivePlan:
        """The line of a plan file."""
        snr = None if self.chosen.codec == EXACT else round(self.chosen.snr, 2)
        name = glob.escape(self.op_name)
        codec = self.chosen.codec
        return CollectivePlan(self.axis, self.operation, name, codec, snr_db=snr, elements=self.elements)


class _Runs:
    """The runs of one site: its samples by run, added up over the process's devices."""

    def __init__(self):
        self.calls: dict[int, int] = defaultdict(int)  # by partition
        self.samples: list[list[observer.Sample]] = []

    def add(self, sample: observer.Sample, most: int) -> None:
        run = self.calls[sample.partition]
        self.calls[sample.partition] += 1
        if run < most:
            if run == len(self.samples):
                self.samples.append([])
            self.samples[run].append(sample)

    def figures(self) -> tuple[np.ndarray, float] | None:
        """(relative error power by codec, kurtosis), each the mean over runs; None without a run of finite values."""
        found = []
        for arrived in self.samples:
            samples = sorted(arrived, key=lambda s: s.partition)  # equal figures for equal runs
            signal, second, fourth = (
                np.mean([getattr(s, key) for s in samples]) for key in ("signal", "second", "fourth")
            )
            noise = np.mean([s.noise for s in samples], axis=0)
            if not (np.isfinite([signal, second, fourth, *noise]).all() and signal > 0 and second > 0):
                continue
            found.append((noise / signal, fourth / second**2))
        if not found:
            return None
        errors, kurtosis = zip(*found)
        return np.mean(errors, axis=0), float(np.mean(kurtosis))


class Calibration:
    """The measurement of programs while they run, in all threads, until `stop`. `print` shows the table."""

    def __init__(self, measuring: Measuring, budget: Budget, steps: int = STEPS):
        """steps: runs of each program that are measured; later ones are counted."""
        self.measuring, self.budget, self.steps = measuring, budget, steps
        self._runs: dict[tuple[str, int], _Runs] = defaultdict(_Runs)
        self._programs: dict[str, Program] = {}
        self._lock = threading.Lock()
        self._problems = len(host_calls.problems())
        self._history = hook.start_everywhere(measuring)
        self._report = Report(self._history)
        self._end = host_calls.receive(self._receive)

    def stop(self) -> None:
        """Ends it, once what the process's devices were given has run. A second call does nothing."""
        if self._end is None:
            return
        end, self._end = self._end, None
        self._report.close()
        hook.end_everywhere(self.measuring)
        try:
            host_calls.wait()
        finally:
            end()

    def _receive(self, words: np.ndarray) -> None:
        sample = observer.read(words)
        with self._lock:
            if sample.program not in self._programs:
                self._programs = {program.id: program for program in self._history.programs()}
            if (program := self._programs.get(sample.program)) is None:
                return  # another calibration's
            most = self.steps * program.sites[sample.site].runs
            self._runs[sample.program, sample.site].add(sample, most)

    def measured(self) -> list[Measured]:
        """One for each axis, operation and op_name, those that send most first, without a choice."""
        rows: dict[tuple, list] = {}
        with self._lock:
            for (program, number), runs in self._runs.items():
                site = self._programs[program].sites[number]
                if (figures := runs.figures()) is not None:
                    message = frozenset([(program, site.message)] if site.message >= 0 else [])
                    of_name = rows.setdefault((site.axes, site.operation, site.op_name), [])
                    of_name.append((site, runs, *figures, message))
        found = [self._row(sites) for sites in rows.values()]
        return sorted(found, key=lambda row: (-row.sent, row.op_name, row.axis, row.operation))

    def _row(self, sites: list) -> Measured:
        (first, *_), *_ = sites
        calls = [max(runs.calls.values()) for _, runs, *_ in sites]
        sent = [n * site.before / SIZES[site.dtype] for (site, *_), n in zip(sites, calls)]
        mean = lambda values: float(np.average(values, weights=sent, axis=0))
        options = []
        for n, name in enumerate(self.measuring.codecs):
            if all(_fewer_bytes(name, site) for site, *_ in sites):
                options.append(Option(name, as_codec(name).bits, mean([errors[n] for _, _, errors, *_ in sites])))
        options.append(Option(EXACT, mean([8 * SIZES[site.dtype] for site, *_ in sites]), 0.0))
        return Measured(
            axis="+".join(first.axes), operation=first.operation, direction=first.direction, op_name=first.op_name,
            elements=max(int(np.prod(site.shape)) for site, *_ in sites), calls=sum(calls), sent=sum(sent),
            kurtosis=mean([kurtosis for *_, kurtosis, _ in sites]), options=tuple(options),
            messages=frozenset().union(*(message for *_, message in sites)),
        )  # fmt: skip

    def rows(self) -> list[Measured]:
        """`measured` with the codec of each under the budget.

        Raises:
          DropInError: nothing was measured; why, in one line. ConfigError: no choice keeps the budget.
        """
        rows = self.measured()
        if not rows:
            raise DropInError(f"nothing was measured: {self._why_nothing()}")
        # What can only travel exactly is not what the average is of.
        groups = _of_one_message([row for row in rows if len(row.options) > 1])
        chosen = allocate(self.budget, [(sum(row.sent for row in group), _common(group)) for group in groups])
        codecs = {id(row): option.codec for group, option in zip(groups, chosen) for row in group}
        of = lambda row: next(o for o in row.options if o.codec == codecs.get(id(row), EXACT))
        return [dataclasses.replace(row, chosen=of(row)) for row in rows]

    def _lost(self) -> str | None:
        """Why samples were lost, None where none were."""
        return next(iter(host_calls.problems()[self._problems :]), None)

    def _why_nothing(self) -> str:
        if (problem := self._lost() or self._report.problem) is not None:
            return problem
        sites = self._report.sites
        if any(not site.reason for site in sites):
            return "no program with collectives that can be compressed has run, or their values were zero or not finite"
        if sites and all(site.reason == NOT_MEASURED for site in sites):
            axes = sorted({"+".join(site.axes) for site in sites if site.axes})
            return f"{NOT_MEASURED}; the axes are {', '.join(axes)}"
        return self._report.reasons(None) if sites else self._report.why_nothing()

    def plan(self, command: str = "taco_jax.calibrated") -> PlanFile:
        """The plan file: one line for each row of the table. command: how it came about. Raises what `rows` raises."""
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        made = {
            "command": command, "taco_jax": taco_jax.__version__, "date": date, "budget": str(self.budget),
            "data": f"the program's own values on {jax.local_device_count()} of {jax.device_count()} devices, "
                    f"{self.steps} runs of each program",
        }  # fmt: skip
        return PlanFile(made=made, collectives=tuple(row.line() for row in self.rows()))

    def write(self, path: str | os.PathLike, command: str = "taco_jax.calibrated") -> None:
        """Writes the plan file, in the first of several processes alone. Raises what `rows` raises; ConfigError for a
        path that cannot be written."""
        plan = self.plan(command)
        if jax.process_index() == 0:
            plan_file.write(plan, path)

    def __str__(self) -> str:
        """The table. Raises what `rows` raises."""
        rows, codecs = self.rows(), self.measuring.codecs
        lines = [
            f"{'elements':>12} {'calls':>7} {'share':>6}  {'codec':<8} {'bits':>6} {'SNR dB':>6} {'kurtosis':>8}  "
            + " ".join(f"{name:>6}" for name in codecs)
            + f"  {'axis':<10} {'direction':<9} operation, op_name"
        ]
        total = sum(row.sent for row in rows)
        for row in rows:
            by_codec = {option.codec: option for option in row.options}
            name = "exact" if row.chosen.codec == EXACT else row.chosen.codec
            snr = lambda option: f"{option.snr:6.1f}" if option is not None and option.error else f"{'-':>6}"
            lines.append(
                f"{row.elements:12,} {row.calls:7,} {row.sent / total:6.1%}  {name:<8} {row.chosen.bits:6.3f} "
                f"{snr(row.chosen)} {row.kurtosis:8.2f}  "
                + " ".join(f"{snr(by_codec.get(codec)):>{max(6, len(codec))}}" for codec in codecs)
                + f"  {row.axis:<10} {row.direction:<9} {row.operation} {row.op_name}"
            )
        left: dict[str, set[str]] = defaultdict(set)
        for site in self._report.sites:
            if site.reason:
                left[site.reason].add(f"{site.operation} {site.op_name}")
        for reason, names in sorted(left.items()):
            first, *others = sorted(names)
            lines.append(f"not measured: {first}{f' and {len(others)} more' if others else ''} ({reason})")
        bits = sum(row.sent * row.chosen.bits for row in rows) / total
        exact = sum(row.sent * row.options[-1].bits for row in rows) / total
        error = sum(row.sent * row.chosen.error for row in rows) / total
        lines.append(
            f"{bits:.3f} bits an element on average (budget: {self.budget}), {exact / bits:.2f} times fewer than exact"
            f"; mean SNR {snr_of(error):.1f} dB; {jax.local_device_count()} of {jax.device_count()} devices measured"
        )
        if (problem := self._lost()) is not None:
            lines.append(f"some runs were lost: {problem}")
        return "\n".join(lines)


def _of_one_message(rows: Sequence[Measured]) -> list[list[Measured]]:
    """The rows in groups that share messages, in order."""
    groups: list[list[Measured]] = []
    for row in rows:
        shared = [group for group in groups if any(row.messages & other.messages for other in group)]
        groups = [group for group in groups if group not in shared]
        groups.append([*itertools.chain(*shared), row])
    return groups


def _common(rows: Sequence[Measured]) -> list[Option]:
    """The options that all of these rows have, with the mean of their errors."""
    weights = [row.sent for row in rows]
    found = []
    for option in rows[0].options:
        same = [o for row in rows for o in row.options if o.codec == option.codec]
        if len(same) == len(rows):
            bits, error = (
                float(np.average([getattr(o, key) for o in same], weights=weights)) for key in ("bits", "error")
            )
            found.append(option._replace(bits=bits, error=error))
    return found


def _fewer_bytes(codec: str, site: Site) -> bool:
    """Returns whether a codec, with its padding, sends fewer bytes than the exact collective."""
    elements = int(np.prod(site.shape))
    messages = 1 if site.operation in ("collective_permute", "all_gather") else site.ranks
    wire = messages * as_codec(codec).wire_bytes(-(-elements // messages))
    return wire < elements * SIZES[site.dtype]


def measuring_of(
    codecs: Sequence[str] = CODECS, axes: Sequence[str] | None = None, min_bytes: int | None = None
) -> Measuring:
    """Returns the `Measuring` of names. Raises ConfigError in one line for what cannot be."""
    for n, name in enumerate(codecs):
        try:
            (rule,) = parse_plan({"axis": {"*": name}}, min_bytes).rules
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error).replace("plan: axis: ", "codecs: ")) from None
        if rule.compression is None or as_codec(name).exact or as_codec(name).per_token:
            why = "has one scale a token, which arrays do not show" if as_codec(name).per_token else "sends exactly"
            raise ConfigError(f"codecs: {name!r}: {why}; take such as {', '.join(CODECS)}")
        if name in codecs[:n]:
            raise ConfigError(f"codecs: {name!r}: is given twice; name each once")
    if not codecs:
        raise ConfigError(f"codecs: names none; take such as {', '.join(CODECS)}")
    named = None if axes is None else tuple(map(parse_measured_axes, axes))
    if named == ():
        raise ConfigError("axes: names none; must be mesh axes, such as tensor; leave it out for all")
    return Measuring(tuple(codecs), named, min_bytes)


def checked(
    *, bits: float | None = None, snr: float | None = None, steps: int = STEPS, axes: Sequence[str] | None = None,
    codecs: Sequence[str] = CODECS, min_bytes: int | None = None,
) -> tuple[Measuring, Budget, int]:  # fmt: skip
    """Returns the arguments of `Calibration`. Arguments and errors are those of `calibrated`."""
    budget, measuring = Budget(bits, snr), measuring_of(codecs, axes, min_bytes)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"steps={steps!r}: must be an integer of 1 or more")
    budget.check({name: as_codec(name).bits for name in codecs})
    return measuring, budget, steps


@contextlib.contextmanager
def calibrated(
    path: str | os.PathLike, *, bits: float | None = None, snr: float | None = None, steps: int = STEPS,
    axes: Sequence[str] | None = None, codecs: Sequence[str] = CODECS, min_bytes: int | None = None,
) -> Iterator[Calibration]:  # fmt: skip
    """Measures the collectives of all programs that are compiled inside the block, and writes a plan file at its end.

        with taco_jax.calibrated("plan.json", bits=4.5) as calibration:
            state, metrics = train_step(state, batch)  # anybody's jitted step
        print(calibration)

    The programs' results are the exact ones. It is in force in all threads.

    Args:
      path: the file, taken by `taco_jax.compressed`.
      bits: the average over the elements that are sent, for which errors are made least. Without `snr`: 4.5.
      snr: dB that each collective reaches with the fewest bits.
      steps: runs of each program that are measured. Later runs are counted, and are as slow.
      axes: those that are measured, such as ["tensor", "fsdp/all_gather"]; None: all, but gathers of the program's own
        arguments (weights).
      codecs: those that are tried.
      min_bytes: smaller collectives are left out. None: as tuned for codec, ranks and link; 0 on the emulator.

    Raises:
      ConfigError: arguments that cannot be, or a budget that nothing meets. In one line.
      DropInError: at the end of the block, where nothing was measured. In one line.
      MissingHookError: this jax cannot hand programs over. In one line.
    """
    if not plan_file.is_plan_path(os.fspath(path)):
        raise ConfigError(f"path={os.fspath(path)!r}: must end with .json, as of a plan's file, such as plan.json")
    arguments = checked(bits=bits, snr=snr, steps=steps, axes=axes, codecs=codecs, min_bytes=min_bytes)
    check_writable("path", path)
    calibration = Calibration(*arguments)
    try:
        yield calibration
    finally:
        calibration.stop()
    calibration.write(path)
