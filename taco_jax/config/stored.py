"""The `config.json` of a run as a TrainConfig again."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taco_jax.codec import AUTO
from taco_jax.config.derived import USES, flatten
from taco_jax.config.lora import LoraConfig
from taco_jax.config.settings import TrainConfig
from taco_jax.errors import ConfigError, did_you_mean

# What was said for one start of a run, not for the run.
_OF_ONE_START = ("stop_after", "dry_run", "profile")


def read_config(path: Path) -> TrainConfig:
    """Returns the settings of a run from its `config.json`. Keys that it lacks, of an older version, have defaults.

    The workdir is the file's folder where that is the run's; else it is "", and must be given. What was said for one
    start alone (`stop_after`, `checkpoint.resume_step`, `dry_run`, `profile`) is left out.

    Raises:
      ConfigError: one line, with the key, for what is no such file.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or f"no JSON: {error}"
        raise ConfigError(f"--config {path}: cannot be read ({what})") from None
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise ConfigError(
            f"--config {path}: is not the config.json of a run of this program, which has a part 'model'; give one, "
            f"or an experiment file (.py)"
        )
    try:
        config = _made(TrainConfig, values, "")
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--config {path}: model.{error}") from None
    own = path.name == "config.json" and any((path.parent / name).exists() for name in (".lock", "metrics.jsonl"))
    checkpoint = dataclasses.replace(config.checkpoint, resume_step=None)
    left_out = {field.name: field.default for field in dataclasses.fields(config) if field.name in _OF_ONE_START}
    return dataclasses.replace(config, workdir=str(path.parent) if own else "", checkpoint=checkpoint, **left_out)


def own_codecs(workdir: str) -> dict[str, Any]:
    """Returns the codecs of the run in `workdir` by dotted keys, as its first start named them; {} where there is none.

    A run that goes on keeps them where its settings say auto, so that a later version recommends it nothing else.
    """
    try:
        values = flatten(json.loads((Path(workdir) / "config.json").read_text())) if workdir else {}
    except (OSError, ValueError, AttributeError):  # opening the workdir says it
        return {}
    kinds = dict.fromkeys(USES, str) | {"compression.plan": dict}
    stays = lambda value, kind: isinstance(value, kind) and value != AUTO
    return {key: values[key] for key, kind in kinds.items() if stays(values.get(key), kind)}


def lora_of(settings: Mapping[str, Any], where: Path) -> LoraConfig:
    """Returns the adapters' part of a run's config.json; an older run's has none. Raises ConfigError for a damaged one.

    where: the file, for messages.
    """
    given = settings.get("lora") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: lora={given!r}: must be an object of keys")
    try:
        return _made(LoraConfig, given, LoraConfig.PREFIX)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _made(cls: type, values: dict[str, Any], prefix: str) -> Any:
    """An object of a dataclass, and of those within it, from plain values."""
    hints, names = typing.get_type_hints(cls), [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in names:
            raise ConfigError(f"{prefix}{name}: no such key; {did_you_mean(name, names)}")
    return cls(**{name: _value(hints[name], value, f"{prefix}{name}") for name, value in values.items()})


def _value(hint: Any, value: Any, key: str) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if dataclasses.is_dataclass(kind):
            if isinstance(value, dict):
                return _made(kind, value, f"{key}.")
            if types.NoneType not in kinds or value is not None:
                raise ConfigError(f"{key}={value!r}: must be an object of keys")
        # JSON has no tuples.
        if (typing.get_origin(kind) or kind) is tuple and isinstance(value, list):
            of = (typing.get_args(kind) or (Any,))[0]
            return tuple(_value(of, one, key) for one in value)
    return value
