"""Text <-> token ids: a thin layer over the `tokenizers` library, which an extra brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taco_jax.config import ConfigError

CONTEXT = 4  # tokens of the prompt: as long as a character can be


def missing_tokenizer(model: Path) -> str:
    """Why there is no tokenizer for a model, and what would help."""
    if model.is_dir() and not (model / "tokenizer.json").is_file():
        return f"{model}: has no tokenizer.json, so a prompt must be token ids"
    return f"{model}: text needs the package tokenizers: pip install 'taco-jax[inference]'; token ids work without it"


class Tokenizer:
    """Encodes and decodes with a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the model's own post-processor adds (a BOS, where it has one)."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt: Sequence[int]) -> Stream:
        """The text of what follows a prompt."""
        return Stream(self._tokenizer, prompt)


class Stream:
    """The text of tokens as they come: each part is held back until its characters are whole."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        # Some tokenizers drop the space before a text's first word: let that be the prompt's.
        for token in prompt[-CONTEXT:]:
            self.add(token)

    def add(self, token: int) -> str:
        return self._stream.step(self._tokenizer, token) or ""


def read_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer.json of a model; None where there is none.

    Raises:
      ConfigError: the library is missing, or cannot read the file.
    """
    if not path.is_file():
        return None
    try:
        import tokenizers
    except ImportError:
        return None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{path}: tokenizers cannot read it ({' '.join(str(error).split())})") from None
