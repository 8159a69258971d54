"""Checkpoints: parameters, optimiser, site scales, data position and seed, written by Orbax while training goes on.

A checkpoint of step s is the state after s steps, in `WORKDIR/checkpoints/s`. It can be restored onto any mesh: arrays
are stored whole, and a vocabulary that is padded to another size is cut or filled up in its padding only. Its record
has a digest of every array (`taco_jax.train.digests`), which must be that of what is restored: what a disk or a copy
changed is named, and nothing goes on from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from taco_jax.config import CheckpointConfig, ConfigError
from taco_jax.train.digests import DIGESTS, record_of, take_damaged
from taco_jax.train.workdir import CONFIG, set_aside

# Parts of a state that a run can do without: what is stored is used where it fits.
_SCALES, _COPY = "scales", "copy"
# What the record has beside the run's own values and the arrays' digests: its own digest.
_RECORD = "record_digest"
# And whose it is: the digest of the settings that its workdir was made with.
_SETTINGS = "settings_digest"
# A file of Orbax' in every step's folder.
_TIMES = "_CHECKPOINT_METADATA"
# Why a file system takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used. Its message is one line. Exit code 2."""


class SaveError(RuntimeError):
    """A checkpoint that cannot be written. Its message is one line; those from before it are good. Exit code 1."""


@dataclasses.dataclass
class Kept:
    """Orbax' policy of what stays: the latest `latest` checkpoints (None: all), or, while `all` is set, every one."""

    latest: int | None
    all: bool = False

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        n = len(checkpoints)
        kept = n if self.all or self.latest is None else self.latest
        return [i >= n - kept for i in range(n)]


