"""JSON of a model's folder, whoever wrote it: one line says what is wrong with a file, however deep or long it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from taco_jax.config import ConfigError

LARGEST = 1 << 28
"""Bytes of a file that is read at all. The largest index and tokenizer_config.json in use have a few million."""


def check_size(path: Path) -> None:
    """Raises ConfigError for a file of text, JSON or not, that is too large to be read at once; OSError as `stat`."""
    if (size := path.stat().st_size) > LARGEST:
        raise ConfigError(f"{path}: has {size} bytes; at most {LARGEST} are read")


def read_object(path: Path, *, needed: bool = True) -> dict[str, Any]:
    """The object that a file holds; {} for no file, unless it is needed.

    Raises:
      ConfigError: the file cannot be read, is too large or nested too deeply, is no JSON, or holds no object.
    """
    try:
        check_size(path)
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # a lone half of a surrogate pair is no text
            json.dumps(content, ensure_ascii=False).encode()
    except ConfigError:
        raise
    except FileNotFoundError as error:
        if not needed:
            return {}
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); a model's folder must have it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON file ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object, not a {type(content).__name__}")
    return content
