"""Prepared folders: what is read of them, and what is refused as not whole."""

import json
import re

import numpy as np
import pytest
import token_writers as write

from taco_jax import data
from taco_jax.config import DataConfig

TRAIN = [np.array([5, 6, 0, 7, 0]), np.array([], int), np.array([255, 0])]
VALIDATION = [np.array([9, 0])]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_prepared_folder(tmp_path, dtype):
    folder = write.prepared(tmp_path / "mine", TRAIN, VALIDATION, dtype=dtype)
    prepared = data.open_prepared(folder)
    assert (prepared.end_id, prepared.end_text, prepared.vocab_size) == (0, "<|end|>", 256)
    assert prepared.tokenizer == folder / "tokenizer.json" and data.is_prepared(folder)
    assert {name: [f.documents for f in files] for name, files in prepared.splits.items()} == {
        "train": [2, 0, 1],
        "validation": [1],
    }
    train = prepared.stream("train")[:]
    assert train.tolist() == [5, 6, 0, 7, 0, 255, 0] and train.dtype == dtype
    assert prepared.stream("validation")[:].tolist() == [9, 0]
    prepared.verify()
    source = data.open_source(str(folder), 300)
    assert source.tokens[:].tolist() == train.tolist() and source.validation[:].tolist() == [9, 0]
    assert source.prepared == prepared


def test_without_a_validation_part(tmp_path):
    """The end of the training tokens is held out, as of other sources."""
    tokens = [np.arange(1, 101)]
    folder = write.prepared(tmp_path / "mine", tokens)
    meta = json.loads((folder / "meta.json").read_text())
    for splits in (meta["splits"], {"train": meta["splits"]["train"]}):
        (folder / "meta.json").write_text(json.dumps(meta | {"splits": splits}))
        training, validation = data.open_data(DataConfig(train=str(folder), validation_fraction=0.1), 256)
        assert len(training) == 90 and validation[:].tolist() == list(range(91, 101))


def test_a_vocabulary_that_does_not_fit(tmp_path):
    folder = write.prepared(tmp_path / "mine", TRAIN, vocab_size=257)
    message = (
        f"{folder}: its tokenizer has 257 ids (meta.json), and model.vocab_size=256; use --model.vocab-size 257, or "
        f"data of the model's tokenizer"
    )
    with pytest.raises(data.DataError, match=f"^{re.escape(message)}$"):
        data.open_data(DataConfig(train=str(folder)), 256)
    data.open_data(DataConfig(train=str(folder)), 257)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer": '{"other": 1}'}, "b: was prepared with another tokenizer than .*a; prepare both with the same$"),
        (
            {"end": 5},
            r"b: its documents end with '<\|end\|>' \(id 5\), those of .*a with '<\|end\|>' \(id 0\)",
        ),
    ],
)
def test_folders_of_two_tokenizers(tmp_path, changes, message):
    train = tuple(
        str(write.prepared(tmp_path / name, TRAIN, **own)) for name, own in {"a": {}, "c": {}, "b": changes}.items()
    )
    with pytest.raises(data.DataError, match=message):
        data.open_data(DataConfig(train=train), 256)
    with pytest.raises(data.DataError, match=message):
        data.prepared_folders(DataConfig(train=train).sources)
    with pytest.raises(data.DataError, match=message):
        data.open_data(DataConfig(train=train[0], validation=train[2]), 256)
    first, second = data.prepared_folders(DataConfig(train=(f"{train[0]}:1", f"{train[1]}:2")).sources)
    assert str(first.folder) == train[0] and str(second.folder) == train[1]
    assert data.prepared_folders(DataConfig().sources) == []


def damage(folder, **changes):
    meta = json.loads((folder / "meta.json").read_text())
    for path, value in changes.items():
        *way, last = path.split("__")
        at = meta
        for key in way:
            at = at[int(key) if key.isdigit() else key]
        if value is None:
            del at[last]
        else:
            at[last] = value
    (folder / "meta.json").write_text(json.dumps(meta))


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def meta(**changes):
    return lambda folder: damage(folder, **changes)


