"""Measurements that a run makes of itself: throughput, model FLOP/s, memory, and the records of `metrics.jsonl`.

A record is one step: {"step", "loss", "grad_norm", "learning_rate", "skipped", "tokens_per_second", "step_seconds",
"comm_bytes", "comm_bytes_bf16", "comm", "mfu", "peak_memory_bytes", "samples"}, with "validation_loss" and
"validation_perplexity" where the step was validated, "sites" where SNR was measured, and "guard", a list of
what `taco_jax.train.guarded.record` says of each event, where the guard decided something. Losses are nats per token,
times seconds, `comm_bytes` what one device sends per step as activation traffic over tp and pp and `comm_bytes_bf16`
the same messages as bf16. `comm` counts all messages, by axis: {"tp": {"bytes", "bytes_bf16"}, ...}. A value that is
not finite or not known is null. A step's time is that from the end of the step before it to its own, on the devices.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from taco_jax.config import ConfigError, TrainConfig, to_dict
from taco_jax.models.config import ModelConfig
from taco_jax.models.lora import Adapters
from taco_jax.train.workdir import METRICS, WANDB, set_aside, write_text

# Dense bf16 peak in FLOP/s by the start of jax's device_kind, from NVIDIA's data sheets (without sparsity). First
# match wins.
BF16_PEAK = (
    ("NVIDIA GB200", 2.5e15),
    ("NVIDIA B200", 2.25e15),
    ("NVIDIA H200 NVL", 835e12),
    ("NVIDIA H200", 989.4e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100", 989.4e12),
    ("NVIDIA H20", 148e12),
    ("NVIDIA GH200", 989.4e12),
    ("NVIDIA A100", 312e12),
    ("NVIDIA A800", 312e12),
    ("NVIDIA A40", 149.7e12),
    ("NVIDIA A30", 165e12),
    ("NVIDIA A10G", 70e12),
    ("NVIDIA A10", 125e12),
    ("NVIDIA L40S", 362e12),
    ("NVIDIA L40", 181e12),
    ("NVIDIA L4", 121e12),
)


def bf16_peak(device_kind: str) -> float | None:
    """The dense bf16 peak of one device in FLOP/s; None for a device that the table does not know."""
    return next((peak for name, peak in BF16_PEAK if device_kind.startswith(name)), None)


def flops_per_token(model: ModelConfig, length: int, adapters: Adapters | None = None) -> float:
    """Model FLOPs of forward and backward per trained token: 6 per weight in a matrix product, 12 * L * heads *
    head_dim per layer for attention scores (not halved for causality, recomputation not counted), as in PaLM (arXiv
    2204.02311, appendix B). The embedding lookup is no product; the output head is, tied or not. In layers with a
    sliding window, L is at most the window. Ends of documents are not counted: whole sequences are computed. With
    adapters 4 per weight of the model, which has no gradient of its own, and 6 per weight of an adapter."""
    query, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    layer = model.d_model * (2 * query + 2 * kv + (3 if model.gated_mlp else 2) * model.d_mlp)
    weights = model.n_layers * layer + model.vocab_size * model.d_model
    kinds = model.windows if isinstance(model.windows, tuple) else (model.windows,) * model.n_layers
    seen = sum(min(length, model.sliding_window) if slides else length for slides in kinds)
    products = 6 * weights if adapters is None else 4 * weights + 6 * adapters.count(model)
    return products + 12 * seen * query


def peak_memory(devices: Any) -> int | None:
    """Most bytes in use so far on any one of this process' devices; for emulated ones on the CPU, of the process."""
    if devices[0].platform == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((p for p in peaks if p is not None), default=None)


def step_line(record: dict[str, Any], steps: int, eta_seconds: float | None) -> str:
    """The line that is printed for a record."""
    comm = [
        f"{axis} {sent['bytes'] / 1e6:.1f} MB ({sent['bytes_bf16'] / sent['bytes']:.2f}x)"
        for axis, sent in record["comm"].items()
        if axis != "several"
    ]
    parts = [
        f"step {record['step']:>{len(str(steps))}}/{steps}",
        f"loss {_number(record['loss'], '.4f')}",
        f"grad {_number(record['grad_norm'], '.3f')}",
        f"{_number(record['tokens_per_second'], ',.0f')} tok/s",
        f"{_number(record['step_seconds'] and record['step_seconds'] * 1e3, ',.0f')} ms",
        f"comm {', '.join(comm) or 'none'}",
        f"mfu {_number(record['mfu'], '.1%')}",
        f"mem {_number(record['peak_memory_bytes'] and record['peak_memory_bytes'] / 1e9, '.1f')} GB",
        f"eta {duration(eta_seconds)}",
    ]
    if record["skipped"]:
        parts.append("SKIPPED: not finite, parameters unchanged")
    return "  ".join(parts)


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "n/a"
    # A loss that ran away would fill the line with digits.
    return format(value, form if abs(value) < 1e9 else ".3g")


