"""The folder of a run: `config.json`, `metrics.jsonl`, `loss.png`, `checkpoints/`. Nothing in it is ever overwritten.

An existing workdir is resumed if its model is the same. What a run from an earlier step would replace is set aside
under another name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from taco_jax.config import ConfigError, TrainConfig, flatten, to_dict

CONFIG, METRICS, PLOT, CHECKPOINTS = "config.json", "metrics.jsonl", "loss.png", "checkpoints"
# What one resumed run may change without a word: how it is run, not what it computes.
_UNREMARKABLE = (
    "stop_after",
    "workdir",
    "devices",
    "distributed",
    "heartbeat_timeout",
    "dry_run",
    "gpu_memory_gb",
    "checkpoint.",
    "metrics.",
    "data.prefetch",
)


def open_workdir(config: TrainConfig) -> list[str]:
    """Creates the workdir, or checks that it can be resumed. Returns remarks: settings that differ from its first run.

    Raises ConfigError if the path is not a workdir of ours, cannot be written or holds another model; the message names
    the fields.
    """
    try:
        return _open(config)
    except OSError as error:
        raise ConfigError(
            f"workdir={config.workdir}: cannot be used ({error.strerror}: {error.filename}); use another --workdir"
        ) from None


def _open(config: TrainConfig) -> list[str]:
    folder = Path(config.workdir)
    path = folder / CONFIG
    now = to_dict(config)
    if path.exists():
        # Now, and not at the first save.
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
        changed = _changed(_read(path), now)
        model = [text for key, text in changed.items() if key.startswith("model.")]
        if model:
            raise ConfigError(
                f"workdir={config.workdir}: holds another model ({', '.join(model)}); use the same model or "
                f"another --workdir"
            )
        return [text for key, text in changed.items() if not key.startswith(_UNREMARKABLE)]
    if folder.exists() and (not folder.is_dir() or any(not p.name.startswith(".") for p in folder.iterdir())):
        raise ConfigError(
            f"workdir={config.workdir}: exists but holds no {CONFIG}, so it is no run of this program; "
            f"use an empty folder or another --workdir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(now, indent=2) + "\n")
    return []


def _read(path: Path) -> dict:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: corrupt ({error}); restore it or use another --workdir") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: corrupt (no config); restore it or use another --workdir")
    return config


def _changed(old: dict, new: dict) -> dict[str, str]:
    """{key: "key old -> new"} of the fields that differ; fields that only one side has count as different."""
    before, after = flatten(old), flatten(new)
    missing = "(absent)"
    return {
        key: f"{key} {before.get(key, missing)} -> {after.get(key, missing)}"
        for key in {**before, **after}
        if before.get(key, missing) != after.get(key, missing)
    }


def set_aside(path: Path) -> Path:
    """Renames `path` to `path.aside-N` with the first free N; returns the new path."""
    n = 1
    while (target := path.with_name(f"{path.name}.aside-{n}")).exists():
        n += 1
    return path.rename(target)


def write_text(path: Path, text: str) -> None:
    """Writes a whole file or nothing: a killed process leaves the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
