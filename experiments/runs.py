"""Shared by the studies: check their arguments, run the trainer in a process of its own, say how a table was made.

Their main functions run under `taco_jax.config.cli.run`: a ConfigError is one line on stderr and exit code 2.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from taco_jax.codec import CODECS
from taco_jax.compression import dispatch
from taco_jax.config import ConfigError, TrainConfig, cli
from taco_jax.config.checks import check
from taco_jax.errors import did_you_mean
from taco_jax.train.metrics import read_records
from taco_jax.train.workdir import METRICS

# Presets that GPU kernels encode.
WITH_KERNELS = [name for name, codec in CODECS.items() if not (codec.exact or dispatch.without_format(codec))]
TRAINER = ("-m", "taco_jax.train")
# A study says which run failed, and goes on with the others.
FAILURES = (RuntimeError, subprocess.TimeoutExpired)
NUMBERS = ("tokens_per_second", "step_seconds", "comm_bytes", "comm_bytes_bf16")  # that tables take from each record
LONGEST = 2e6  # seconds: subprocess can wait for no more than 2^31 ms
# Flags that no study hands on to the trainer, and why. The trainer takes the last of two values: what a study means to
# vary would be the same in all of its runs, under another name in its table.
NOT_HANDED_ON = {
    "config": "the study names the experiment itself",
    "workdir": "each run has an empty folder of its own",
    "checkpoint.resume-step": "each run starts at its first step",
    "dry-run": "trains nothing, so there is nothing to compare; give it to python -m taco_jax.train",
    "compression.forward": "the codecs are those of --codecs",
    "compression.backward": "the codecs are those of --codecs, a pair as forward:backward",
    "compression.plan": "it would hold for every codec of --codecs, none too",
}


def train(
    config: str,
    workdir: Path,
    flags: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    program: Sequence[str] = TRAINER,
) -> list[dict]:
    """Trains `config` with `flags` in `workdir` and returns its metrics, one record a step.

    timeout: seconds, None for no limit. The environment is handed on, JAX_COMPILATION_CACHE_DIR with it.

    Raises FAILURES: RuntimeError with the end of the trainer's errors, or if it left no metrics.
    """
    command = [sys.executable, *program, "--config", config, "--workdir", str(workdir), *flags]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(env or {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    print(done.stdout[-1000:], flush=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-3000:]}")
    metrics = workdir / METRICS
    records = read_records(metrics) if metrics.is_file() else []
    if not records:
        raise RuntimeError("left no metrics")
    return records


def make(config: str, kept: Path, flags: Sequence[str], *, timeout: float | None, every: int = 1) -> list[dict]:
    """Trains and keeps the metrics if the run came to a validation loss; returns them. Raises FAILURES."""
    with tempfile.TemporaryDirectory() as folder:
        records = train(config, Path(folder) / "run", flags, timeout=timeout)
    if not is_number(records[-1].get("validation_loss")):
        raise RuntimeError(f"no validation loss at its last step, {records[-1]['step']}: not kept")
    keep(records, kept, every)
    return records


def experiment(
    config: str, flags: Sequence[str], own: Mapping[str, str], settings: Sequence[str] = (), *, validated: bool = True
) -> TrainConfig:
    """Returns what the trainer makes of a study's `settings` and the `flags` to be handed on, checked before any run.

    own: the flags that this study sets beside NOT_HANDED_ON, each with what to do instead.
    validated: the study compares validation losses.

    Raises ConfigError for one of those flags in any spelling (a_b, a-b, flag=value, no-flag), and as the trainer does.
    """
    refused = NOT_HANDED_ON | own
    for i, flag in enumerate(flags):
        if flag.startswith("--"):
            group, dot, last = flag[2:].split("=")[0].replace("_", "-").rpartition(".")
            for name in (group + dot + last, group + dot + last.removeprefix("no-")):
                if name in refused:
                    value = [v for v in flags[i + 1 : i + 2] if not v.startswith("--")]
                    raise ConfigError(f"{' '.join([flag, *value])}: no flag for a study's runs: {refused[name]}")
    parsed = check(cli.parse(["--config", config, *settings, *flags]))
    batches = parsed.evaluation.batches
    rule = "the study compares validation losses; leave it out, or take 1 batch or more"
    require(not validated or batches != 0, "evaluation.batches", batches, rule)
    return parsed


def read_kept(kept: Path) -> list[dict]:
    """The records of a run that an earlier study kept. Raises ConfigError if that is not what the file holds, whole."""
    again = "delete it, and the study makes its run again"
    try:
        whole = kept.read_text().endswith("\n")
        records = read_records(kept)
    except ConfigError as error:
        raise ConfigError(f"{error}; {again}") from None
    except OSError as error:
        raise ConfigError(f"{kept}: cannot be read as a run's metrics ({error.strerror}); {again}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{kept}: no run's metrics (byte {error.start} is no UTF-8); {again}") from None
    if not (whole and records):
        raise ConfigError(f"{kept}: is {'cut off' if records else 'empty'}; {again}")
    for record in records:
        missing = [key for key in NUMBERS if not is_number(record.get(key))]
        require(not missing, f"{kept}, step {record['step']}", ", ".join(missing), f"no number; {again}")
    loss = records[-1].get("validation_loss")
    require(is_number(loss), f"{kept}, step {records[-1]['step']}: validation_loss", loss, f"no number; {again}")
    return records


def is_number(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def keep(records: Sequence[dict], kept: Path, every: int = 1) -> None:
    """Writes a run's metrics to their place, whole or not at all: of every so many steps, and of those that measured
    more than the others."""
    usual = set(records[0])
    part = kept.with_suffix(".part")
    part.write_text("".join(json.dumps(r) + "\n" for i, r in enumerate(records) if i % every == 0 or set(r) > usual))
    part.replace(kept)


def require(holds, key: str, value, rule: str) -> None:
    """Raises ConfigError unless `holds`."""
    if not holds:
        raise ConfigError(f"{key}={value}: {rule}")


def packages(*names: str, install: str) -> None:
    """Raises ConfigError where a package is not installed, before a script works for nothing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    require(not missing, "packages", ", ".join(missing), f"not installed, and needed here: pip install {install}")


