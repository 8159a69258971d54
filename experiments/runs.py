"""Shared by the studies: check their arguments, run the trainer in a process of its own, say how a table was made.

Their main functions run under `taco_jax.cli.run`: a ConfigError is one line on stderr and exit code 2.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from taco_jax.codec import CODECS
from taco_jax.config import ConfigError, nearest

TRAINER = ("-m", "taco_jax.train")


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

    Raises RuntimeError with the end of the trainer's errors if it fails, subprocess.TimeoutExpired.
    """
    command = [sys.executable, *program, "--config", config, "--workdir", str(workdir), *flags]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(env or {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    print(done.stdout[-1000:], flush=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-3000:]}")
    return read(workdir / "metrics.jsonl")


def read(metrics: Path) -> list[dict]:
    """The records of a metrics.jsonl."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def keep(workdir: Path, kept: Path, every: int = 1) -> None:
    """Copies a run's metrics to their place, whole or not at all: of every so many steps, and of those that measured
    more than the others."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    usual = set(json.loads(lines[0]))
    part = kept.with_suffix(".part")
    part.write_text("".join(line for i, line in enumerate(lines) if i % every == 0 or set(json.loads(line)) > usual))
    part.replace(kept)


def require(holds, key: str, value, rule: str) -> None:
    """Raises ConfigError unless `holds`."""
    if not holds:
        raise ConfigError(f"{key}={value}: {rule}")


def choices(key: str, text: str, known: Iterable[str]) -> list[str]:
    """The names of a comma-separated list, each of them known."""
    known, names = list(known), text.split(",")
    for name in names:
        require(name in known, key, repr(name), nearest(name, known) if name else "name at least one")
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
