"""Token files: little-endian uint16 or uint32 ids without a header (nanoGPT's `.bin`), mapped into memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from taco_jax.config import ConfigError, nearest

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SUFFIXES = {".u16.bin": "uint16", ".uint16.bin": "uint16", ".u32.bin": "uint32", ".uint32.bin": "uint32"}
# First int32 of files written for llm.c and modded-nanogpt, which put 256 int32 before the tokens.
HEADER_MAGIC = (20240520, 20240801, 20251013)
# Ids looked at when a file is opened (0.1 s); the others are checked as they are read.
CHECKED_ON_OPEN = 1 << 26


class DataError(ConfigError):
    """A data file that cannot be used. Its message is one line that names the file. Exit code 2."""


def open_tokens(path: str | Path, vocab_size: int, dtype: str = "auto") -> np.ndarray:
    """The ids of a `.bin` file as a read-only memory map, uint16[n] or uint32[n].

    `dtype` "auto" takes what the suffix says (.u16.bin, .u32.bin), else uint16 where `vocab_size` <= 65536, else
    uint32. Raises DataError for a file that is missing, empty, not a whole number of ids, or holds an id >=
    `vocab_size`.
    """
    path = Path(path)
    require_file(path)
    name = _dtype_name(path, vocab_size, dtype)
    item, size = DTYPES[name].itemsize, path.stat().st_size
    if size == 0:
        raise DataError(f"{path}: the file is empty")
    if size % item:
        raise DataError(
            f"{path}: corrupt or not {name}: {size} bytes are not a whole number of {item}-byte token ids; "
            f"check data.token_dtype"
        )
    if size >= 1024 and int(np.fromfile(path, dtype="<i4", count=1)[0]) in HEADER_MAGIC:
        raise DataError(
            f"{path}: starts with the 1,024-byte header of llm.c; write the token ids alone, as nanoGPT does"
        )
    tokens = np.memmap(path, dtype=DTYPES[name], mode="r")
    check_ids(tokens[:CHECKED_ON_OPEN], vocab_size, str(path))
    return tokens


def check_ids(tokens: np.ndarray, vocab_size: int, name: str, offset: int = 0) -> None:
    """Raises DataError if an id is outside [0, vocab_size); `offset` is the place of tokens[0] in the file."""
    if tokens.size and int(tokens.max()) >= vocab_size:
        place = int(np.argmax(tokens >= vocab_size))
        raise DataError(
            f"{name}: token id {int(tokens[place])} at position {offset + place} is outside the vocabulary; "
            f"ids must be below model.vocab_size={vocab_size} (is data.token_dtype right?)"
        )


def require_file(path: Path) -> None:
    """Raises DataError, with the nearest name of the folder, unless `path` is a file."""
    if path.is_file():
        return
    if path.is_dir():
        raise DataError(f"{path}: is a folder, not a data file")
    folder = path.parent
    known = sorted(str(folder / p.name) for p in folder.iterdir() if p.is_file()) if folder.is_dir() else []
    hint = (
        nearest(str(path), known)
        if 0 < len(known) <= 50
        else f"the folder {folder} " + ("does not exist" if not folder.is_dir() else "holds no such file")
    )
    raise DataError(f"{path}: no such data file; {hint}")


def _dtype_name(path: Path, vocab_size: int, dtype: str) -> str:
    if dtype != "auto":
        return dtype
    for suffix, name in SUFFIXES.items():
        if path.name.endswith(suffix):
            return name
    return "uint16" if vocab_size <= 1 << 16 else "uint32"
