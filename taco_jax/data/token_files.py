"""Token files of other programs, read in place: Megatron's .bin with .idx, llm.c's .bin, NumPy's .npy.

`open_token_file` tells them apart: by an .idx beside, by their first bytes, else they are ids alone
(`taco_jax.data.tokens`).
"""

from __future__ import annotations

import tokenize
from pathlib import Path

import numpy as np

from taco_jax.data import tokens as raw
from taco_jax.data.stream import TokenStream
from taco_jax.data.tokens import DataError, check_ids, require_file

TOKEN_SUFFIXES = (".bin", ".npy")

# Megatron's index, version 1 (megatron/core/datasets/indexed_dataset.py), all little-endian: magic, uint64 version,
# uint8 type of the ids, uint64 S sequences, uint64 D entries of the document index, int32[S] lengths of the sequences
# in ids, int64[S] their first bytes in the .bin, int64[D] the first sequence of each document and S, and, of multimodal
# data, int8[S] modes.
MEGATRON_MAGIC, MEGATRON_OLD_MAGIC = b"MMIDIDX\0\0", b"TNTIDX\0\0"
MEGATRON_FIELDS = [("magic", "V9"), ("version", "<u8"), ("type", "u1"), ("sequences", "<u8"), ("documents", "<u8")]
MEGATRON_HEADER = np.dtype(MEGATRON_FIELDS)
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "float64", 7: "float32", 8: "<u2"}
# Sequences whose places are looked at together, so that memory does not grow with the index.
SEQUENCES_AT_ONCE = 1 << 20
# Ids that are checked together, since those of several pieces are copied for it.
IDS_AT_ONCE = 1 << 20
# Bytes; places beyond it are damage, and would overflow.
LARGEST_FILE = 1 << 60

# llm.c's header is 256 int32: magic, version, number of ids. Magic -> type of the ids and versions; the last one is
# modded-nanogpt's.
LLMC_HEADER = 256 * 4
LLMC = {20240520: ("<u2", (1,)), 20240801: ("<u4", (1, 7)), 20251013: ("<u4", (1,))}
LLMC_EVALUATION = 20240522

NPY_MAGIC = b"\x93NUMPY"


def megatron_prefix(name: str | Path) -> Path | None:
    """Returns the path without suffix of a Megatron pair that `name` means: its .bin, its .idx, or neither's suffix."""
    path = Path(name)
    bare = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return bare if path.suffix == ".idx" or _with(bare, ".idx").is_file() else None


def open_token_file(path: str | Path, vocab_size: int, dtype: str = "auto", checked: int | None = None) -> TokenStream:
    """Returns the ids of a token file of any kind, mapped into memory.

    dtype: as `tokens.open_tokens` has it, for files that do not say their type. checked: ids that are compared with
    `vocab_size` now; None: `tokens.CHECKED_ON_OPEN`. Raises DataError.
    """
    path = Path(path)
    checked = raw.CHECKED_ON_OPEN if checked is None else checked
    prefix = megatron_prefix(path)
    if prefix is not None:
        stream = _open_megatron(prefix)
    else:
        require_file(path)
        with path.open("rb") as file:
            start = file.read(LLMC_HEADER)
        if start.startswith(NPY_MAGIC) or path.suffix == ".npy":
            stream = _open_npy(path, start)
        elif (found := _open_llmc(path, start)) is not None:
            stream = found
        else:
            return TokenStream([raw.open_tokens(path, vocab_size, dtype, checked)])
    check_stream(stream, vocab_size, str(path), checked)
    return stream


def check_stream(stream: TokenStream, vocab_size: int, name: str, checked: int) -> None:
    """Raises DataError if one of the first `checked` ids is outside [0, vocab_size)."""
    for start in range(0, min(checked, len(stream)), IDS_AT_ONCE):
        check_ids(stream[start : min(start + IDS_AT_ONCE, checked)], vocab_size, name, start)


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _open_llmc(path: Path, start: bytes) -> TokenStream | None:
    """None where the file has no header of llm.c."""
    if len(start) < 12:
        return None
    magic, version, count = np.frombuffer(start, "<u4", 3).tolist()
    if magic == LLMC_EVALUATION:
        raise DataError(f"{path}: holds questions of llm.c's evaluations, not text; give a file of tokens")
    if magic not in LLMC:
        return None
    dtype, versions = LLMC[magic]
    if version not in versions:
        known = " or ".join(map(str, versions))
        raise DataError(f"{path}: has llm.c's header (magic {magic}) of version {version}; versions {known} are read")
    size, expected = path.stat().st_size, LLMC_HEADER + count * np.dtype(dtype).itemsize
    if size != expected:
        raise DataError(
            f"{path}: its header announces {count:,} ids, {expected:,} bytes, and the file has {size:,}; it is cut or "
            f"damaged: copy it again"
        )
    if not count:
        raise DataError(f"{path}: the file is empty")
    return TokenStream([np.memmap(path, dtype, mode="r", offset=LLMC_HEADER, shape=(count,))])


