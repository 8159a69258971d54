"""Prepared folders: token files with a `meta.json`, which `taco_jax.prepare` writes last, and the tokenizer's files.

`open_prepared` reads and checks one. meta.json is {"format": "taco_jax tokens", "version": 1, "dtype": "uint16" or
"uint32" (little-endian), "vocab_size": of the tokenizer, "largest_id": of the files, "end_token": {"text", "id"},
"tokenizer": {"file", "sha256"}, "splits": {"train": {"tokens", "documents", "files": [{"name", "tokens", "documents",
"sha256"}, ...]}, "validation": the same}, "sources": [...]}. Every document ends with the end token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from taco_jax.data.stream import TokenStream
from taco_jax.data.tokens import DTYPES, DataError

META, FORMAT, VERSION = "meta.json", "taco_jax tokens", 1
# Names of its token files. Without a meta.json beside them they are not whole.
FILE_NAME = re.compile(r"(train|validation)-\d{5}\.bin")


@dataclasses.dataclass(frozen=True)
class PreparedFile:
    """One token file of a prepared folder."""

    path: Path
    tokens: int
    documents: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prepared folder whose files are there and have their sizes.

    dtype: "uint16" or "uint32". vocab_size: the tokenizer's ids are below it. largest_id: of the files. end_text,
    end_id: of the token that ends every document. tokenizer: the path of its tokenizer.json; the tokenizer's other
    files stand beside it. splits: the files of "train" and "validation", () where there is none.
    """

    folder: Path
    dtype: str
    vocab_size: int
    end_text: str
    end_id: int
    tokenizer: Path
    tokenizer_sha256: str
    splits: dict[str, tuple[PreparedFile, ...]]
    largest_id: int

    @property
    def needed_vocabulary(self) -> int:
        """Returns the least vocabulary that has all ids of the files. Some tokenizers have tokens that their models
        lack (Gemma 3's image token)."""
        return self.largest_id + 1

    def stream(self, split: str) -> TokenStream:
        """Returns the tokens of "train" or "validation", mapped into memory, in the order of the files."""
        files = [file for file in self.splits.get(split, ()) if file.tokens]
        return TokenStream([np.memmap(file.path, DTYPES[self.dtype], mode="r") for file in files])

    def verify(self) -> None:
        """Reads all files. Raises DataError for the first one whose content is not what meta.json says."""
        files = [(file.path, file.sha256) for split in self.splits.values() for file in split]
        for path, expected in [*files, (self.tokenizer, self.tokenizer_sha256)]:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != expected:
                raise DataError(f"{path}: damaged: its sha256 is not the one in {META}; copy it again, or prepare anew")


def is_prepared(folder: str | Path) -> bool:
    return (Path(folder) / META).is_file()


def open_prepared(folder: str | Path) -> Prepared:
    """Returns a prepared folder. Raises DataError, in one line, where it is not whole or not of this format.

    The content of the files is not read; `Prepared.verify` does that.
    """
    folder = Path(folder)
    meta, path = _read(folder), folder / META
    if meta.get("format") != FORMAT:
        raise DataError(f"{path}: its format is {meta.get('format')!r}, not {FORMAT!r}; give a prepared folder")
    if meta.get("version") != VERSION:
        raise DataError(f"{path}: is of version {meta.get('version')!r}; version {VERSION} is read: prepare it again")
    try:
        prepared = _parse(folder, meta)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path}: damaged: {' '.join(what.split())}; prepare it again") from None
    for split, files in prepared.splits.items():
        for file in files:
            _check_file(file, DTYPES[prepared.dtype].itemsize)
        tokens = meta["splits"][split]["tokens"]
        if sum(file.tokens for file in files) != tokens:
            raise DataError(f"{path}: damaged: the files of {split} do not sum to {tokens:,} tokens; prepare it again")
    if not prepared.tokenizer.is_file():
        raise DataError(f"{prepared.tokenizer}: missing, and {META} names it; copy the whole folder, or prepare anew")
    return prepared


def _read(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder}: has no {META}, so it is not prepared, or not to its end; prepare it") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({' '.join(str(error).split())}); prepare it again") from None
    if not isinstance(meta, dict):
        raise DataError(f"{path}: damaged: holds no object; prepare it again")
    return meta


def _parse(folder: Path, meta: dict[str, Any]) -> Prepared:
    """Raises KeyError, TypeError or ValueError for what is missing or of another type."""
    dtype, vocab_size, end = meta["dtype"], _count(meta, "vocab_size"), meta["end_token"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    end_id = _count(end, "id")
    if not end_id < vocab_size:
        raise ValueError(f"the end token's id {end_id} is not below vocab_size {vocab_size}")
    splits = {
        name: tuple(
            PreparedFile(_inside(folder, f["name"]), _count(f, "tokens"), _count(f, "documents"), str(f["sha256"]))
            for f in split["files"]
        )
        for name, split in meta["splits"].items()
    }
    for split in meta["splits"].values():
        _count(split, "tokens")
    if "train" not in splits:
        raise ValueError("has no split 'train'")
    tokenizer = meta["tokenizer"]
    return Prepared(
        folder=folder,
        dtype=dtype,
        vocab_size=vocab_size,
        end_text=str(end["text"]),
        end_id=end_id,
        tokenizer=_inside(folder, tokenizer["file"]),
        tokenizer_sha256=str(tokenizer["sha256"]),
        splits=splits,
        largest_id=_count(meta, "largest_id") if "largest_id" in meta else vocab_size - 1,
    )


def _count(values: dict[str, Any], key: str) -> int:
    value = values[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} {value!r} is no count")
    return value


def _inside(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ValueError(f"the file {name!r} is not one of the folder's own")
    return folder / name


def _check_file(file: PreparedFile, item: int) -> None:
    if not file.path.is_file():
        raise DataError(f"{file.path}: missing, and {META} names it; copy the folder whole, or prepare it again")
    size = file.path.stat().st_size
    if size != file.tokens * item:
        raise DataError(
            f"{file.path}: has {size:,} bytes, and {META} announces {file.tokens:,} tokens of {item}; it is cut or "
            f"damaged: copy it again, or prepare it again"
        )
