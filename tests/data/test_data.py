"""Text and token files, and the iterator: what is read, in which order, from which position, and what is refused."""

import dataclasses
import itertools
import lzma
import re

import numpy as np
import pytest

from taco_jax import data
from taco_jax.config import DataConfig, EvalConfig, ModelConfig, TrainConfig
from taco_jax.data.loader import Windows


def tokens_file(path, values, dtype="<u2"):
    np.asarray(values, dtype).tofile(path)
    return str(path)


def make_batches(tokens, batch=4, length=8, seed=0, **changes):
    return data.Batches(Windows(np.asarray(tokens), length, 1 << 31, "tokens"), batch, seed=seed, **changes)


def test_packaged_corpus():
    text = data.read_text("austen")
    assert text.dtype == np.uint8 and len(text) == 3_997_869
    assert bytes(text[:14]) == b"By Jane Austen"
    training, validation = data.open_data(DataConfig(), 256)
    train = training.sources[0].tokens
    assert (
        len(training) == len(train)
        and len(train) + len(validation) == len(text)
        and abs(len(validation) / len(text) - 0.05) < 1e-6
    )
    assert np.array_equal(validation, text[len(train) :])


def test_text_files(tmp_path):
    (tmp_path / "a.txt").write_bytes("Zürich".encode())
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress("Zürich".encode()))
    for name in ("a.txt", "a.txt.xz"):
        training, validation = data.open_data(DataConfig(train=str(tmp_path / name), validation="austen"), 256)
        assert bytes(training.sources[0].tokens[:]) == "Zürich".encode() and len(validation) == 3_997_869


@pytest.mark.parametrize(
    "name, vocab, option, dtype",
    [
        ("a.bin", 50_257, "auto", "<u2"),
        ("a.bin", 1 << 16, "auto", "<u2"),
        ("a.bin", 151_936, "auto", "<u4"),
        ("a.u32.bin", 50_257, "auto", "<u4"),
        ("a.uint16.bin", 151_936, "auto", "<u2"),
        ("a.bin", 50_257, "uint32", "<u4"),
    ],
)
def test_token_files_are_mapped(tmp_path, name, vocab, option, dtype):
    path = tokens_file(tmp_path / name, [1, 2, 50_000], dtype)
    tokens = data.open_tokens(path, vocab, option)
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.dtype(dtype) and tokens.tolist() == [1, 2, 50_000]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.bin", None, "no such data file; did you mean"),
        ("missing.txt", None, "no such data file"),
        ("nofolder/a.bin", None, "does not exist"),
        ("empty.bin", b"", "the file is empty"),
        ("empty.txt", b"", "the file is empty"),
        ("empty.txt.xz", b"", "the file is empty"),
        ("odd.bin", b"\x01\x00\x02", "corrupt or not uint16: 3 bytes are not a whole number of 2-byte token ids"),
        ("odd.u32.bin", b"\x01\x00\x02\x00\x01\x00", "corrupt or not uint32"),
        ("broken.txt.xz", b"not xz at all", "corrupt xz file"),
        ("cut.txt.xz", lzma.compress(bytes(range(256)) * 99)[:-40], "corrupt xz file"),
        ("range.bin", np.array([1, 256, 7], "<u2").tobytes(), "token id 256 at position 1 is outside the vocabulary; "
         "ids must be below model.vocab_size=256"),
        ("uint32.bin", np.arange(1, 200, dtype="<u4").tobytes(), "its ids are 32 bits wide; read as uint16, every "
         "other token is none; set data.token_dtype=uint32"),
        ("int32.u16.bin", np.arange(200, dtype="<i4").tobytes(), "set data.token_dtype=uint32"),
        ("large.bin", np.arange(1 << 16, (1 << 16) + 999, dtype="<u4").tobytes(), "set data.token_dtype=uint32"),
        ("int64.bin", np.arange(200, dtype="<i8").tobytes(), "its ids are 64 bits wide; read as uint16, every"),
        ("int64.u32.bin", np.arange(200, dtype="<i8").tobytes(), "its ids are 64 bits wide; read as uint32, every"),
        ("npz.bin", b"PK\x03\x04" + bytes(124), "it is a .npz or PyTorch archive"),
        ("a.parquet", b"x", "unknown kind of data file; use .txt, .txt.xz (read as bytes), .bin, .npy, .idx (token "
         "ids), or a folder of token files"),
        ("austin", None, "no such corpus; did you mean 'austen'?"),
    ],
)  # fmt: skip
def test_unusable_files(tmp_path, name, content, message):
    (tmp_path / "mising.bin").write_bytes(b"\0\0")
    path = tmp_path / name if "." in name else name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(data.DataError, match=re.escape(message)) as error:
        data.open_data(DataConfig(train=str(path)), 256)
    assert "\n" not in str(error.value)


def test_widths_that_are_right(tmp_path):
    """Zeros, small vocabularies and ids at the upper end are no sign of another width."""
    draw = np.random.default_rng(0).integers
    for vocab, dtype, ids in (
        (65_536, "<u2", np.full(999, 65_535)),
        (256, "<u2", np.zeros(999)),
        (2, "<u2", draw(0, 2, 999)),
        (5, "<u2", draw(0, 5, 999)),
        (50_257, "<u2", np.repeat(draw(0, 50_257, 500), 2)),
        (151_936, "<u4", draw(0, 151_936, 999)),
    ):
        tokens = data.open_tokens(tokens_file(tmp_path / "a.bin", ids, dtype), vocab)
        assert np.array_equal(tokens, ids) and tokens.dtype == dtype


