"""A model's folder: its JSON, whoever wrote it, and paths that are no model.

An error is one line, however deep or long a file is. For a path that is no model it says what it is instead.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from taco_jax.config import ConfigError

LARGEST = 1 << 28
"""Bytes of a file that is read at all. The largest index and tokenizer_config.json in use have a few million."""
KINDS = (
    "must be a Hugging Face folder (config.json, tokenizer.json, *.safetensors), a .gguf file, or a training run's "
    "workdir or a step of it, such as runs/x or runs/x@100"
)


def check_size(path: Path) -> None:
    """Raises ConfigError for a file of text, JSON or not, that is too large to be read at once; OSError as `stat`."""
    if (size := path.stat().st_size) > LARGEST:
        raise ConfigError(f"{path}: has {size} bytes; at most {LARGEST} are read")


def read_object(path: Path, *, needed: bool = True) -> dict[str, Any]:
    """Returns the object that a file holds, {} for no file, unless it is needed.

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


def is_run(folder: Path) -> bool:
    """Returns whether a folder is the workdir of a training run, whose config.json describes a TrainConfig."""
    try:
        config = read_object(folder / "config.json")
    except ConfigError:
        return False
    return "model_type" not in config and isinstance(config.get("model"), dict) and "optimizer" in config


def no_model(path: Path) -> str | None:
    """Returns the end of a sentence: what is wrong with a path that no model can be read from.

    None where only a folder's config.json is missing.
    """
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        text = f"{KINDS}; there is nothing"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
            text += f"; if it is a name on the Hugging Face hub, download it first: hf download {path} --local-dir DIR"
        return text
    folder = path.parent
    if path.name == "config.json" and is_run(folder):
        return f"is the config of a training run; name its folder: --model {folder}"
    if (folder / "config.json").is_file() and path.suffix in (".json", ".safetensors"):
        return f"is a file of a model; name its folder: --model {folder}"
    if path.suffix in (".py", ".yaml", ".yml", ".toml"):
        return f"is a file of settings; {KINDS}"
    return f"{KINDS}; there is a file of another kind"


def _folder(path: Path) -> str | None:
    if path.name == "checkpoints" and is_run(path.parent):
        return f"holds the checkpoints of a training run; name the run: --model {path.parent}"
    if path.parent.name == "checkpoints" and is_run(path.parent.parent):
        return f"is a checkpoint of a training run; name it so: --model {path.parent.parent}@{path.name}"
    if (path / "adapter_config.json").is_file():
        return (
            "holds adapters alone, and no model; name a run of adapters, a folder that its export with --merge has "
            "written, or what peft's merge_and_unload makes of both"
        )
    if files := sorted(path.glob("*.gguf")):
        return f"has no config.json; name one of its GGUF files: --model {files[0]}"
    inside = sorted(found.parent for pattern in ("*", "snapshots/*") for found in path.glob(f"{pattern}/config.json"))
    if models := [folder for folder in inside if not is_run(folder)]:
        return f"has no config.json; name a model in it: --model {models[0]}"
    if inside:
        return f"holds workdirs of training runs; name one: --model {inside[0]}"
    return None
