"""The folder that a preparation writes: token files, the tokenizer, and `meta.json`, which says that it is whole.

Until then all that is unfinished stands in `.progress/` of the folder: token files under other names, and `state.json`,
which is replaced at once by the next one. It says up to which byte the token files count, and behind which document of
the input. A run that goes on cuts the files there and reads on from there. Nothing of it looks like a token file of a
whole folder, whenever the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from taco_jax.config import ConfigError
from taco_jax.data.prepare.text_files import Position, TextFile
from taco_jax.data.prepared import FORMAT, META, VERSION, open_prepared
from taco_jax.data.tokens import DTYPES, DataError

PROGRESS, STATE, FILES = ".progress", "state.json", "files.json"
SPLITS = ("train", "validation")
PART = ".part"
HASH_CHUNK_BYTES = 1 << 22


def write_whole(path: Path, data: bytes) -> None:
    """Writes a whole file or nothing, and brings it to the disk."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    to_disk(path.parent)


def to_disk(path: Path) -> None:
    """Brings a file's content, or the names of a folder's files, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


class _Shard:
    """A token file that grows, with the digest of its bytes."""

    def __init__(self, path: Path, itemsize: int, tokens: int = 0, documents: int = 0):
        """tokens, documents: what the file holds already; what is behind is cut off."""
        self.path, self.itemsize, self.tokens, self.documents = path, itemsize, tokens, documents
        self._digest = hashlib.sha256()
        self._file = path.open("r+b" if tokens else "wb")
        rest = tokens * itemsize
        while rest and (data := self._file.read(min(rest, HASH_CHUNK_BYTES))):
            self._digest.update(data)
            rest -= len(data)
        if rest:
            raise DataError(f"{path}: is shorter than its run left it; remove the folder {path.parent} to start again")
        self._file.truncate(tokens * itemsize)
        self._file.seek(tokens * itemsize)

    def write(self, ids: memoryview) -> None:
        self._file.write(ids)
        self._digest.update(ids)
        self.tokens += ids.nbytes // self.itemsize

    def to_disk(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> dict[str, Any]:
        """Ends the file. Returns its row of `meta.json`."""
        self.to_disk()
        self._file.close()
        row = {"tokens": self.tokens, "documents": self.documents, "sha256": self._digest.hexdigest()}
        return {"name": self.path.name.removesuffix(PART), **row}


class Output:
    """The token files of one preparation, from where an earlier run of it stopped.

    settings: what the files' bytes depend on, as JSON has it. dtype: "uint16" or "uint32".

    Attributes:
      position: the place in the input that the files reach. counts: documents, duplicates, ... up to there.
      meta: the content of `meta.json` where the folder is whole already; nothing may be written then.
      remark: a file system without locks.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], files: Sequence[TextFile], *, dtype: str, shard: int):
        self.folder, self._settings, self._files, self._shard_tokens = folder, dict(settings), files, shard
        self._itemsize = DTYPES[dtype].itemsize
        self.position, self.counts, self.meta, self.remark = Position(), Counter(), None, ""
        self._closed: dict[str, list[dict]] = {split: [] for split in SPLITS}
        self._open: dict[str, _Shard | None] = dict.fromkeys(SPLITS)
        self._done = self.resumed = False

    @property
    def progress(self) -> Path:
        return self.folder / PROGRESS

    @contextlib.contextmanager
    def opened(self) -> Iterator[Output]:
        """Makes the folder, or goes on in it. Other processes are kept out meanwhile.

        Raises:
          ConfigError: it holds something else, another preparation, or cannot be written; another process is at work.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"--out {self.folder}: cannot be written ({error.strerror}: {error.filename})") from None
        try:
            self._lock(lock)
            try:
                self._resume()
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"--out {self.folder}: what an earlier run left in it is damaged ({type(error).__name__}: "
                    f"{' '.join(str(error).split())[:100]}); remove the folder to start again, or use another one"
                ) from None
            except OSError as error:
                reason = f"{error.strerror}: {error.filename}"
                raise ConfigError(f"--out {self.folder}: cannot be used ({reason}); use another folder") from None
            yield self
        finally:
            for split in SPLITS:
                if self._open[split] is not None:
                    self._open[split]._file.close()
            os.close(lock)

    def _lock(self, number: int) -> None:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {self.folder}: another process works in it; wait for its end, stop it, or use another folder"
            ) from None
        except OSError as error:
            self.remark = f"{self.folder} cannot be locked ({error.strerror}): start no second run in it"

    # Where an earlier run stopped

    def _resume(self) -> None:
        path = self.folder / META
        if path.exists():
            self.meta = self._whole(path)
            shutil.rmtree(self.progress, ignore_errors=True)  # the run ended between its last two acts
            return
        state_path = self.progress / STATE
        if not state_path.exists():
            if any(not name.startswith(".") for name in os.listdir(self.folder)):
                raise ConfigError(
                    f"--out {self.folder}: holds other files, and no preparation; use an empty folder or another one"
                )
            shutil.rmtree(self.progress, ignore_errors=True)  # the run ended before its first state
            self.progress.mkdir()
            write_whole(self.progress / FILES, _json(self._listing()))
            self.checkpoint(self.position)
            return
        state = self._read(state_path)
        if state["position"] == Position()._asdict() and not state["done"]:
            # Nothing is lost, and the first try may have had a wrong setting.
            shutil.rmtree(self.progress)
            self._resume()
            return
        self._same(state["settings"], "an unfinished preparation")
        self._same_files()
        self.position = Position(*(state["position"][field] for field in Position._fields))
        self.counts = Counter(state["counts"])
        self._closed, self._done, self.resumed = state["closed"], state["done"], True
        kept = {STATE, FILES} | {row["name"] + PART for rows in self._closed.values() for row in rows}
        for split, row in state["open"].items():
            if row is not None:
                path = self.progress / (row["name"] + PART)
                kept.add(path.name)
                self._open[split] = _Shard(path, self._itemsize, row["tokens"], row["documents"])
        for path in self.progress.iterdir():
            if path.name.endswith(PART) and path.name not in kept:
                path.unlink()  # begun behind the place where this run goes on
        self._check_sizes(lambda name: self.progress / (name + PART))

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            value = json.loads(path.read_bytes())
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: corrupt; remove the folder {self.folder} to start again, or use another --out")
        return value

    def _whole(self, path: Path) -> dict[str, Any]:
        meta = self._read(path)
        if meta.get("format") != FORMAT or not isinstance(meta.get("settings"), dict):
            raise ConfigError(f"--out {self.folder}: its {META} is not a preparation's; use another folder")
        self._same(meta["settings"], "a whole preparation")
        self._closed = {split: meta["splits"][split]["files"] for split in SPLITS}
        meta["left_out"].items()
        self._check_sizes(lambda name: self.folder / name)
        open_prepared(self.folder)  # what else is damaged
        return meta

    def _same(self, before: Mapping[str, Any], what: str) -> None:
        """Raises ConfigError where the settings are not those of the folder."""
        for key in {**before, **self._settings}:
            old, new = before.get(key), self._settings.get(key)
            if old != new:
                raise ConfigError(
                    f"--out {self.folder}: holds {what} with other settings ({key} {old} -> {new}); use the same, "
                    f"or another folder"
                )

    def _listing(self) -> list[list]:
        return [[file.path, file.bytes, file.modified_ns] for file in self._files]

    def _same_files(self) -> None:
        """Raises ConfigError where a file was changed since the run that this one goes on with."""
        for before, now in zip(json.loads((self.progress / FILES).read_bytes()), self._listing()):
            if before != now:
                raise ConfigError(
                    f"--out {self.folder}: {before[0]} was changed since this preparation began; use another folder, "
                    f"or remove this one to start again"
                )

    def _check_sizes(self, place) -> None:
        """Raises ConfigError where a closed token file has another length than it was given."""
        for row in (row for rows in self._closed.values() for row in rows):
            paths = [path for path in (place(row["name"]), self.folder / row["name"]) if path.exists()]
            if not paths or paths[0].stat().st_size != row["tokens"] * self._itemsize:
                what = "has another length" if paths else "is missing"
                raise ConfigError(
                    f"--out {self.folder}: its token file {row['name']} {what}; remove the folder to start again, or "
                    f"use another one"
                )

    # Writing

    def write(self, split: str, ids: memoryview, *, ends: bool) -> None:
        """Adds the bytes of ids to a split; `ends`: a document ends with them."""
        shard = self._open[split]
        if shard is None:
            name = f"{split}-{len(self._closed[split]):05}.bin{PART}"
            shard = self._open[split] = _Shard(self.progress / name, self._itemsize)
        shard.write(ids)
        if ends:
            shard.documents += 1
            if shard.tokens >= self._shard_tokens:
                self._close(split)

    def _close(self, split: str) -> None:
        if self._open[split] is not None:
            self._closed[split].append(self._open[split].close())
            self._open[split] = None

    def tokens(self, split: str) -> int:
        return sum(row["tokens"] for row in self._closed[split]) + (shard.tokens if (shard := self._open[split]) else 0)

    def checkpoint(self, position: Position) -> None:
        """Makes a later run go on behind `position`, with all that was written."""
        self.position = position
        still_open: dict[str, dict | None] = dict.fromkeys(SPLITS)
        for split, shard in self._open.items():
            if shard is not None:
                shard.to_disk()
                name = shard.path.name.removesuffix(PART)
                still_open[split] = {"name": name, "tokens": shard.tokens, "documents": shard.documents}
        state = {
            "settings": self._settings, "position": position._asdict(), "counts": self.counts,
            "closed": self._closed, "open": still_open, "done": self._done,
        }  # fmt: skip
        write_whole(self.progress / STATE, _json(state))

    @property
    def complete(self) -> bool:
        """True where all documents are in the token files, and only `finish` is left to do."""
        return self._done

    def discard(self) -> None:
        """Removes what was begun: there is nothing to go on with."""
        shutil.rmtree(self.progress)
        with contextlib.suppress(OSError):  # other files are in it
            self.folder.rmdir()

    def finish(self, position: Position, about: Mapping[str, Any], copies: Mapping[str, bytes]) -> dict[str, Any]:
        """Makes the folder whole. Returns the content of `meta.json`.

        about: what `meta.json` says besides the format and the splits. copies: files that belong into the folder.
        """
        for split in SPLITS:
            self._close(split)
        self._done = True
        self.checkpoint(position)
        for name, data in copies.items():
            write_whole(self.folder / name, data)
        for rows in self._closed.values():
            for row in rows:
                with contextlib.suppress(FileNotFoundError):  # a run that ended here has moved it
                    os.replace(self.progress / (row["name"] + PART), self.folder / row["name"])
        to_disk(self.folder)
        splits = {
            split: {key: sum(row[key] for row in rows) for key in ("tokens", "documents")} | {"files": rows}
            for split, rows in self._closed.items()
        }
        self.meta = {"format": FORMAT, "version": VERSION, **about, "splits": splits, "settings": self._settings}
        write_whole(self.folder / META, _json(self.meta))
        shutil.rmtree(self.progress)
        return self.meta
