"""Chat templates: the Jinja text that a model's files hold and that turns messages into one prompt. Only read here.

folder/chat_template.jinja               comes first
folder/tokenizer_config.json             "chat_template", and the special tokens that templates name
folder/special_tokens_map.json           older folders have these tokens here
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from taco_jax.config import ConfigError
from taco_jax.inference.model_folder import check_size, read_object


class Template(NamedTuple):
    """tokens: what the template knows special tokens by, such as bos_token -> "<s>"."""

    source: str
    tokens: Mapping[str, str]


def read_template(folder: Path) -> Template | None:
    """The template of a Hugging Face folder; None where there is none. Raises ConfigError for a damaged file."""
    jinja_file = folder / "chat_template.jinja"
    config = read_object(folder / "tokenizer_config.json", needed=False)
    try:
        source = None
        if jinja_file.is_file():
            check_size(jinja_file)
            source = jinja_file.read_text(encoding="utf-8")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{jinja_file}: cannot be read ({error})") from None
    source = source or _default(config.get("chat_template"))
    return None if source is None else Template(source, special_tokens(folder))


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of a folder's special tokens by their names: {"eos_token": "</s>", ...}."""
    files = ("special_tokens_map.json", "tokenizer_config.json")
    older, newer = (_tokens(read_object(folder / file, needed=False)) for file in files)
    return older | newer


def called_special(folder: Path) -> list[str]:
    """Texts of all tokens that a folder's files call special, beside its tokenizer.json, in which they may be none."""
    config = read_object(folder / "tokenizer_config.json", needed=False)
    more, added = config.get("additional_special_tokens"), config.get("added_tokens_decoder")
    listed = [*(more if isinstance(more, list) else ()), *(added.values() if isinstance(added, dict) else ())]
    entries = [{"content": each, "special": True} if isinstance(each, str) else each for each in listed]
    special = [each for each in entries if isinstance(each, dict) and each.get("special") is True]
    texts = [*special_tokens(folder).values(), *(each.get("content") for each in special)]
    return sorted({text for text in texts if isinstance(text, str) and text})


def _default(value: Any) -> str | None:
    """A model may have several templates, each with a name."""
    if isinstance(value, list):
        named = [each.get("template") for each in value if isinstance(each, dict) and each.get("name") == "default"]
        value = named[-1] if named else None
    return value if isinstance(value, str) else None


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    return {key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)}
