"""The parts of every program's command line: `run` around its main function, flags, devices, lines of output.

Flags are in `taco_jax.config.flags`, devices in `taco_jax.config.device_selection`; their names are here too.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from taco_jax.config.device_selection import devices, select_devices
from taco_jax.config.flags import given, load, parse, parse_flags
from taco_jax.errors import ConfigError, error_line

__all__ = ["OutputError", "Parser", "devices", "given", "load", "parse", "parse_flags", "run", "say", "select_devices"]


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a line, at once even into a pipe. A program goes on where nobody reads any more, or the device is full.

    The stream is then connected to /dev/null, and where it was standard output, a line on standard error says so.
    """
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError) as error:  # a ValueError of a closed stream
        _to_null(stream)
        if stream is sys.stdout:
            reason = getattr(error, "strerror", None) or error
            say(f"standard output: {reason}; it goes on without", sys.stderr)


def _to_null(stream: TextIO) -> None:
    """Connects a stream to /dev/null: what is left in its buffer goes there, now and when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors of one line, without the usage in lines of its own."""

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False} | options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help describes every option")


class OutputError(OSError):
    """Standard output takes no more."""


class _Output:
    """Standard output whose errors are OutputErrors, so that they are told from those of files."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try(self._stream.write, text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable, *args: str) -> Any:
        try:
            return call(*args)
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error


def _open_closed_streams() -> None:
    """Connects standard streams that were closed (`>&-`) to /dev/null.

    Else the next file that is opened, a checkpoint's perhaps, has a standard stream's number, and takes what native
    code says there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))


def run(main: Callable[[Sequence[str]], int | None], args: Sequence[str] | None = None) -> int:
    """Runs a program's main function: a ConfigError becomes one line on stderr and exit code 2.

    A program that is of no use without its output ends where standard output takes no more: in silence with exit code
    141 where its reader has gone, as programs end that a SIGPIPE ends, else in one line with exit code 1.
    """
    _open_closed_streams()
    code, real = 0, sys.stdout
    sys.stdout = _Output(real)
    try:
        try:
            code = main(sys.argv[1:] if args is None else args) or 0
        except ConfigError as error:
            say(error_line(error), sys.stderr)
            code = 2
        except OSError as error:
            # Of any flag's path: a question whether there is such a file raises it.
            if error.errno != errno.ENAMETOOLONG:
                raise
            say(error_line(ConfigError(f"{error.filename}: {error.strerror}; use a shorter path")), sys.stderr)
            code = 2
        except KeyboardInterrupt:
            say("interrupted", sys.stderr)
            code = 130
        finally:
            # Here an error can still be told; Python's own flush at its end prints a traceback.
            sys.stdout.flush()
    except OutputError as error:
        _to_null(real)
        gone = error.errno == errno.EPIPE
        if not (code or gone):
            say(f"error: standard output: {error.strerror}", sys.stderr)
        code = code or (128 + signal.SIGPIPE if gone else 1)
    finally:
        sys.stdout = real
    return code