def test_bytes_need_a_vocabulary_of_256():
    with pytest.raises(data.DataError, match="outside the vocabulary; ids must be below model.vocab_size=100"):
        data.open_data(DataConfig(), 100)


def test_ids_past_the_part_checked_on_opening(monkeypatch, tmp_path):
    """Windows check their ids again, and name the place; the message comes out of the reading thread."""
    monkeypatch.setattr("taco_jax.data.tokens.CHECKED_ON_OPEN", 4)
    tokens = data.open_tokens(tokens_file(tmp_path / "a.bin", [1] * 30 + [999] * 4), 256)
    batches = data.Batches(Windows(tokens, 8, 256, "a.bin"), 4, seed=0)
    with pytest.raises(data.DataError, match="a.bin: token id 999 at position 30"):
        next(batches)


def test_too_short():
    with pytest.raises(data.DataError, match="too short: 8 tokens, one window needs data.sequence_length \\+ 1 = 9"):
        Windows(np.zeros(8, np.uint16), 8, 256, "a.bin")
    assert len(Windows(np.zeros(9, np.uint16), 8, 256, "a.bin")) == 1


def test_windows_predict_every_token_once():
    windows = Windows(np.arange(8 * 5 + 1), 8, 256, "")
    predicted = np.concatenate([windows[i][1:] for i in range(len(windows))])
    assert predicted.tolist() == list(range(1, 41)) and windows[3].dtype == np.int32
    assert all(windows[i][0] == windows[i - 1][-1] for i in range(1, 5))


def test_epochs_are_permutations_that_differ():
    batches = make_batches(np.arange(8 * 12 + 1), batch=4)
    epochs = [np.concatenate([next(batches)[:, 0] for _ in range(3)]) // 8 for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(12))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_the_seed_alone():
    tokens = np.arange(8 * 50 + 1)
    order = lambda **changes: np.concatenate([b[:, 0] for b in itertools.islice(make_batches(tokens, **changes), 6)])
    assert np.array_equal(order(), order(prefetch=0)) and not np.array_equal(order(), order(seed=1))
    assert np.array_equal(order(batch=8)[:24], order(batch=4))


@pytest.mark.parametrize("batch", [4, 6, 1])
def test_position_is_a_sample_count(batch):
    """A run goes on with the next unseen window on another batch size too, across the end of an epoch."""
    tokens = np.arange(8 * 10 + 1)
    whole = make_batches(tokens, batch=1)
    expected = [int(next(whole)[0, 0]) for _ in range(8 + 2 * batch)]
    first = make_batches(tokens, batch=4)
    next(first), next(first)
    state = first.state()
    own = {"name": "tokens", "windows": 10, "proportion": None, "digest": state["sources"][0]["digest"]}
    assert state == {"samples": 8, "seed": 0, "windows": 10, "sources": [own]}
    second = make_batches(tokens, batch=batch)
    second.restore(state)
    assert [*next(second)[:, 0], *next(second)[:, 0]] == expected[8:]
    assert second.samples == 8 + 2 * batch


def test_other_seed_or_data_is_refused():
    state = make_batches(np.arange(81)).state()
    with pytest.raises(data.DataError, match="seed=1: .* drawn with seed 0; use --seed 0 or another --workdir"):
        make_batches(np.arange(81), seed=1).restore(state)
    with pytest.raises(data.DataError, match="has 20 windows, the checkpoint's data had 10"):
        make_batches(np.arange(161)).restore(state)


def test_validation_covers_every_window_once():
    config = TrainConfig(data=DataConfig(sequence_length=8), global_batch=4, model=ModelConfig(vocab_size=256))
    batches = list(data.evaluation_batches(config, np.arange(8 * 6 + 1)))
    assert [b["tokens"].shape for b in batches] == [(4, 9)] * 2
    seen = np.concatenate([b["tokens"][:, 1:][b["weights"] > 0] for b in batches])
    assert seen.tolist() == list(range(1, 49))
    few = dataclasses.replace(config, evaluation=EvalConfig(batches=1))
    assert len(list(data.evaluation_batches(few, np.arange(49)))) == 1
    off = dataclasses.replace(config, evaluation=EvalConfig(batches=0))
    assert list(data.evaluation_batches(off, np.arange(3))) == []
    with pytest.raises(data.DataError, match="the validation part of austen: too short"):
        data.evaluation_batches(config, np.arange(8))
    with pytest.raises(data.DataError, match="use a longer file, other data.validation, or evaluation.batches=0"):
        data.evaluation_batches(config, np.arange(1))  # no length would do


def test_device_batch_is_the_whole_batch(make_mesh):
    from jax.sharding import NamedSharding, PartitionSpec

    batch = np.arange(12, dtype=np.int32).reshape(4, 3)
    placed = data.device_batch({"tokens": batch}, NamedSharding(make_mesh(dp=2, tp=4), PartitionSpec("dp")))["tokens"]
    assert np.array_equal(placed, batch) and placed.addressable_shards[0].data.shape == (2, 3)
