"""The text of `data.train`: one source of tokens, or several with weights, such as `mine:0.7 other:0.3`.

A weight is what follows the last colon of a source. Weights are shares of the sequences, which sum to 1, or ratios
(`mine:7 other:3`). Sources without weights are taken by their sizes.
"""

from __future__ import annotations

import dataclasses
import math
import os
from fractions import Fraction
from pathlib import Path

from taco_jax.errors import ConfigError

ROUNDING = 0.005
"""How far from its true value a share may be that was rounded to two digits."""


@dataclasses.dataclass(frozen=True)
class DataSource:
    """name: a packaged corpus, a file or a folder. weight: None: by size."""

    name: str
    weight: float | None = None


def parse_sources(train: str | tuple[str, ...]) -> tuple[DataSource, ...]:
    """Returns the sources that `data.train` names. Raises ConfigError where their names or weights cannot be."""
    texts = (train,) if isinstance(train, str) else train
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"data.train={train!r}: must name a source of tokens, or several; try austen")
    for text in texts:
        check_path(text, "data.train")
    sources = tuple(map(_parse, texts))
    _check_names(sources)
    _check_weights(sources)
    return sources


def check_validation(name: str | None) -> None:
    """Raises ConfigError for a weight on `data.validation`, which is one source, read whole."""
    if name is None:
        return
    check_path(name, "data.validation")
    if (source := _parse(name, "data.validation")).weight is not None:
        raise ConfigError(f"data.validation={name!r}: is one source, which has no weight; say {source.name}")


def check_path(text: str, key: str) -> None:
    """Raises ConfigError for a text that no file can have as its path."""
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as error:  # too long, a circle of links; a zero byte
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}={shown!r}: cannot be read ({reason})") from None


def proportions(sources: tuple[DataSource, ...]) -> tuple[int, ...] | None:
    """Returns the weights as the smallest whole numbers in exactly their ratio; None where sources go by size."""
    if len(sources) == 1 or sources[0].weight is None:
        return None
    weights = [Fraction(str(source.weight)) for source in sources]  # the decimal number, 0.7 = 7/10
    common = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * common) for weight in weights]
    return tuple(number // math.gcd(*whole) for number in whole)


def _parse(text: str, key: str = "data.train") -> DataSource:
    name, colon, weight = text.rpartition(":")
    if not colon or Path(text).exists():
        return DataSource(text)
    try:
        number = float(weight)
    except ValueError:
        if not Path(name).exists():
            return DataSource(text)
        raise ConfigError(f"{key}={text!r}: the weight {weight!r} is no number; try {name}:0.5") from None
    if not name:
        raise ConfigError(f"{key}={text!r}: has a weight and no source; say SOURCE:{weight}")
    if not 0 < number < math.inf:
        raise ConfigError(f"{key}={text!r}: the weight must be above 0 and finite; try {name}:0.5")
    return DataSource(name, number)


def _check_names(sources: tuple[DataSource, ...]) -> None:
    seen: dict[str, str] = {}
    for source in sources:
        place = os.path.realpath(source.name)
        if place in seen:
            raise ConfigError(
                f"data.train={source.name!r}: named twice (as {seen[place]!r}); name a source once, with a weight"
            )
        seen[place] = source.name


def _check_weights(sources: tuple[DataSource, ...]) -> None:
    without = [source.name for source in sources if source.weight is None]
    if len(without) == len(sources):
        return
    if without:
        raise ConfigError(f"data.train={without[0]!r}: has no weight, and others have; give all of them one, or none")
    weights = [source.weight for source in sources]
    total = sum(weights)
    if max(weights) < 1 and abs(total - 1) > ROUNDING * len(weights):
        shown = ", ".join(f"{weight:g}" for weight in weights)
        raise ConfigError(
            f"data.train: the weights {shown} sum to {total:g}; shares must sum to 1, and ratios have a weight of 1 or "
            f"more, such as 7 and 3"
        )
