"""Errors of one line: the class that commands turn into exit code 2, and the words that error texts share.

Imports nothing of the package, so that everything in it may import this.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

LONGEST_ERROR = 2000
"""Characters. Files and arguments may hold values of any length."""


class ConfigError(ValueError):
    """A setting that cannot work. Its message is one line: key, value, rule, what would work. Exit code 2."""


def did_you_mean(name: object, known: Iterable[object], *, otherwise: str | None = None, cutoff: float = 0.5) -> str:
    """Returns "did you mean 'x'?" with the closest of `known`; where none is close, `otherwise`.

    otherwise: None: "known: " and all of them. cutoff: the share of letters in common from which a name is close.
    """
    names = [str(k) for k in known]
    close = difflib.get_close_matches(str(name), names, 1, cutoff)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(sorted(names))}" if otherwise is None else otherwise


def must_be_one_of(value: object, known: Iterable[object]) -> str:
    """Returns "did you mean 'x'? (one of x, y)" where one of `known` is close, else "must be one of x, y"."""
    names = ", ".join(map(str, known := list(known)))
    close = did_you_mean(value, filter(None, known), otherwise="")
    return f"{close} (one of {names})" if close else f"must be one of {names}"


def check_writable(key: str, path: str | os.PathLike) -> None:
    """Makes the folder of a file that is to be written later, and tries to write there.

    Raises:
      ConfigError: that cannot be; said before the work whose result the file is to take.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{key} {path}: is a folder; name a file")
    tried = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tried.touch()
        tried.unlink()
    except OSError as error:
        raise ConfigError(f"{key} {path}: cannot be written ({error.strerror}); name another file") from None


def listed(values: Iterable[object]) -> str:
    """Returns "1, 2 or 4" for the values 1, 2 and 4."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def error_line(error: Exception) -> str:
    """Returns "error: " and one line, whatever the error quotes.

    Control characters become escapes. The middle of a very long text is left out.
    """
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(error))
    if (more := len(text) - LONGEST_ERROR) > 0:
        half = LONGEST_ERROR // 2
        text = f"{text[:half]} [{more} characters] {text[-half:]}"
    return f"error: {text}"
