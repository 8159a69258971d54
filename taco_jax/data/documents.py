"""The token that ends documents in a run's data: as configured, or as the meta.json of prepared folders says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taco_jax.config import TrainConfig
from taco_jax.errors import ConfigError

META = "meta.json"


def end_token(config: TrainConfig) -> int | None:
    """The id at which attention stops looking back; None without data.document_mask.

    Raises:
      ConfigError: no folder of data.train says which it is, or two of them differ, or the model has no such token.
    """
    data, vocabulary = config.data, config.model.vocab_size
    if not data.document_mask:
        return None
    if data.end_token_id is not None:
        return data.end_token_id
    found = {name: _of_folder(name) for name in _names(data.train)}
    ids = sorted(set(found.values()))
    if len(ids) > 1:
        several = ", ".join(f"{name} {token}" for name, token in found.items())
        raise ConfigError(f"data.document_mask=True: the folders' documents end with different tokens ({several})")
    if ids[0] >= vocabulary:
        raise ConfigError(
            f"data.train={next(iter(found))!r}: its documents end with token {ids[0]}, which must be below "
            f"model.vocab_size={vocabulary}"
        )
    return ids[0]


def _names(train: str | Sequence[str]) -> list[str]:
    """The sources of data.train without their weights, "name" of "name:0.7"."""
    names = [train] if isinstance(train, str) else list(train)
    weighted = [re.fullmatch(r"(.+):[0-9.eE+-]+", name) for name in names]
    return [match[1] if match and not Path(name).exists() else name for name, match in zip(names, weighted)]


def _of_folder(name: str) -> int:
    path = Path(name) / META
    if not path.is_file():
        raise ConfigError(
            f"data.end_token_id=None: data.document_mask needs it, and data.train={name!r} is no prepared folder with "
            f"a {META} that says it; set data.end_token_id"
        )
    try:
        meta: Any = json.loads(path.read_text(encoding="utf-8"))
        token = meta["end_token"]["id"]
    except (OSError, ValueError, KeyError, TypeError):
        token = None
    if type(token) is not int or token < 0:
        raise ConfigError(f"{path}: must say the id of the token that ends documents, as end_token.id")
    return token
