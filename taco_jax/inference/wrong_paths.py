"""Paths that are no model: what they are instead, and what would work."""

from __future__ import annotations

import re
from pathlib import Path

from taco_jax.config import ConfigError
from taco_jax.inference.json_files import read_object

KINDS = "must be a Hugging Face folder (config.json, tokenizer.json, *.safetensors) or a .gguf file"
TRAINED = (
    "from Python taco_jax.Generator.of(config.model, params) takes a trained model's parameters; "
    "--model takes a Hugging Face folder or a .gguf file"
)


def is_run(folder: Path) -> bool:
    """Whether a folder is the workdir of a training run, whose config.json describes a TrainConfig."""
    try:
        config = read_object(folder / "config.json")
    except ConfigError:
        return False
    return "model_type" not in config and isinstance(config.get("model"), dict) and "optimizer" in config


def no_model(path: Path) -> str | None:
    """What is wrong with a path that no model can be read from, as the end of a sentence; None where only a folder's
    config.json is missing."""
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        text = f"{KINDS}; there is nothing"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
            text += f"; if it is a name on the Hugging Face hub, download it first: hf download {path} --local-dir DIR"
        return text
    folder = path.parent
    if path.name == "config.json" and is_run(folder):
        return f"is the config of a training run; {TRAINED}"
    if (folder / "config.json").is_file() and path.suffix in (".json", ".safetensors"):
        return f"is a file of a model; name its folder: --model {folder}"
    if path.suffix in (".py", ".yaml", ".yml", ".toml"):
        return f"is a file of settings; {KINDS}"
    return f"{KINDS}; there is a file of another kind"


def _folder(path: Path) -> str | None:
    if is_run(path):
        return f"is the workdir of a training run; {TRAINED}"
    if path.name == "checkpoints" and is_run(path.parent):
        return f"holds the checkpoints of a training run; {TRAINED}"
    if path.parent.name == "checkpoints" and is_run(path.parent.parent):
        return f"is a checkpoint of a training run; {TRAINED}"
    if files := sorted(path.glob("*.gguf")):
        return f"has no config.json; name one of its GGUF files: --model {files[0]}"
    inside = sorted(found.parent for pattern in ("*", "snapshots/*") for found in path.glob(f"{pattern}/config.json"))
    if models := [folder for folder in inside if not is_run(folder)]:
        return f"has no config.json; name a model in it: --model {models[0]}"
    if inside:
        return f"holds workdirs of training runs; {TRAINED}"
    return None