class Checkpoints:
    """The checkpoints of one workdir. Use as a context manager: leaving it waits for writes that are under way.

    way: how another step is asked for, in messages, "{}" in the place of its number.
    """

    def __init__(self, folder: str | Path, config: CheckpointConfig, way: str = "--checkpoint.resume-step {}"):
        self.folder = Path(folder).absolute()
        self._config, self._way = config, way
        self._failed, self._written, self._hook = False, None, None
        self._manager = self._open()

    def _open(self):
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: is a file, and checkpoints need a folder of that name; move it away")
        if self._config.enabled:
            self.folder.mkdir(parents=True, exist_ok=True)
        elif not self.folder.is_dir():
            return None
        # Imported where it is used: it takes seconds, and it says a lot through absl.
        import orbax.checkpoint as ocp

        # What fails is raised, too: its log is the same in hundreds of lines.
        for name in ("absl", "orbax"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._ocp = ocp
        # Which of them stay is decided when one is saved.
        self._kept = Kept(self._config.keep)
        if self._hook is None:
            self._hook, sys.unraisablehook = sys.unraisablehook, _without_stragglers(sys.unraisablehook)
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=True, **self._options())
        handlers = {
            "state": ocp.StandardCheckpointHandler(),
            _SCALES: ocp.StandardCheckpointHandler(),
            _COPY: ocp.StandardCheckpointHandler(),
            "run": ocp.JsonCheckpointHandler(),
        }
        try:
            return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        except Exception as error:  # it reads no more than this file of every step, which has times alone
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            raise CheckpointError(
                f"{self.folder}: cannot be read ({what}); a file {_TIMES} in it is damaged: delete those files, which "
                f"nothing needs"
            ) from error

    def _options(self) -> dict[str, Any]:
        """Returns options of Orbax' manager that not every reader has."""
        return {"preservation_policy": self._kept}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, *exception) -> None:
        if self._manager is None:
            return
        try:
            if self._failed:
                return
            with self._saving():
                self._manager.wait_until_finished()
                self._manager.close()
            if kind is None:
                sys.unraisablehook = self._hook
        except SaveError:
            # What the run failed of comes first.
            if kind is None:
                raise

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Turns what Orbax raises while it writes, or later of what it wrote meanwhile, into a SaveError."""
        try:
            yield
        except Exception as error:
            self._failed = True
            # Orbax says it in a chain of exceptions, with the sources' lines.
            text = " ".join(" ".join(str(e) for e in _chain(error)).split())
            full = next((os.strerror(code) for code in _FULL if os.strerror(code) in text), None)
            where = self.folder / str(self._written)
            complete = self._complete()
            way = f"goes on from step {complete[-1]}, the last complete one" if complete else "starts again"
            raise SaveError(
                f"checkpoint {where}: cannot be written ({full or f'{type(error).__name__}: {text[:200]}'}); with more "
                f"room the same command {way}"
            ) from error

    def _complete(self) -> list[int]:
        """Steps whose folders have their names: one that is not complete has another."""
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdigit())

    def steps(self) -> list[int]:
        """Steps that can be restored, ascending."""
        return sorted(self._manager.all_steps()) if self._manager is not None else []

    def save(
        self,
        step: int,
        state: Any,
        run: dict[str, Any],
        *,
        vocabulary: tuple[int, int] = (0, 0),
        in_place_of_older: bool = True,
    ) -> None:
        """Starts writing `state` (a dataclass pytree) and `run` (plain values: data position, seed) as checkpoint
        `step`.

        Returns when the arrays are copied to the host, so that the next step may donate them. Does nothing if
        checkpoints are switched off or `step` is there already.

        Args:
          vocabulary: its size, and that to which this mesh pads it, where dims of that size have what does not count.
          in_place_of_older: where that makes more than `checkpoint.keep` of them, the oldest are deleted.

        Raises:
          SaveError: this checkpoint or the one before it cannot be written.
        """
        if not self._config.enabled or step in self._manager.all_steps():
            return
        args, arrays = self._ocp.args, _fields(state)
        parts = {name: arrays.pop(name, None) for name in (_SCALES, _COPY)}
        named = _named({"state": arrays, **parts})
        record = {"step": step, **run} | record_of(named, *vocabulary)
        if (settings := self._settings()) is not None:
            record[_SETTINGS] = settings
        items = {"state": args.StandardSave(arrays), "run": args.JsonSave(record | {_RECORD: _json_digest(record)})}
        items |= {name: args.StandardSave(part) for name, part in parts.items() if jax.tree.leaves(part)}
        self._kept.all = not in_place_of_older
        with self._saving():
            self._manager.wait_until_finished()  # its error is of the step before
            self._written = step
            self._manager.save(step, args=args.Composite(**items), force=True)

    def choose(self, requested: int | None) -> int | None:
        """The step to resume from: `requested`, else the latest, else None; CheckpointError if it is absent."""
        present = self.steps()
        if requested is None:
            return present[-1] if present else None
        if requested not in present:
            there = f"present: {', '.join(map(str, present))}" if present else "the workdir has no checkpoint"
            raise CheckpointError(f"checkpoint.resume_step={requested}: no such checkpoint in {self.folder}; {there}")
        return requested

    def set_aside_after(self, step: int) -> list[Path]:
        """Moves the checkpoints later than `step` out of the way of a run that goes on from there; returns where to."""
        later = [s for s in self.steps() if s > step]
        if not later:
            return []
        aside = self.folder.with_name(f"{self.folder.name}.aside")
        if aside.exists() and not aside.is_dir():
            raise CheckpointError(f"{aside}: is a file, and later checkpoints need a folder of that name; move it away")
        self._manager.wait_until_finished()
        self._manager.close()
        # On several processes the first one moves; the others only see the result.
        moved = []
        if jax.process_index() == 0:
            aside.mkdir(exist_ok=True)
            for s in later:
                target = aside / str(s)
                if target.exists():
                    set_aside(target)
                moved.append((self.folder / str(s)).rename(target))
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("taco_jax checkpoints set aside")
        self._manager = self._open()
        return moved

    def restore(
        self, step: int, shapes: Any, vocab_size: int, fresh_scales: Callable[[], Any]
    ) -> tuple[Any, dict[str, Any], list[str]]:
        """(state, run, remarks) of checkpoint `step`. The state's `copy` is None where none like it is stored.

        Args:
          shapes: the state as ShapeDtypeStructs with the shardings of the current mesh.
          vocab_size: dims that differ must both be at least this long: only padding is cut or added.
          fresh_scales: makes the site scales, of which those take their place that are not stored (a pipeline's on a
            checkpoint without) or have another history. Stored ones of sites that the run has not are left out.
        """
        args, targets = self._ocp.args, _fields(shapes)
        scales, copy = targets.pop(_SCALES, None), targets.pop(_COPY, None)
        self._manager.wait_until_finished()
        meta = self._readable(step, lambda: self._manager.item_metadata(step))
        run = self.record(step)
        self._check_complete(step, run, meta)
        described = _described(_tree({"state": self._readable(step, lambda: meta["state"])}, "state"))
        # Digests are of what is stored, so arrays come back in its type.
        as_stored = _with_moments_of(described, targets)
        self._check_shapes(step, as_stored, described, vocab_size)
        items = {"state": args.StandardRestore(as_stored, strict=False)}
        stored = _tree(meta, _SCALES) or {}
        if scales and stored:
            items[_SCALES] = args.StandardRestore(_alike(stored, scales))
        same_copy = _described(copy) == _described(_tree(meta, _COPY))
        if same_copy and copy is not None:
            items[_COPY] = args.StandardRestore(copy)
        found = self._readable(step, lambda: self._manager.restore(step, args=args.Composite(**items)))
        shapes_stored = {item: _tree(meta, item) for item in found}
        self._check_digests(step, run, {item: found[item] for item in shapes_stored}, shapes_stored)
        remarks = []
        restored = dict(found["state"])
        if as_stored is not targets:
            restored = jax.tree.map(_cast, restored, targets)
            remarks.append("the optimiser's first moments are in another type than the checkpoint's")
        if scales is not None:
            kept = [site for site in scales if _described(scales[site]) == _described(stored.get(site))]
            restored[_SCALES] = scales and {site: found[_SCALES][site] for site in kept}
            if len(kept) < len(scales) or (stored and not scales):
                fresh = fresh_scales()
                restored[_SCALES] = fresh | restored[_SCALES] if kept else fresh
                which = f" of {', '.join(sorted(scales.keys() - set(kept)))}" if kept else ""
                remarks.append(
                    f"site scales{which} start uncalibrated: the checkpoint's are of other sites or another history"
                )
        if copy is not None:
            restored[_COPY] = found[_COPY] if same_copy else None
            if not same_copy:
                remarks.append("the ranks' copy of the parameters starts from the master weights")
        return dataclasses.replace(shapes, **restored), run, remarks

    def read_fields(self, step: int, targets: dict[str, Any], vocab_size: int, remedy: str) -> dict[str, Any]:
        """Some fields of the state of checkpoint `step` alone, for a run that starts from it.

        Args:
          targets: {field: its ShapeDtypeStructs with shardings}.
          vocab_size: as of `restore`. remedy: what would help where they do not fit, the end of a sentence.

        Raises:
          CheckpointError: a field is stored in another tree or of other sizes, or is not as it was saved.
        """
        meta = self._readable(step, lambda: self._manager.item_metadata(step))
        run = self.record(step)
        self._check_complete(step, run, meta)
        stored = {name: self._readable(step, lambda: _tree(meta, "state"))[name] for name in targets}
        described = _described(stored)
        as_stored = _with_moments_of(described, targets)
        self._check_shapes(step, as_stored, described, vocab_size, remedy)
        place = lambda a: self._ocp.ArrayRestoreArgs(
            restore_type=jax.Array, dtype=a.dtype, sharding=a.sharding, global_shape=a.shape, strict=False
        )
        # The handler of whole states refuses a part of one; the files are the same.
        how = jax.tree.map(place, as_stored)
        args = self._ocp.args.PyTreeRestore(as_stored, restore_args=how, partial_restore=True)
        with self._ocp.Checkpointer(self._ocp.PyTreeCheckpointHandler()) as reader:
            found = self._readable(step, lambda: reader.restore(self.folder / str(step) / "state", args=args))
        self._check_digests(step, run, {"state": found}, {"state": stored})
        return jax.tree.map(_cast, found, targets)

    def _readable(self, step: int, read: Callable[[], Any]) -> Any:
        """read(), or one line about a checkpoint whose files are damaged."""
        try:
            return read()
        except Exception as error:  # Orbax says of damaged data no more than that
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            # A page of tensorstore's, in which the array is one of the paths.
            if array := re.search(r"'path': '([^/'][^']*?)/?'", str(error)):
                what = f"of {array[1]}, some is missing or damaged"
            raise CheckpointError(
                f"checkpoint {self.folder / str(step)}: cannot be read ({what}); {self._before(step)}"
            ) from error

    def record(self, step: int) -> dict[str, Any]:
        """The record of a step. Raises CheckpointError for that of another, and for one that is not as written."""
        args = self._ocp.args.Composite(run=self._ocp.args.JsonRestore())
        found = self._readable(step, lambda: self._manager.restore(step, args=args)["run"])
        run = self._readable(step, lambda: {"step": found["step"], **found})
        digest = run.pop(_RECORD, None)
        if (digest is None) != (DIGESTS not in run) or (digest is not None and digest != _json_digest(run)):
            raise CheckpointError(f"checkpoint {self.folder / str(step)}: its record is damaged; {self._before(step)}")
        if run["step"] != step:
            free = run["step"] not in self.steps()
            way = f"rename it to {run['step']}" if free else f"move it away ({run['step']} is there)"
            raise CheckpointError(
                f"checkpoint {self.folder / str(step)}: is that of step {run['step']}, under another name; {way}, or "
                f"{self._before(step)}"
            )
        theirs, ours = run.pop(_SETTINGS, None), self._settings()
        if None not in (theirs, ours) and theirs != ours:
            raise CheckpointError(
                f"checkpoint {self.folder / str(step)}: is that of another run (one whose first settings were not "
                f"those of {self.folder.parent / CONFIG}); move it away, or {self._before(step)}"
            )
        return run

    def _settings(self) -> int | None:
        """The digest of the settings that the workdir was made with, which no run changes; None where it has none."""
        try:
            return _json_digest(json.loads((self.folder.parent / CONFIG).read_text()))
        except (OSError, ValueError):  # a folder of checkpoints alone
            return None

    def _check_complete(self, step: int, run: dict[str, Any], meta: Any) -> None:
        """Raises CheckpointError where arrays of the record are not stored: a part of the checkpoint was deleted."""
        stored = _named({part: _tree(meta, part) for part in ("state", _SCALES, _COPY)})
        missing = sorted(run.get(DIGESTS, {}).keys() - stored.keys())
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"checkpoint {self.folder / str(step)}: is damaged: not there are {', '.join(missing[:3])}{more}; "
                f"{self._before(step)}"
            )

    def _check_digests(self, step: int, run: dict[str, Any], found: Any, stored: Any) -> None:
        """Raises CheckpointError where arrays are not those that were saved."""
        shapes = {name: tuple(leaf.shape) for name, leaf in _named(stored).items()}
        damaged = take_damaged(run, _named(found), shapes)
        if damaged:
            more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
            raise CheckpointError(
                f"checkpoint {self.folder / str(step)}: is damaged: not as saved are {', '.join(damaged[:3])}{more}; "
                f"{self._before(step)}"
            )

    def _before(self, step: int) -> str:
        earlier = [s for s in self.steps() if s < step]
        return f"go on from the one before with {self._way.format(earlier[-1])}" if earlier else "no other is before it"

    def _check_shapes(
        self,
        step: int,
        targets: Any,
        have: dict[str, tuple],
        vocab_size: int,
        remedy: str = "use another --workdir",
    ) -> None:
        """have: `_described` of what is stored."""
        want = _described(targets)
        where = f"checkpoint {self.folder / str(step)}"
        theirs, ours = _optimizer_of(have), _optimizer_of(want)
        if theirs != ours:
            raise CheckpointError(
                f"{where}: has the optimiser's state of {theirs}, the run has optimizer.name={ours!r}; go on with "
                f"--optimizer.name {theirs}, or {remedy}"
            )
        if want.keys() != have.keys():
            odd = sorted(want.keys() ^ have.keys())[:3]
            raise CheckpointError(f"{where}: its arrays are not this program's (differing: {', '.join(odd)}); {remedy}")
        for name, (shape, dtype) in want.items():
            stored, stored_dtype = have[name]
            padded = len(stored) == len(shape) and all(
                a == b or min(a, b) >= vocab_size for a, b in zip(shape, stored, strict=True)
            )
            if not padded or dtype != stored_dtype:
                raise CheckpointError(
                    f"{where}: {name} is {stored_dtype}{list(stored)}, the run needs "
                    f"{dtype}{list(shape)}; use the same model or {remedy.removeprefix('use ')}"
                )


def _without_stragglers(hook: Callable) -> Callable:
    """`hook` but for what is reported of work that nobody waits for, after one array could not be written or read:
    by threads of tensorstore, each, and by Orbax' coroutines, a page for each of the other arrays."""

    def unraisablehook(unraisable):
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code is not None and f"{os.sep}orbax{os.sep}" in code.co_filename
        if not of_orbax and "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    return unraisablehook


