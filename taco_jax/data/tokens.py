"""Tokens of files that hold nothing else.

`.bin` files without a header hold little-endian uint16 or uint32 ids (nanoGPT's); they are mapped into memory. Of text
files every byte is one id below 256, so no tokenizer is needed.

The packaged corpus "austen" is the text of Jane Austen's six novels (public domain), 3,997,869 bytes. Byte n-grams
reach 2.39 (bigram) and 1.88 (trigram) nats per byte on it.
"""

from __future__ import annotations

import lzma
from importlib import resources
from pathlib import Path

import numpy as np

from taco_jax.config import ConfigError
from taco_jax.errors import did_you_mean

CORPORA = {"austen": "quickstart_austen.txt.xz"}
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SUFFIXES = {".u16.bin": "uint16", ".uint16.bin": "uint16", ".u32.bin": "uint32", ".uint32.bin": "uint32"}
# First bytes of files that hold more than ids -> what would make ids of them.
FORMATS = {
    b"PK\x03\x04": "a .npz or PyTorch archive; write one array's ids alone, with its tofile",
    b"\x1f\x8b\x08": "compressed by gzip; gunzip it",
    b"\xfd7zXZ\0": "compressed by xz; unxz it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unzstd it",
    b"MMIDIDX": "the index of a Megatron .bin; name it .idx, and give the .bin beside it",
}
# Ids that are looked at for their width.
WIDTH_SAMPLE, LEAST_SAMPLE = 1 << 16, 64
# Ids looked at when a file is opened (0.1 s); the others are checked as they are read.
CHECKED_ON_OPEN = 1 << 26


class DataError(ConfigError):
    """A data file that cannot be used. Its message is one line that names the file. Exit code 2."""


def open_tokens(path: str | Path, vocab_size: int, dtype: str = "auto", checked: int | None = None) -> np.ndarray:
    """Returns the ids of a `.bin` file without a header as a read-only memory map, uint16[n] or uint32[n].

    `dtype` "auto" takes what the suffix says (.u16.bin, .u32.bin), else uint16 where `vocab_size` <= 65536, else
    uint32. Raises DataError for a file that is missing, empty, not a whole number of ids, written as wider integers or
    in another format, or that holds an id >= `vocab_size` among the first `checked` ids (None: CHECKED_ON_OPEN).
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
    with path.open("rb") as file:
        start = file.read(8)
    for magic, what in FORMATS.items():
        if start.startswith(magic):
            raise DataError(f"{path}: holds more than token ids: it is {what}")
    tokens = np.memmap(path, dtype=DTYPES[name], mode="r")
    _check_width(tokens, path)
    check_ids(tokens[: CHECKED_ON_OPEN if checked is None else checked], vocab_size, str(path))
    return tokens


def check_ids(tokens: np.ndarray, vocab_size: int, name: str, offset: int = 0) -> None:
    """Raises DataError if an id is outside [0, vocab_size); `offset` is the place of tokens[0] in the file."""
    signed = tokens.dtype.kind == "i"
    if tokens.size and (int(tokens.max()) >= vocab_size or (signed and tokens.min() < 0)):
        place = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
        raise DataError(
            f"{name}: token id {int(tokens[place])} at position {offset + place} is outside the vocabulary; "
            f"ids must be below model.vocab_size={vocab_size} (is data.token_dtype right?)"
        )


def _check_width(tokens: np.ndarray, path: Path) -> None:
    """Raises DataError where `tokens` are halves or quarters of wider integers, whose upper parts are 0 or nearly so.

    uint32, int32 and int64 ids look so to whoever reads them as narrower ones, and no text does: half of its tokens
    would be id 0.
    """
    sample = tokens[:WIDTH_SAMPLE]
    low, high = sample[0::2], sample[1::2]
    if len(sample) < LEAST_SAMPLE:
        return
    # Ids of a vocabulary beyond 65,536 have a few bits in their upper half.
    if not (low.any() if not high.any() else high.max() <= 3 and low.max() >= 256):
        return
    width = 2 * tokens.itemsize
    if tokens.itemsize == 2 and not sample[2::4].any() and not sample[3::4].any():
        width = 8
    remedy = "set data.token_dtype=uint32" if width == 4 else "write them as uint16 or uint32 (array.astype)"
    raise DataError(
        f"{path}: its ids are {8 * width} bits wide; read as {tokens.dtype.name}, every other token is none; {remedy}"
    )


def require_file(path: Path) -> None:
    """Raises DataError, with the nearest name of the folder, unless `path` is a file."""
    if path.is_file():
        return
    if path.is_dir():
        raise DataError(f"{path}: is a folder, and a file of that name is needed")
    folder = path.parent
    known = sorted(str(folder / p.name) for p in folder.iterdir() if p.is_file()) if folder.is_dir() else []
    hint = (
        did_you_mean(str(path), known)
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


def read_text(name: str) -> np.ndarray:
    """Returns the bytes of a packaged corpus or of a `.txt` or `.txt.xz` file, uint8[n]. Raises DataError."""
    if name in CORPORA:
        data = (resources.files("taco_jax.data") / CORPORA[name]).read_bytes()
        return np.frombuffer(lzma.decompress(data), np.uint8)
    path = Path(name)
    require_file(path)
    data = path.read_bytes()
    if path.suffix == ".xz" and data:
        try:
            data = lzma.decompress(data)
        except lzma.LZMAError as error:
            raise DataError(f"{path}: corrupt xz file ({error})") from None
    if not data:
        raise DataError(f"{path}: the file is empty")
    return np.frombuffer(data, np.uint8)
