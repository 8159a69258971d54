"""Token files of other programs, written independently (`token_writers`): what is read, and what is refused."""

import re

import numpy as np
import pytest
import token_writers as write

from taco_jax import data
from taco_jax.data.stream import TokenStream
from taco_jax.data.token_files import SEQUENCES_AT_ONCE

DRAW = np.random.default_rng(0)
ALL_KINDS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", ">u2", ">i4"]


def sequences(high=120, count=40):
    """Documents of several lengths, empty ones among them."""
    return [DRAW.integers(0, high, int(n)) for n in DRAW.integers(0, 9, count)]


def is_mapped(stream):
    """No array of the stream was read into memory."""
    maps = lambda a: isinstance(a, np.memmap) or (isinstance(a, np.ndarray) and maps(a.base))
    inner = lambda a: all(map(inner, a._arrays)) if isinstance(a, TokenStream) else maps(getattr(a, "_array", a))
    return inner(stream)


def same(stream, ids):
    """All ids, and every slice: windows of any place and length."""
    assert len(stream) == len(ids) and np.array_equal(np.asarray(stream), ids) and is_mapped(stream)
    for start, stop in [*DRAW.integers(0, len(ids) + 9, (50, 2)), (0, len(ids)), (5, 5)]:
        assert np.array_equal(stream[int(start) : int(stop)], ids[start:stop]), (start, stop)


@pytest.mark.parametrize("dtype", [k for k, code in write.MEGATRON_CODES.items() if "float" not in k])
def test_megatron(tmp_path, dtype):
    parts = sequences()
    path = write.megatron(tmp_path / "mine_text_document", parts, dtype, documents=[0, 3, 3, 17, len(parts)])
    for name in (path, path.with_suffix(".idx"), path.with_suffix("")):
        same(data.open_source(str(name), 256).tokens, np.concatenate(parts))


def test_megatron_with_modes_of_text(tmp_path):
    parts = sequences()
    same(
        data.open_token_file(write.megatron(tmp_path / "a", parts, modes=[0] * len(parts)), 256), np.concatenate(parts)
    )


@pytest.mark.parametrize("at_once", [SEQUENCES_AT_ONCE, 3, 1])
def test_a_megatron_index_may_order_and_pick_sequences(monkeypatch, tmp_path, at_once):
    monkeypatch.setattr("taco_jax.data.token_files.SEQUENCES_AT_ONCE", at_once)
    ids = DRAW.integers(0, 256, 100).astype("<u2")
    places = [(90, 10), (0, 5), (5, 7), (12, 1), (40, 0), (40, 20), (20, 3), (23, 9)]
    parts = [ids[at : at + n] for at, n in places]
    pointers = [2 * at for at, n in places]
    path = write.megatron(tmp_path / "a", parts, "uint16", pointers=pointers, content=ids.tobytes())
    same(data.open_token_file(path, 256), np.concatenate(parts))


@pytest.mark.parametrize("magic, version", [(20240520, 1), (20240801, 7), (20240801, 1), (20251013, 1)])
def test_llmc(tmp_path, magic, version):
    ids = DRAW.integers(0, 50_257, 999)
    same(data.open_token_file(write.llmc(tmp_path / "a_000000.bin", ids, magic, version), 50_257), ids)


@pytest.mark.parametrize("dtype", ALL_KINDS)
def test_npy(tmp_path, dtype):
    ids = DRAW.integers(0, 120, (12, 35)).astype(dtype)
    for name, array in (("flat", ids.reshape(-1)), ("rows", ids), ("columns", np.asfortranarray(ids))):
        np.save(tmp_path / f"{name}.npy", array)
        same(data.open_token_file(tmp_path / f"{name}.npy", 256), ids.reshape(-1))
    (tmp_path / "flat.npy").rename(tmp_path / "a.bin")
    same(data.open_token_file(tmp_path / "a.bin", 256), ids.reshape(-1))