def limit(key: str, value: float | None) -> float | None:
    """A limit of time, None for none: infinity is none, and so is more than this machine can count to."""
    require(value is None or value > 0, key, value, "must be above 0; leave it out for no limit")
    return None if value is None or value > LONGEST else value


def choices(key: str, text: str, known: Iterable[str]) -> list[str]:
    """The names of a comma-separated list, each of them known."""
    known, names = list(known), text.split(",")
    for name in names:
        require(name in known, key, repr(name), did_you_mean(name, known) if name else "name at least one")
    return names


def codecs(text: str, *, pairs: bool = True, exact: bool = True, more: Iterable[str] = ()) -> list[str]:
    """--codecs: presets (`exact`: none is one too) or pairs "forward:backward", checked before anything runs."""
    known = [name for name, codec in CODECS.items() if exact or not codec.exact]
    names = text.split(",")
    for name in names:
        if pairs and ":" in name:
            for part in name.split(":", 1):
                choices("--codecs", part, known)
        else:
            choices("--codecs", name, [*known, *more])
    return names


def numbers(key: str, text: str, least: int) -> list[int]:
    """The integers of a comma-separated list, each at least `least`."""
    for number in text.split(","):
        good = number.strip().removeprefix("-").isdecimal() and int(number) >= least
        require(good, key, text, f"must be integers of at least {least}, separated by commas")
    return [int(number) for number in text.split(",")]


def codecs_with_kernels(text: str) -> list[str]:
    """--codecs: presets that GPU kernels encode."""
    names = codecs(text, pairs=False, exact=False)
    for name in names:
        reason = dispatch.without_format(CODECS[name])
        require(reason is None, "--codecs", name, f"{reason}; take {', '.join(WITH_KERNELS)}")
    return names


def write(out: Path, report: Sequence[str], results: dict) -> None:
    """Writes OUT/README.md, line by line, and OUT/summary.json."""
    (out / "README.md").write_text("\n".join(report) + "\n")
    (out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")


def folder(key: str, path: Path) -> Path:
    """Makes a folder for results."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}={path}: cannot be made ({error.strerror}); name a folder that can") from None
    return path


def file(key: str, path: Path, rule: str) -> Path:
    """A file that must be there."""
    require(path.is_file(), key, path, f"no such file; {rule}")
    return path


def codec_flags(codec: str) -> list[str]:
    """Flags of a codec name, or "forward:backward"."""
    forward, _, backward = codec.partition(":")
    return ["--compression.forward", forward, "--compression.backward", backward or forward]


def commit() -> str:
    """The commit that is checked out, with a mark where files differ from it; "unknown" without git."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


def hardware(flags: Sequence[str] = ()) -> str:
    """Devices and jax version. Asked in a process of its own, so that no device memory is taken here."""
    code = "import jax; d = jax.devices(); print(len(d), 'x', d[0].device_kind + ', jax', jax.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return f"{done.stdout.strip() or 'unknown'}, {os.cpu_count()} CPU cores"


def header(title: str, named_commit: str | None = None) -> list[str]:
    """The opening lines of a result: date, hardware, commit, command."""
    return [
        f"# {title}",
        "",
        f"* date: {datetime.date.today()}",
        f"* hardware: {hardware()}",
        f"* commit: {named_commit or commit()}",
        f"* command: `python {' '.join(sys.argv)}`",
        "",
    ]


def parser(description: str) -> cli.Parser:
    """For a study's arguments. Others are the trainer's: none may be taken for the start of one of the study's."""
    return cli.Parser(description=description)