def _chain(error: BaseException) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(_name(key) for key in path): leaf for path, leaf in leaves}


def _json_digest(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _fields(state: Any) -> dict[str, Any]:
    values = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {name: value for name, value in values.items() if value is not None}


def _tree(meta: Any, item: str) -> Any:
    found = meta[item] if item in meta else None
    return getattr(found, "tree", found)


def _alike(stored: Any, scales: Any) -> Any:
    """Returns what to restore of the sites `stored`: as in `scales`, those that it has not too, on the same devices."""
    leaf = jax.tree.leaves(scales)[0]
    place = lambda meta: jax.ShapeDtypeStruct(meta.shape, meta.dtype, sharding=leaf.sharding)
    whole = {site: jax.tree.map(place, tree) for site, tree in stored.items()}
    same = {site for site in scales if _described(scales[site]) == _described(stored.get(site))}
    return whole | {site: scales[site] for site in same}


def _cast(a: jax.Array, target: Any) -> jax.Array:
    return a.astype(target.dtype)  # which is `a` where that is its type


def _optimizer_of(described: dict[str, Any]) -> str:
    """The name of the optimiser that the arrays `described` are of (`taco_jax.train.optim.make`)."""
    parts = {part for name in described if name.startswith("opt_state.") for part in name.split(".")}
    return "muon" if "muon" in parts else "lion" if "mu" in parts and "nu" not in parts else "adamw"


def _with_moments_of(described: dict[str, Any], targets: Any) -> Any:
    """`targets` with the optimiser's first moments in the type in which they are stored; itself where that is theirs.

    No other array changes its type.
    """
    have = {name: dtype for name, (_, dtype) in described.items()}
    odd = {
        name
        for name, (_, dtype) in _described(targets).items()
        if ".mu." in name and {dtype, have.get(name)} == {"float32", "bfloat16"}
    }
    if not odd:
        return targets

    def stored(path, a):
        name = ".".join(_name(key) for key in path)
        return jax.ShapeDtypeStruct(a.shape, have[name], sharding=a.sharding) if name in odd else a

    return jax.tree_util.tree_map_with_path(stored, targets)


def _described(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """{"opt_state.1.0.mu.embed": (shape, dtype)}; the same for the tree and for Orbax' record of it."""
    return {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in _named(tree).items()}


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