def test_a_folder_is_its_files_in_order(tmp_path):
    parts = [DRAW.integers(0, 256, n) for n in (30, 1, 44, 12)]
    write.llmc(tmp_path / "a_002.bin", parts[1])
    parts[0].astype("<u2").tofile(tmp_path / "a_001.bin")
    np.save(tmp_path / "b.npy", parts[3])
    write.megatron(tmp_path / "a_003", [parts[2]])
    (tmp_path / "README.md").write_text("of these files")
    (tmp_path / ".hidden.bin").write_bytes(b"?")
    (tmp_path / "more").mkdir()
    opened = data.open_source(str(tmp_path), 256)
    same(opened.tokens, np.concatenate(parts))
    assert opened.validation is None


@pytest.mark.parametrize("names", ["train.bin val.bin", "c_train_00001.bin c_val_00000.bin", "a.u16.bin valid.u16.bin"])
def test_names_say_what_is_for_validation(tmp_path, names):
    """nanoGPT's and llm.c's. Nothing is trained on a file that is named test."""
    train, validation = names.split()
    for name, ids in ((train, [1, 2]), (validation, [3]), ("test.bin", [9])):
        np.asarray(ids, "<u2").tofile(tmp_path / name)
    opened = data.open_source(str(tmp_path), 256)
    assert opened.tokens[:].tolist() == [1, 2] and opened.validation[:].tolist() == [3]
    (tmp_path / train).unlink()
    alone = data.open_source(str(tmp_path), 256)
    assert sorted(alone.tokens[:].tolist()) == [3, 9] and alone.validation is None


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])
    return path


def patched(path, place, new):
    content = bytearray(path.read_bytes())
    content[place : place + len(new)] = new
    path.write_bytes(content)
    return path


def pair(folder, **options):
    return write.megatron(folder / "a", [[1, 2, 3], [4], [5, 6]], **options)


def index(folder, **options):
    return pair(folder, **options).with_suffix(".idx")


def saved(folder, array):
    np.save(folder / "a.npy", array)
    return folder / "a.npy"


def header(folder, shape, size):
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    (folder / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(size))
    return folder / "a.npy"


