"""Where a program's time on GPUs goes: kernels by kind, and how long a device waits for messages alone.

Reads what `jax.profiler` has traced. A kind's time is that in which one of its kernels runs; `alone` is the part of it
in which no kernel of another kind runs on that device. Milliseconds are of one step, the mean over devices. Kernels of
NCCL also run while they wait for the other rank. XLA launches kernels one by one while they are traced, without CUDA
graphs, so that there is more idle time than otherwise.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

# The first that fits. Names: NCCL's device kernels, Mosaic GPU's and the Triton kernels of this package, cuBLAS, XLA.
KINDS = {
    "sum in one NVLink kernel": r"nvlink.*mosaic_gpu",
    "all-reduce": r"nccl.*AllReduce|all_reduce_kernel",
    "reduce-scatter": r"nccl.*ReduceScatter",
    "all-gather": r"nccl.*AllGather",
    "send and receive": r"nccl.*(SendRecv|AlltoAll)",
    "other NCCL": r"nccl",
    "codec": r"mosaic_gpu|(encode|reduce|decode)_(tiles|wires?|kernel)",
    "matrix product": r"gemm|nvjet|cutlass|cublas|xmma|cudnn",
    "copy": r"memcpy|memset|copy|transpose",
}
OTHER = "other"
MESSAGES = ("sum in one NVLink kernel", "all-reduce", "reduce-scatter", "all-gather", "send and receive", "other NCCL")


class Event(NamedTuple):
    """A kernel or a copy on one device, in nanoseconds. stream: the CUDA stream's name as the profiler has it."""

    device: str
    name: str
    start: float
    end: float
    stream: str = ""


@dataclasses.dataclass
class Times:
    """Milliseconds of one step.

    Attributes:
      kinds: {kind: (time, time alone)}.
      window: from the first kernel's start to the last one's end; idle: the part of it in which nothing runs.
      messages_alone: in which nothing runs but messages. messages_hidden: in which messages run beside others.
      kernels: {name: (calls, time)}, the longest first.
    """

    window: float
    idle: float
    messages_alone: float
    messages_hidden: float
    kinds: dict[str, tuple[float, float]]
    kernels: dict[str, tuple[float, float]]


def kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def events(profile) -> list[Event]:
    """Kernels and copies of all GPUs in a `jax.profiler.ProfileData`: those of its lines that are CUDA streams."""
    return [
        Event(plane.name, event.name, event.start_ns, event.end_ns, line.name)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def times(found: Sequence[Event], steps: int) -> Times | None:
    """The mean over devices, None where no device has run a kernel."""
    devices: dict[str, list[Event]] = {}
    for event in found:
        devices.setdefault(event.device, []).append(event)
    if not devices:
        return None
    each = [_of_device(own) for own in devices.values()]
    scale = 1e-6 / steps / len(each)
    total = lambda name: scale * sum(getattr(t, name) for t in each)
    return Times(
        *map(total, ("window", "idle", "messages_alone", "messages_hidden")),
        _sums((t.kinds for t in each), scale, scale),
        _sums((t.kernels for t in each), 1 / steps / len(each), scale),
    )


def _sums(of_devices: Iterable[dict], first: float, second: float) -> dict[str, tuple[float, float]]:
    summed: dict[str, list[float]] = {}
    for pairs in of_devices:
        for name, (a, b) in pairs.items():
            row = summed.setdefault(name, [0.0, 0.0])
            row[0] += first * a
            row[1] += second * b
    return {name: (a, b) for name, (a, b) in sorted(summed.items(), key=lambda item: -item[1][1])}


def _of_device(found: Sequence[Event]) -> Times:
    """Nanoseconds of all steps."""
    changes = sorted((at, way, kind(e.name)) for e in found for at, way in ((e.start, 1), (e.end, -1)))
    running: dict[str, int] = {}
    result = Times(changes[-1][0] - changes[0][0], 0.0, 0.0, 0.0, {}, {})
    before = changes[0][0]
    for at, way, of_kind in changes:
        active, length = [k for k, n in running.items() if n], at - before
        for k in active:
            whole, alone = result.kinds.get(k, (0.0, 0.0))
            result.kinds[k] = (whole + length, alone + length * (len(active) == 1))
        sent = [k for k in active if k in MESSAGES]
        if not active:
            result.idle += length
        elif len(sent) == len(active):
            result.messages_alone += length
        elif sent:
            result.messages_hidden += length
        running[of_kind] = running.get(of_kind, 0) + way
        before = at
    for event in found:
        calls, length = result.kernels.get(event.name, (0, 0.0))
        result.kernels[event.name] = (calls + 1, length + event.end - event.start)
    return result


def traced(run: Callable[[], None], steps: int, listing: Path | None = None) -> Times | None:
    """The times of `run`, which takes so many steps and waits for them. listing: a file for the kernels in order."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = options.host_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        with contextlib.ExitStack() as stack:
            stack.callback(jax.profiler.stop_trace)
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = events(jax.profiler.ProfileData.from_file(str(file)))
        if listing is not None:
            write_listing(found, listing)
        return times(found, steps)


def write_listing(found: Sequence[Event], file: Path) -> None:
    """Writes CSV: every kernel of every device in the order of its start, microseconds from the first one's."""
    first = min((event.start for event in found), default=0.0)
    with file.open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(("device", "stream", "start_us", "length_us", "kernel"))
        for event in sorted(found, key=lambda event: (event.device, event.start)):
            at, length = (f"{1e-3 * t:.3f}" for t in (event.start - first, event.end - event.start))
            rows.writerow((event.device, event.stream, at, length, event.name))


def table(variants: dict[str, Times | None], longest: int = 12) -> list[str]:
    """Kinds by variant, then the longest kernels of each variant."""
    found = {name: t for name, t in variants.items() if t is not None}
    if not found:
        return ["No GPU has run a kernel while it was traced."]
    lines = ["| ms of one step (alone) | " + " | ".join(found) + " |", "|---" * (1 + len(found)) + "|"]
    for name in (*KINDS, OTHER):
        cells = [t.kinds.get(name) for t in found.values()]
        if any(cells):
            shown = [f"{cell[0]:.1f} ({cell[1]:.1f})" if cell else "" for cell in cells]
            lines.append(f"| {name} | " + " | ".join(shown) + " |")
    for label, field in (
        ("messages, and nothing else", "messages_alone"),
        ("messages beside others", "messages_hidden"),
        ("idle", "idle"),
        ("all", "window"),
    ):
        lines.append(f"| {label} | " + " | ".join(f"{getattr(t, field):.1f}" for t in found.values()) + " |")
    for variant, t in found.items():
        lines += ["", f"| kernel, {variant} | calls | ms | kind |", "|---" * 4 + "|"]
        for name, (calls, ms) in list(t.kernels.items())[:longest]:
            lines.append(f"| `{name[:90]}` | {calls:g} | {ms:.2f} | {kind(name)} |")
    return lines