BROKEN = {
    "another format": (meta(format="x"), "meta.json: its format is 'x', not 'taco_jax tokens'; give a prepared folder"),
    "no format": (meta(format=None), "its format is None"),
    "a later version": (meta(version=2), "meta.json: is of version 2; version 1 is read"),
    "half a meta.json": (cut("meta.json", 100), "meta.json: cannot be read"),
    "a list": (lambda f: (f / "meta.json").write_text("[]"), "meta.json: damaged: holds no object"),
    "a meta.json of bytes": (lambda f: (f / "meta.json").write_bytes(b"\xff\xfe"), "meta.json: cannot be read"),
    "no dtype": (meta(dtype=None), "damaged: has no 'dtype'; prepare it again"),
    "a dtype": (meta(dtype="float32"), "damaged: dtype 'float32' is none of uint16, uint32"),
    "no end token": (meta(end_token=None), "damaged: has no 'end_token'"),
    "an end token": (meta(end_token__id=256), "damaged: the end token's id 256 is not below vocab_size 256"),
    "a vocabulary": (meta(vocab_size="256"), "damaged: vocab_size '256' is no count"),
    "no train": (meta(splits__train=None), "damaged: has no split 'train'"),
    "negative": (meta(splits__train__tokens=-1), "damaged: tokens -1 is no count"),
    "no sum": (meta(splits__train__tokens=8), "damaged: the files of train do not sum to 8 tokens"),
    "outside": (meta(splits__train__files__0__name="../a"), "damaged: the file '../a' is not one of the folder's own"),
    "no files": (meta(splits__train__files=3), "damaged: 'int' object is not iterable"),
    "no name": (meta(splits__train__files__0__name=None), "damaged: has no 'name'"),
    "a missing file": (lambda f: (f / "train-00002.bin").unlink(), "train-00002.bin: missing, and meta.json names it"),
    "a missing validation": (lambda f: (f / "validation-00000.bin").unlink(), "validation-00000.bin: missing"),
    "a missing tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: missing, and meta.json"),
    "a cut file": (cut("train-00000.bin", 8), "train-00000.bin: has 8 bytes, and meta.json announces 5 tokens of 2;"),
    "no meta.json": (lambda f: (f / "meta.json").unlink(), "has no meta.json, so it is not prepared, or not"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_not_whole(tmp_path, name):
    """Neither as a prepared folder nor as one of token files."""
    folder = write.prepared(tmp_path / "mine", TRAIN, VALIDATION)
    spoil, message = BROKEN[name]
    spoil(folder)
    with pytest.raises(data.DataError, match=re.escape(message)) as error:
        data.open_prepared(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    with pytest.raises(data.DataError) as error:
        data.open_data(DataConfig(train=str(folder)), 256)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["train-00000.bin", "validation-00000.bin", "tokenizer.json"])
def test_verify_finds_a_changed_byte(tmp_path, name):
    folder = write.prepared(tmp_path / "mine", TRAIN, VALIDATION)
    content = bytearray((folder / name).read_bytes())
    content[1] ^= 1
    (folder / name).write_bytes(content)
    prepared = data.open_prepared(folder)
    with pytest.raises(data.DataError, match=f"{name}: damaged: its sha256 is not the one in meta.json"):
        prepared.verify()


def test_ids_beyond_the_vocabulary(tmp_path):
    folder = write.prepared(tmp_path / "mine", [[1, 2]], [[3, 999]], vocab_size=256)
    with pytest.raises(data.DataError, match=r"mine \(validation\): token id 999 at position 1"):
        data.open_source(str(folder), 256)


def test_nothing_to_train_on(tmp_path):
    folder = write.prepared(tmp_path / "mine", [[]], [[3, 0]])
    with pytest.raises(data.DataError, match="mine: has no tokens to train on"):
        data.open_source(str(folder), 256)