def duration(seconds: float | None) -> str:
    """1:02:03 or 2:03; n/a for None."""
    if seconds is None:
        return "n/a"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def finite(value: Any) -> Any:
    """Python numbers for arrays, None for what is not finite, through dicts and lists: what strict JSON can hold."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


class Recorder:
    """Appends records to `metrics.jsonl` and passes them on to TensorBoard and Weights & Biases where asked.

    A run that goes on from `step` keeps the records up to there and drops later ones, which it is about to make again;
    `keep_later` keeps a copy of the old file, and so does a start at step 0 over existing records. None appends to
    whatever is there. With `active=False` (all processes but the first) nothing is written.
    """

    def __init__(self, config: TrainConfig, step: int | None, *, keep_later: bool = False, active: bool = True):
        self.path = Path(config.workdir) / METRICS
        self.remarks: list[str] = []
        self._trackers: list[Tracker] = []
        self._file = None
        if not active:
            return
        old = self.path.is_file() and self.path.stat().st_size > 0
        self._trackers = _trackers(config, again=old and (step == 0 or keep_later))
        if self.path.is_dir():
            raise ConfigError(f"{self.path}: is a folder, and records need a file of that name; move it away")
        if self.path.exists() and self.path.stat().st_size:
            records = read_records(self.path)
            if step == 0 or keep_later:
                self.remarks.append(f"metrics of later steps are kept in {set_aside(self.path)}")
            if step is not None:
                kept = [r for r in records if r["step"] <= step]
                write_text(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        self._file = self.path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        record = finite(record)
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.log(_scalars(record), record["step"])

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what cannot be written was said when it was written first
                self._file.close()
        for tracker in self._trackers:
            tracker.close()


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics file in order, one per step: a step that is there twice counts once, the last time.

    A last line that was cut off when its process was killed is left out; any other broken line raises ConfigError.
    """
    path = Path(path)
    lines = path.read_text(errors="replace").split("\n")
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError(f"step {record['step']!r} is not an integer")
            records[record["step"]] = record
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"{path} line {number}: not a record of a step ({error})") from None
    return [records[step] for step in sorted(records)]


class Tracker(NamedTuple):
    """Where numbers of a step go beside the records."""

    log: Callable[[dict[str, float], int], None]
    close: Callable[[], None]


def _trackers(config: TrainConfig, again: bool) -> list[Tracker]:
    """again: the run begins again, at the start or at an earlier checkpoint than the latest."""
    name = config.metrics.run_name or Path(config.workdir).resolve().name or "run"
    made = {_tensorboard: config.metrics.tensorboard, _wandb: config.metrics.wandb}
    return [make(config, name, again) for make, wanted in made.items() if wanted]


def _tensorboard(config: TrainConfig, name: str, again: bool) -> Tracker:
    """Event files in WORKDIR/tensorboard/NAME: TensorBoard calls a run by its folder."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ConfigError(
            "metrics.tensorboard=True: the package tensorboardX is missing; pip install 'taco-jax[tensorboard]'"
        ) from None
    writer = SummaryWriter(str(Path(config.workdir) / "tensorboard" / name))

    def log(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return Tracker(log, writer.close)


def _wandb(config: TrainConfig, name: str, again: bool) -> Tracker:
    """A run in Weights & Biases, whose id the workdir keeps: a resumed run goes on as the same one there.

    Weights & Biases takes no step twice: one that goes back to an earlier checkpoint is a run of its own there.
    """
    try:
        import wandb
    except ImportError:
        raise ConfigError("metrics.wandb=True: the package wandb is missing; pip install 'taco-jax[wandb]'") from None
    path = Path(config.workdir) / WANDB
    if again and path.exists():
        set_aside(path)
    known = path.read_text().strip() if path.is_file() else ""
    which = {"id": known, "resume": "allow"} if known else {}
    run = wandb.init(project="taco-jax", name=name, dir=config.workdir, config=to_dict(config), **which)
    if not known:
        write_text(path, f"{run.id}\n")
    return Tracker(lambda values, step: run.log(values, step=step), run.finish)


def _scalars(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            flat[f"{prefix}{key}"] = value
    return flat
