"""Shared by the studies: run the trainer in a process of its own, and say where and how a table was made."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TRAINER = ("-m", "taco_jax.train")


def train(
    config: str,
    workdir: Path,
    flags: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 3600,
    program: Sequence[str] = TRAINER,
) -> list[dict]:
    """Trains `config` with `flags` in `workdir` and returns its metrics, one record a step.

    Raises RuntimeError with the end of the trainer's errors if it fails.
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
