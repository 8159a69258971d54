"""Batches of token ids for a calibration, spread evenly over what --data names.

Token files, prepared folders and packaged corpora are read as the trainer reads them; other texts by the model's own
tokenizer, a stretch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from taco_jax.data.prepare.text_files import JSONL, Position, Reader, find_files
from taco_jax.data.prepared import is_prepared
from taco_jax.data.sources import open_source
from taco_jax.data.token_files import TOKEN_SUFFIXES, megatron_prefix
from taco_jax.data.tokens import CORPORA, DataError, check_ids, read_text
from taco_jax.errors import ConfigError
from taco_jax.inference.text import ByteTokenizer

BATCHES = 8
"""A calibration's tokens come in so many batches, so that what is measured has a standard error."""
# Characters of text read for a token: enough in any language that a tokenizer was made for.
CHARACTERS = 12


def batches(name: str, *, vocab_size: int, tokenizer: Any, length: int, tokens: int, part: int = 0,
            parts: int = 1) -> list[np.ndarray]:  # fmt: skip
    """Returns batches int32[B, length + 1], about `tokens` predicted ones together.

    Args:
      name: a file, folder or corpus. tokenizer: the model's own, None where it has none.
      part, parts: windows number part, part + parts and so on of parts times as many: sets that share no token.

    Raises:
      ConfigError, DataError: what cannot be read, has too few tokens, or has ids that the model lacks.
    """
    count = max(1, tokens // length)
    rows = max(1, count // BATCHES)
    count = max(1, count // rows) * rows
    text = name in CORPORA or _is_text(name)
    if text and tokenizer is None and vocab_size != 256:
        raise ConfigError(f"--data {name}: is text, and the model has no tokenizer; give token files (docs/data.md)")
    if text and not (_of_bytes(tokenizer) and _as_bytes(name)):
        windows = _of_text(name, tokenizer, length, count * parts)
    else:
        stream = open_source(name, vocab_size).tokens
        windows = _of_stream(name, stream, length, count * parts)
    chosen = np.stack(windows[part::parts]).astype(np.int32)
    check_ids(chosen.reshape(-1), vocab_size, name)
    return list(chosen.reshape(-1, rows, length + 1))


def _is_text(name: str) -> bool:
    path = Path(name)
    if path.is_dir():
        if is_prepared(path):
            return False
        tokens = any(p.suffix in TOKEN_SUFFIXES for p in path.iterdir())
        return not tokens
    return path.suffix not in TOKEN_SUFFIXES and megatron_prefix(path) is None


def _of_bytes(tokenizer: Any) -> bool:
    return tokenizer is None or isinstance(tokenizer, ByteTokenizer)


def _as_bytes(name: str) -> bool:
    """Returns whether the trainer reads a text's bytes by itself."""
    return name in CORPORA or (not Path(name).is_dir() and name.endswith((".txt", ".txt.xz")))


def _of_stream(name: str, stream: Any, length: int, count: int) -> list[np.ndarray]:
    if len(stream) < count * (length + 1):
        raise _too_short(name, len(stream), count, length)
    last = len(stream) - length - 1
    return [np.asarray(stream[start : start + length + 1]) for start in _spread(last, count)]


def _of_text(name: str, tokenizer: Any, length: int, count: int) -> list[np.ndarray]:
    if tokenizer is None:
        rule = "needs the tokenizer of a model (--model), as all text but a .txt file does; give one, or token files"
        raise ConfigError(f"--data {name}: {rule}")
    text = "\n\n".join(_documents(name))
    taken = CHARACTERS * (length + 1)
    windows = []
    for start in _spread(max(0, len(text) - taken), count):
        # A stretch begins behind a blank, so that no word is cut; the first token's context is missing in any case.
        at = text.find(" ", start) + 1 if start else 0
        ids = tokenizer.encode(text[at : at + taken])[: length + 1]
        if len(ids) <= length:
            raise _too_short(name, len(tokenizer.encode(text)), count, length)
        windows.append(np.asarray(ids))
    if count > 1 and len(text) < count * taken / CHARACTERS:
        raise _too_short(name, len(tokenizer.encode(text)), count, length)
    return windows


def _documents(name: str) -> Iterator[str]:
    def bad(error: DataError) -> None:
        raise error

    if name in CORPORA:
        yield bytes(read_text(name)).decode()
        return
    if not name.lower().endswith(JSONL) and Path(name).is_file() and ".txt" not in Path(name).suffixes:
        try:
            yield Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--data {name}: cannot be read as text ({error})") from None
        return
    files, _ = find_files([name])
    reader = Reader(files, "text", bad)
    reader.check()
    for document in reader.documents(Position()):
        text = document.text
        yield text if isinstance(text, str) else "".join(text.chunks()) if text is not None else ""


def _spread(last: int, count: int) -> list[int]:
    return [round(last * i / max(1, count - 1)) for i in range(count)]


def _too_short(name: str, have: int, count: int, length: int) -> ConfigError:
    need = f"{count} windows of {length} tokens need {count * (length + 1):,}"
    return ConfigError(f"--data {name}: has {have:,} tokens; {need}; give more text, or a smaller --tokens or --length")
