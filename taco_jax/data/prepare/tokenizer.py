"""The tokenizer of a preparation: its file, the files beside it, and the token that ends documents."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from taco_jax.config import ConfigError
from taco_jax.errors import did_you_mean

TOKENIZER, GGUF = "tokenizer.json", ".gguf"
# Files that make transformers' tokenizer of a tokenizer.json, or say how a model answers; kept beside the tokens.
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
LARGEST_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.json, read.

    Attributes:
      files: name -> content of those files that the prepared folder keeps. vocab_size: all ids are below it.
      end, end_id: the token after each document.
    """

    files: dict[str, bytes]
    vocab_size: int
    end: str
    end_id: int

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    @property
    def hashes(self) -> dict[str, str]:
        return {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}


def load(path: Path, end: str | None) -> Tokenizer:
    """Reads a tokenizer.json, that of a folder or of a run, and what stands beside it; or the vocabulary of a .gguf.

    end: the text of the token after each document; None takes the one that the files beside the tokenizer name.

    Raises:
      ConfigError: there is no such file, it is no tokenizer, or nothing names a token that ends documents.
    """
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise ConfigError("prepare needs the package tokenizers: pip install 'taco-jax[data]'") from None

    if path.suffix == GGUF and path.is_file():
        files = _of_gguf(path)
    else:
        path = _file(path)
        files = {TOKENIZER: _bytes(path)}
        files |= {name: _bytes(path.parent / name) for name in BESIDE if (path.parent / name).is_file()}
    try:
        library = Library.from_str(files[TOKENIZER].decode())
    except Exception as error:  # the library raises bare Exceptions
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"--tokenizer {path}: is no tokenizer.json ({reason})") from None
    vocabulary = library.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ConfigError(f"--tokenizer {path}: has an empty vocabulary")
    if end is not None and end not in vocabulary:
        special = [token.content for token in library.get_added_tokens_decoder().values()]
        near = did_you_mean(end, special, otherwise=f"special tokens are {', '.join(special[:20]) or 'none'}")
        raise ConfigError(f"--end-token {end}: the tokenizer has no such token; {near}")
    text = end if end is not None else _named_end(path, files, vocabulary)
    return Tokenizer(files, max(vocabulary.values()) + 1, text, vocabulary[text])


def _file(path: Path) -> Path:
    """The tokenizer.json that a path means: itself, or that of a model's folder, or of a run's, in its folder model."""
    places = path / TOKENIZER, path / "model" / TOKENIZER
    return next((file for file in places if file.is_file()), places[0]) if path.is_dir() else path


def _of_gguf(path: Path) -> dict[str, bytes]:
    """The files that a run keeps of a GGUF file's vocabulary."""
    from taco_jax.inference.gguf import tokenizer_files
    from taco_jax.inference.loading import open_checkpoint

    files = tokenizer_files(open_checkpoint(path))
    if not files:
        raise ConfigError(f"--tokenizer {path}: names no vocabulary; give a tokenizer.json")
    return files


def _named_end(path: Path, files: dict[str, bytes], vocabulary: dict[str, int]) -> str:
    """The text of the end token that the files beside a tokenizer name."""
    texts = {token: text for text, token in vocabulary.items()}
    beside = () if path.suffix == GGUF else ("config.json",)
    for name in ("tokenizer_config.json", "generation_config.json", *beside):
        content = _object(path.parent / name, files.get(name))
        found = content.get("eos_token" if name == "tokenizer_config.json" else "eos_token_id")
        if found is None and name == "config.json" and isinstance(content.get("text_config"), dict):
            found = content["text_config"].get("eos_token_id")
        if isinstance(found, dict):
            found = found.get("content")
        if isinstance(found, list) and found:
            found = found[0]  # an answer ends at any of them; the first is the model's own
        if found is None:
            continue
        text = found if isinstance(found, str) else texts.get(found) if isinstance(found, int) else None
        if text not in vocabulary:
            raise ConfigError(
                f"{path.parent / name}: its end token {found!r} is not in the vocabulary of {path.name}; name one with "
                f"--end-token"
            )
        return text
    raise ConfigError(
        f"--tokenizer {path}: nothing beside it says which token ends a document (tokenizer_config.json, "
        f"generation_config.json, config.json); name it, as --end-token '<|endoftext|>'"
    )


def _bytes(path: Path) -> bytes:
    try:
        if (size := os.stat(path).st_size) > LARGEST_BYTES:
            raise ConfigError(f"--tokenizer {path}: has {size} bytes; at most {LARGEST_BYTES} are read")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--tokenizer {path}: cannot be read ({error.strerror}); give a tokenizer.json") from None


def _object(path: Path, read: bytes | None) -> dict[str, Any]:
    """A JSON file's object, {} where there is none. read: its bytes, where they are known."""
    if read is None and not path.is_file():
        return {}
    try:
        content = json.loads(_bytes(path) if read is None else read)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no JSON file ({error}); mend it, or name the token with --end-token") from None
    return content if isinstance(content, dict) else {}