UNUSABLE = {
    "megatron, a cut index": (lambda f: cut(index(f), 60), "a.idx: the index is cut or damaged (60 bytes)"),
    "megatron, a cut header": (lambda f: cut(index(f), 20), "a.idx: the index is cut or damaged (20 bytes)"),
    "megatron, a longer index": (lambda f: patched(index(f), 102, b"\0" * 50), "a.idx: the index is cut or damaged"),
    "megatron, a cut .bin": (lambda f: cut(pair(f), 20), "a.idx: does not fit a.bin: its sequences end at byte 24, and "
                             "the file has 20 bytes"),
    "megatron, a longer .bin": (lambda f: pair(f, content=bytes(28)), "a.idx: does not fit a.bin"),
    "megatron, half an id": (lambda f: pair(f, content=bytes(26), pointers=[4, 16, 20]), "does not fit a.bin"),
    "megatron, no .bin": (lambda f: (pair(f).unlink(), f / "a.idx")[1], "the a.bin that it belongs to is missing"),
    "megatron, no .idx": (lambda f: f / "a.idx", "a.idx: no such data file"),
    "megatron, a version": (lambda f: patched(index(f), 9, b"\2"), "is an index of version 2; version 1 is read"),
    "megatron, a type": (lambda f: patched(index(f), 17, b"\x0b"), "a.idx: unknown type of ids 11"),
    "megatron, floats": (lambda f: index(f, dtype="float32"), "a.idx: says that the ids are float32"),
    "megatron, negative length": (lambda f: patched(index(f), 34, b"\xff" * 4), "begins or ends where no id does"),
    "megatron, place in an id": (lambda f: patched(index(f), 46, b"\2"), "begins or ends where no id does"),
    "megatron, a place far away": (lambda f: patched(index(f), 46, b"\0" * 7 + b"\x7f"), "begins or ends where no id"),
    "megatron, other documents": (lambda f: index(f, documents=[0, 2]), "document index does not go from 0 to its 3"),
    "megatron, no documents": (lambda f: index(f, documents=[]), "document index does not go from 0 to its 3"),
    "megatron, pictures": (lambda f: index(f, modes=[0, 1, 0]), "a.idx: holds sequences that are no text"),
    "megatron, the old kind": (lambda f: patched(index(f), 0, b"TNTIDX\0\0"), "is an index of Megatron's old kind"),
    "megatron, another .idx": (lambda f: patched(index(f), 0, b"x"), "a.idx: is no index of Megatron; if the .bin"),
    "megatron, nothing": (lambda f: write.megatron(f / "a", []), "a.bin: the file is empty"),
    "megatron, a large id": (lambda f: write.megatron(f / "a", [[1], [2, 300]]), "a.bin: token id 300 at position 2"),
    "megatron, a negative id": (lambda f: write.megatron(f / "a", [[1], [-2]]), "a.bin: token id -2 at position 1"),
    "an index named .bin": (lambda f: index(f).rename(f / "b.bin"), "holds more than token ids: it is the index"),
    "llm.c, a version": (lambda f: write.llmc(f / "a.bin", [1], version=2), "(magic 20240520) of version 2; version"),
    "llm.c, cut": (lambda f: cut(write.llmc(f / "a.bin", range(9)), 1040), "a.bin: its header announces 9 ids, 1,042 "
                   "bytes, and the file has 1,040; it is cut"),
    "llm.c, a cut header": (lambda f: cut(write.llmc(f / "a.bin", []), 900), "it is cut or damaged"),
    "llm.c, longer": (lambda f: write.llmc(f / "a.bin", range(9), count=8), "its header announces 8 ids, 1,040 bytes"),
    "llm.c, nothing": (lambda f: write.llmc(f / "a.bin", []), "a.bin: the file is empty"),
    "llm.c, questions": (lambda f: write.llmc(f / "a.bin", [1], magic=20240522), "holds questions of llm.c's"),
    "llm.c, a large id": (lambda f: write.llmc(f / "a.bin", [1, 256]), "a.bin: token id 256 at position 1"),
    "npy, floats": (lambda f: saved(f, np.ones(9)), "a.npy: holds an array of float64; token ids are integers"),
    "npy, booleans": (lambda f: saved(f, np.ones(9, bool)), "a.npy: holds an array of bool"),
    "npy, objects": (lambda f: saved(f, np.array([None, 1])), "a.npy: holds an array of object"),
    "npy, three dims": (lambda f: saved(f, np.ones((2, 2, 2), int)), "a.npy: has 3 dims"),
    "npy, one number": (lambda f: saved(f, np.int32(7)), "a.npy: has 0 dims"),
    "npy, nothing": (lambda f: saved(f, np.zeros(0, int)), "a.npy: the file is empty"),
    "npy, no bytes": (lambda f: cut(saved(f, np.zeros(9, int)), 0), "a.npy: the file is empty"),
    "npy, cut": (lambda f: cut(saved(f, np.arange(99)), 800), "and the file has 800; it is cut or damaged"),
    "npy, a cut header": (lambda f: cut(saved(f, np.arange(99)), 40), "a.npy: damaged NumPy header"),
    "npy, a shape of no numbers": (lambda f: header(f, "(True,)", 8), "a.npy: damaged NumPy header (shape (True,))"),
    "npy, a negative shape": (lambda f: header(f, "(-9,)", 72), "a.npy: damaged NumPy header (shape (-9,))"),
    "npy, a header of brackets": (lambda f: header(f, "(" * 3000, 8), "a.npy: damaged NumPy header ("),
    "npy, ids alone": (lambda f: np.arange(9).tofile(f / "a.npy") or f / "a.npy", "a.npy: is no NumPy .npy file"),
    "npy, a negative id": (lambda f: saved(f, np.array([1, -1])), "a.npy: token id -1 at position 1"),
    "a folder of another name": (lambda f: (pair(f), f / "aa")[1], "aa: no such data file or folder; did you mean "),
    "a file in no folder": (lambda f: f / "b" / "a", "a: no such data file or folder; the folder "),
    "nothing alike": (lambda f: f / "zzz.parquet" / "..", "no such data file or folder; the folder "),
    "a folder without data": (lambda f: f, "holds neither meta.json nor token files (.bin, .npy)"),
    "a folder of text": (lambda f: ((f / "a.txt").write_text("a"), f)[1], "holds neither meta.json nor token files"),
    "a folder, an .idx alone": (lambda f: (pair(f).unlink(), f)[1], "the a.bin that it belongs to is missing"),
    "a folder, a bad file": (lambda f: (pair(f), write.llmc(f / "b.bin", []), f)[2], "b.bin: the file is empty"),
    "a folder in its first file": (lambda f: ((f / "train-00000.bin.part").write_bytes(b""), f)[1], "was not prepared "
                                   "to its end; run its python -m taco_jax.prepare again"),
    "an unfinished folder": (lambda f: ((f / "train-00000.bin").write_bytes(b"\1\0"), f)[1], "holds train-00000.bin "
                             "and no meta.json, so it was not prepared to its end"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable(tmp_path, name):
    make, message = UNUSABLE[name]
    with pytest.raises(data.DataError, match=re.escape(message)) as error:
        data.open_source(str(make(tmp_path)), 256)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("size", range(0, 130, 7))
def test_a_pair_cut_anywhere_is_refused(tmp_path, size):
    path = write.megatron(tmp_path / "a", [[1, 2, 3], [4], [5, 6]], modes=[0, 0, 0])
    for suffix in (".idx", ".bin"):
        whole = path.with_suffix(suffix).read_bytes()
        if size < len(whole) - 3 or size < len(whole) and suffix == ".bin":  # without its modes an index is whole
            cut(path.with_suffix(suffix), size)
            with pytest.raises(data.DataError):
                data.open_token_file(path, 256)
        path.with_suffix(suffix).write_bytes(whole)


def test_ids_are_checked_where_they_are_read(monkeypatch, tmp_path):
    """Those beyond the part that is looked at on opening, in every file of a folder."""
    monkeypatch.setattr("taco_jax.data.tokens.CHECKED_ON_OPEN", 4)
    write.llmc(tmp_path / "a.bin", [1] * 30 + [999])
    write.llmc(tmp_path / "b.bin", [1] * 30)
    stream = data.open_source(str(tmp_path), 256).tokens
    batches = data.Batches(data.loader.Windows(stream, 60, 256, "mine"), 1, seed=0)
    with pytest.raises(data.DataError, match="mine: token id 999 at position 30 is outside the vocabulary"):
        next(batches)


def test_a_streams_digest(tmp_path):
    """The ids alone count, not how files hold them; any id that a small stream has, and the number of them."""
    ids = DRAW.integers(0, 256, 1000)
    streams = [
        data.open_token_file(write.llmc(tmp_path / "a.bin", ids), 256),
        data.open_token_file(write.megatron(tmp_path / "b", np.split(ids, 10), "int64"), 256),
        TokenStream([ids[:300].astype(">u4"), ids[300:]]),
        TokenStream([ids, ids]).part(1000, 2000),
    ]
    assert len({stream.digest() for stream in streams}) == 1
    others = [ids[:-1], ids[::-1], np.where(np.arange(1000) == 999, ids + 1, ids), np.append(ids, 0)]
    assert streams[0].digest() not in {TokenStream([other]).digest() for other in others}
    assert TokenStream([ids[:0]]).digest() != TokenStream([ids[:1]]).digest()
