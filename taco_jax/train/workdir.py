"""The folder of a run: `config.json`, `metrics.jsonl`, `loss.png`, `checkpoints/`, where asked for `profile/` and
`tensorboard/`. Nothing in it is ever overwritten.

An existing workdir is resumed if its model is the same. What a run from an earlier step would replace is set aside
under another name. One run at a time works in it: it holds a lock on the file `.lock`, which ends with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from taco_jax.config import ConfigError, TrainConfig, flatten, to_dict

CONFIG, METRICS, PLOT, CHECKPOINTS = "config.json", "metrics.jsonl", "loss.png", "checkpoints"
PROFILE, WANDB = "profile", "wandb_run"
BASE = "base"
LOCK = ".lock"
# What one resumed run may change without a word: how it is run, not what it computes.
_UNREMARKABLE = (
    "stop_after",
    "workdir",
    "devices",
    "distributed",
    "heartbeat_timeout",
    "dry_run",
    "gpu_memory_gb",
    "log_file",
    "profile",
    "checkpoint.",
    "metrics.",
    "data.prefetch",
)


@contextlib.contextmanager
def locked(workdir: str | Path) -> Iterator[list[str]]:
    """Holds `workdir`, which exists, against other runs. Yields remarks: that its file system has no locks.

    The kernel keeps the lock, for this host or for all that mount a network file system, and drops it when the process
    ends, however it ends. Raises ConfigError, naming the holder, where another run has it.
    """
    path = Path(workdir) / LOCK
    remarks = []
    try:
        # Neither emptied nor removed by those who do not hold it, nor by the holder: a removed file can be held twice.
        file = path.open("a+")
    except OSError as error:
        raise ConfigError(f"workdir={workdir}: cannot be written ({error.strerror}: {path})") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "a process that has not said which"
            raise ConfigError(
                f"workdir={workdir}: another run is working in it ({holder}); wait for its end, stop it, or use "
                f"another --workdir"
            ) from None
        except OSError as error:
            remarks.append(f"{workdir} cannot be locked ({error.strerror}): start no second run in it")
        with contextlib.suppress(OSError):  # a full disk; the lock holds
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield remarks


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
        changed = _changed(read_config(path), now)
        model = [text for key, text in changed.items() if key.startswith(("model.", "lora."))]
        if model:
            source = read_config(path).get("init_from")
            again = f" (--init-from {source} again)" if source is not None and config.init_from is None else ""
            raise ConfigError(
                f"workdir={config.workdir}: holds another model ({', '.join(model)}); use the same model{again} or "
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


def read_config(path: Path) -> dict:
    """The settings in a run's config.json, as nested dicts. Raises ConfigError for a file that holds none."""
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: corrupt ({error}); restore it or use another --workdir") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: corrupt (no config); restore it or use another --workdir")
    if not isinstance(config.get("model"), dict):
        raise ConfigError(
            f"workdir={path.parent}: its {CONFIG} is not that of a run, but a model's perhaps; use an empty folder or "
            f"another --workdir"
        )
    return config


def _changed(old: dict, new: dict) -> dict[str, str]:
    """{key: "key old -> new"} of the fields that differ.

    A field that `old` lacks, which an earlier version wrote, has its default: a new field changes nothing by itself. A
    field that `new` lacks counts as different.
    """
    before, after = flatten(to_dict(TrainConfig())) | flatten(old), flatten(new)
    missing = "(absent)"
    return {
        key: f"{key} {_short(before.get(key, missing))} -> {_short(after.get(key, missing))}"
        for key in {**before, **after}
        if before.get(key, missing) != after.get(key, missing)
    }


def _short(value: object) -> str:
    """A value in a remark. Of a plan's file, which is long, its name and a digest of what it says."""
    if isinstance(value, dict):
        digest = lambda text: f"{text[:40]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
        value = {k: digest(v) if isinstance(v, str) and len(v) > 200 else v for k, v in value.items()}
    return str(value)


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
