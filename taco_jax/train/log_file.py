"""`--log-file FILE`: the lines that a run prints, into a file too. A resumed run appends to it."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import jax

from taco_jax.config import ConfigError, cli
from taco_jax.errors import error_line
from taco_jax.train.workdir import CONFIG, LOCK, METRICS, PLOT

_open: list[_File] = []


class _File:
    def __init__(self, path: Path, file: TextIO):
        self._path, self._file = path, file

    def write(self, line: str) -> None:
        """Writes a line, at once. A run goes on where the disk takes no more, and says so once."""
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            if self in _open:
                _open.remove(self)
            reason = getattr(error, "strerror", None) or error
            cli.say(f"{self._path}: {reason}; the run goes on without its log", sys.stderr)


def check_log_file(path: str | None, workdir: str) -> None:
    """Raises ConfigError for a file whose folder is not there, nor is going to be, and for a run's own files."""
    if path is None:
        return
    file, folder = Path(path).absolute(), Path(workdir).absolute()
    if file.parent == folder:
        if file.name in (CONFIG, METRICS, PLOT, LOCK):
            raise ConfigError(f"log_file={path}: the run keeps something else in this file; use another --log-file")
    elif not file.parent.is_dir():
        raise ConfigError(f"log_file={path}: there is no folder {file.parent}; make it, or use another --log-file")
    if file.is_dir():
        raise ConfigError(f"log_file={path}: is a folder; give the path of a file")


@contextlib.contextmanager
def log_to(path: str | None) -> Iterator[None]:
    """Within it `say` writes into the file, too, after a line with the time; None: nowhere.

    What ends the run is its last line. Only the first process calls this.

    Raises ConfigError where the file cannot be written.
    """
    if path is None:
        yield
        return
    try:
        stream = Path(path).open("a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"log_file={path}: cannot be written ({error.strerror}); use another --log-file") from None
    file = _File(Path(path), stream)
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    _open.append(file)
    file.write(f"# {now} process {os.getpid()} on {socket.gethostname()}")
    try:
        yield
    except KeyboardInterrupt:
        file.write("interrupted")
        raise
    except Exception as error:
        file.write(error_line(error))
        raise
    finally:
        if file in _open:
            _open.remove(file)
        with contextlib.suppress(OSError):  # a full disk, which was said
            stream.close()


def say(text: str) -> None:
    """Prints on the first process, and into its log file."""
    if jax.process_index() == 0:
        cli.say(text)
        for file in list(_open):
            file.write(text)
