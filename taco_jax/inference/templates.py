"""Chat templates: the Jinja text that a model's files hold and that turns messages into one prompt. Only read here.

folder/chat_template.jinja               comes first
folder/tokenizer_config.json             "chat_template", and the special tokens that templates name
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from taco_jax.config import ConfigError


class Template(NamedTuple):
    """tokens: what the template knows special tokens by, such as bos_token -> "<s>"."""

    source: str
    tokens: Mapping[str, str]


def read_template(folder: Path) -> Template | None:
    """The template of a Hugging Face folder; None where there is none. Raises ConfigError for a damaged file."""
    config_file, jinja_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        source = jinja_file.read_text(encoding="utf-8") if jinja_file.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: tokenizer_config.json or chat_template.jinja cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{config_file}: must hold a JSON object, not a {type(config).__name__}")
    source = source or _default(config.get("chat_template"))
    return None if source is None else Template(source, _tokens(config))


def _default(value: Any) -> str | None:
    """A model may have several templates, each with a name."""
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}