def _open_npy(path: Path, start: bytes) -> TokenStream:
    if not start:
        raise DataError(f"{path}: the file is empty")
    if not start.startswith(NPY_MAGIC):
        raise DataError(f"{path}: is no NumPy .npy file (np.save writes them)")
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, columns_first, dtype = read(file)
            offset = file.tell()
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"shape {shape}")
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise DataError(f"{path}: damaged NumPy header ({' '.join(str(error).split())})") from None
    if dtype.kind not in "iu":
        raise DataError(f"{path}: holds an array of {dtype}; token ids are integers: save array.astype(np.uint32)")
    if len(shape) not in (1, 2):
        raise DataError(f"{path}: has {len(shape)} dims; one row of ids, or rows that are joined, need 1 or 2")
    size, expected = path.stat().st_size, offset + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if size != expected:
        raise DataError(
            f"{path}: its header announces {expected:,} bytes, an array of shape {shape}, and the file has {size:,}; "
            f"it is cut or damaged: save it again"
        )
    if 0 in shape:
        raise DataError(f"{path}: the file is empty")
    array = np.memmap(path, dtype, mode="r", offset=offset, shape=shape, order="F" if columns_first else "C")
    return TokenStream([_Rows(array) if columns_first and len(shape) == 2 else array.reshape(-1)])


class _Rows:
    """The rows of a 2-D array that is stored column by column, joined."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def __len__(self) -> int:
        return self._array.size

    def __getitem__(self, key: slice) -> np.ndarray:
        return self._array[np.divmod(np.arange(key.start, key.stop), self._array.shape[1])]


def _open_megatron(prefix: Path) -> TokenStream:
    """Raises DataError where the index is damaged, or not that of the .bin beside it."""
    index, data = _with(prefix, ".idx"), _with(prefix, ".bin")
    require_file(index)
    if not data.is_file():
        raise DataError(f"{index}: the {data.name} that it belongs to is missing beside it")
    dtype, lengths, pointers = _read_index(index)
    size, item = data.stat().st_size, dtype.itemsize
    pieces = _joined_pieces(lengths, pointers, item)
    if pieces is None:
        raise DataError(f"{index}: damaged: a sequence begins or ends where no id does; write it again")
    end = int((pieces[:, 1] + pieces[:, 2]).max(initial=0)) * item
    # An index that picks sequences may leave out the last ones.
    if end > size or (len(pieces) <= 1 and end < size) or size % item:
        raise DataError(
            f"{index}: does not fit {data.name}: its sequences end at byte {end:,}, and the file has {size:,} bytes; "
            f"one of them is cut, or that of another run"
        )
    if not end:
        raise DataError(f"{data}: the file is empty")
    return TokenStream([np.memmap(data, dtype, mode="r")], pieces)


def _read_index(index: Path) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """Returns the type of the ids, int32[S] lengths of the sequences in ids, int64[S] their first bytes."""
    size, start = index.stat().st_size, index.open("rb").read(MEGATRON_HEADER.itemsize)
    if start.startswith(MEGATRON_OLD_MAGIC):
        raise DataError(f"{index}: is an index of Megatron's old kind (TNTIDX); write it with --dataset-impl mmap")
    if not start.startswith(MEGATRON_MAGIC):
        raise DataError(
            f"{index}: is no index of Megatron; if the .bin beside it holds ids alone, move the .idx out of the folder"
        )
    cut = DataError(f"{index}: the index is cut or damaged ({size:,} bytes); copy it again")
    if len(start) < MEGATRON_HEADER.itemsize:
        raise cut
    header = np.frombuffer(start, MEGATRON_HEADER)[0]
    version, code, count, documents = (int(header[key]) for key in ("version", "type", "sequences", "documents"))
    if version != 1:
        raise DataError(f"{index}: is an index of version {version}; version 1 is read")
    if code not in MEGATRON_TYPES:
        raise DataError(f"{index}: unknown type of ids {code}; known: {', '.join(map(str, MEGATRON_TYPES))}")
    dtype = np.dtype(MEGATRON_TYPES[code])
    if dtype.kind == "f":
        raise DataError(f"{index}: says that the ids are {dtype}; token ids are integers")
    places = len(start) + np.cumsum([0, 4 * count, 8 * count, 8 * documents], dtype=object)
    modes = size - places[3]
    if modes not in (0, count):
        raise cut

    def part(kind: str, place: int, n: int) -> np.ndarray:
        return np.memmap(index, kind, mode="r", offset=int(place), shape=(n,)) if n else np.zeros(0, kind)

    first_sequences = part("<i8", places[2], documents)
    if not documents or first_sequences[0] != 0 or first_sequences[-1] != count:
        raise DataError(f"{index}: damaged: its document index does not go from 0 to its {count:,} sequences")
    if modes and part("i1", places[3], count).any():
        raise DataError(f"{index}: holds sequences that are no text (multimodal modes); give data of text alone")
    return dtype, part("<i4", places[0], count), part("<i8", places[1], count)


def _joined_pieces(lengths: np.ndarray, pointers: np.ndarray, item: int) -> np.ndarray | None:
    """Returns (0, first id, ids) of runs of sequences that lie one behind the other: one run, as Megatron writes them.

    None where a sequence begins or ends where no id does.
    """
    starts, ends, end_before = [], [], -1
    for at in range(0, len(lengths), SEQUENCES_AT_ONCE):
        length = np.asarray(lengths[at : at + SEQUENCES_AT_ONCE], np.int64)
        start = np.asarray(pointers[at : at + SEQUENCES_AT_ONCE])
        if length.min() < 0 or start.min() < 0 or start.max() > LARGEST_FILE or (start % item).any():
            return None
        end = start + length * item
        before = np.concatenate([[end_before], end[:-1]])
        begins = start != before
        starts.append(start[begins])
        ends.append(before[begins])
        end_before = int(end[-1])
    if not starts:
        return np.zeros((0, 3), np.int64)
    # Where a run begins, the one before it has ended; the first one's -1 is no end.
    first, last = np.concatenate(starts) // item, np.concatenate([*ends, [end_before]])[1:] // item
    return np.stack([np.zeros_like(first), first, last - first], axis=1)
