"""Rules that fields of settings share: types, ranges, choices. Each raises a ConfigError of one line."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from taco_jax.codec import CODECS, as_codec, check_choice
from taco_jax.errors import ConfigError, must_be_one_of


class Checked:
    """Base of the settings' dataclasses. Fields are checked where an object is made: their types, then `check_fields`.

    PREFIX: of the fields' keys in a TrainConfig, which errors name. LARGE: integers without an upper limit.
    """

    PREFIX = ""
    LARGE = ()

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            _check_type(f"{self.PREFIX}{field.name}", getattr(self, field.name), hints[field.name])
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            small = not isinstance(value, int) or field.name in self.LARGE or value < 1 << 31
            self.require(small, field.name, "must be below 2**31")
        self.check_fields()

    def check_fields(self) -> None:
        """Raises ConfigError for values that cannot be, alone or together with others of this object."""

    def require(self, holds: bool, key: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{self.PREFIX}{key}={getattr(self, key)!r}: {rule}")

    def at_least(self, least: int, *keys: str, or_none: str | None = None) -> None:
        """or_none: the fields may be None, and what that means, as the end of a sentence."""
        rule = f"must be at least {least}" if least else "must not be negative"
        rule += f", or None{or_none}" if or_none is not None else ""
        for key in keys:
            value = getattr(self, key)
            self.require((value is None and or_none is not None) or (value is not None and value >= least), key, rule)

    def above_0(self, *keys: str, more: str = "") -> None:
        for key in keys:
            self.require(0 < getattr(self, key) < math.inf, key, f"must be above 0 and finite{more}")

    def one_of(self, key: str, allowed: Sequence[Any]) -> None:
        value = getattr(self, key)
        self.require(value in allowed, key, must_be_one_of(value, allowed))

    def codec(self, key: str, *, others: tuple[str, ...] = ()) -> None:
        """others: what the field may be that is no codec. None passes."""
        text = getattr(self, key)
        if text is None or text in others:
            return
        try:
            if "," not in text:
                check_choice(f"{self.PREFIX}{key}", text, (*CODECS, *others))
            as_codec(text, f"{self.PREFIX}{key}")
        except ValueError as error:
            raise ConfigError(str(error)) from None


def first_and_last(text: str) -> tuple[int, int]:
    """(3, 5) of "3:5", two numbers of steps. Raises ValueError with what the text must be."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if not match:
        raise ValueError("must be START:STOP, the first and the last step, such as 10:12")
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last:
        raise ValueError("START must be at least 1 and at most STOP, the last step, such as 10:12")
    return first, last


def _check_type(key: str, value: Any, hint: Any) -> None:
    """Raises ConfigError for a value of another type than its field's; the command line makes none."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
    # A bool is an int to Python, and an int will do for a float.
    fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
    if not fits or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(
            f"{key}={value!r}: must be of type {names}, is {type(value).__name__}{_instead(value, kinds)}"
        )


def _instead(value: Any, kinds: tuple) -> str:
    """Returns the end of a sentence with a number that would do, for a value that is none of the field's type."""
    for kind in (int, float):
        if kind in kinds and not isinstance(value, bool):
            try:
                return f"; {kind(value)!r} would do"
            except (TypeError, ValueError, OverflowError):
                break
    return ""
