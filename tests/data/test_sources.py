"""Several sources: their text, their shares, the order at any position, and what a checkpoint refuses."""

import dataclasses
import functools
import itertools
import json
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import token_writers as write

from taco_jax import data
from taco_jax.config import ConfigError, DataConfig, ModelConfig, TrainConfig, cli
from taco_jax.config.data_sources import DataSource, parse_sources, proportions
from taco_jax.data.loader import Interleaved, Windows

LENGTH = 8


@pytest.mark.parametrize(
    "text, sources, ratio",
    [
        ("mine", [("mine", None)], None),
        ("mine:1", [("mine", 1.0)], None),
        (("mine:0.7", "other:0.3"), [("mine", 0.7), ("other", 0.3)], (7, 3)),
        (("mine:7", "other:3"), [("mine", 7.0), ("other", 3.0)], (7, 3)),
        (("a:1e0", "b:0.25", "c:1.5"), [("a", 1.0), ("b", 0.25), ("c", 1.5)], (4, 1, 6)),
        (("a:0.33", "b:0.33", "c:0.33"), [("a", 0.33), ("b", 0.33), ("c", 0.33)], (1, 1, 1)),
        (("mine", "other"), [("mine", None), ("other", None)], None),
        (("C:/mine", "dir:x/other"), [("C:/mine", None), ("dir:x/other", None)], None),
    ],
)
def test_text_of_sources(text, sources, ratio):
    parsed = parse_sources(text)
    assert parsed == tuple(DataSource(*source) for source in sources) and proportions(parsed) == ratio


@pytest.mark.parametrize(
    "train, message",
    [
        (("a:0", "b:1"), "data.train='a:0': the weight must be above 0 and finite; try a:0.5"),
        (("a:-1", "b:1"), "data.train='a:-1': the weight must be above 0"),
        (("a:nan", "b:1"), "data.train='a:nan': the weight must be above 0"),
        (("a:inf", "b:1"), "data.train='a:inf': the weight must be above 0"),
        (("a:1e-999999999", "b:1"), "data.train='a:1e-999999999': the weight must be above 0"),
        (("tests:half", "b:1"), "data.train='tests:half': the weight 'half' is no number; try tests:0.5"),
        ((":0.5", "b:1"), "data.train=':0.5': has a weight and no source; say SOURCE:0.5"),
        (("a:0.5", "b"), "data.train='b': has no weight, and others have; give all of them one, or none"),
        (("a:0.7", "b:0.2"), "data.train: the weights 0.7, 0.2 sum to 0.9; shares must sum to 1, and ratios have a"),
        (("a:0.7", "b:0.7"), "data.train: the weights 0.7, 0.7 sum to 1.4; shares must sum to 1"),
        ("a:0.7", "data.train: the weights 0.7 sum to 0.7"),
        (("a:1", "b:1", "./a:1"), "data.train='./a': named twice (as 'a'); name a source once, with a weight"),
        ((), "data.train=(): must name a source of tokens, or several; try austen"),
        ("", "data.train='': must name a source of tokens"),
        (("a", 1), "data.train=('a', 1): must name a source of tokens"),
        ("a" * 5000, f"data.train='{'a' * 57}...': cannot be read (File name too long)"),
        (("b:1", "a\0:1"), "data.train='a\\x00:1': cannot be read (embedded null byte)"),
        (3, "data.train=3: must be of type str or tuple, is int"),
    ],
)
def test_text_that_cannot_be(repository, monkeypatch, train, message):
    monkeypatch.chdir(repository)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as error:
        DataConfig(train=train)
    assert "\n" not in str(error.value)


def test_validation_is_a_path_too():
    with pytest.raises(ConfigError, match="data.validation='aaa.*cannot be read .File name too long"):
        DataConfig(validation="a" * 5000)


def test_validation_has_no_weight():
    message = "data.validation='b:0.5': is one source, which has no weight; say b"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        DataConfig(validation="b:0.5")


def test_flags_and_files_of_one_and_several(tmp_path):
    parse = lambda *flags: cli.parse(list(flags)).data.train
    assert parse() == "austen" and parse("--data.train", "mine") == parse("--data.train=mine") == "mine"
    both = ("mine:0.7", "other:0.3")
    assert parse("--data.train", *both, "--steps", "3") == both
    assert parse("--data.train", "mine:0.7", "--data.train=other:0.3") == both
    with pytest.raises(ConfigError, match="^data.train='b': has no weight"):
        parse("--data.train", "a:0.5", "b")
    text = "from taco_jax.config import *\nconfig = TrainConfig(data=DataConfig(train=['a', 'b']))"
    (tmp_path / "run.py").write_text(text)
    assert parse("--config", str(tmp_path / "run.py")) == ("a", "b")
    assert parse("--config", str(tmp_path / "run.py"), "--data.train", "c") == "c"


@pytest.mark.parametrize("train", ["mine", ("mine",), ["mine"], ("mine:0.7", "other:0.3")])
def test_a_configuration_survives_json(train):
    """One source stays the text that it was in all configurations there are."""
    config = DataConfig(train=train)
    assert DataConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert config.train == ("mine" if len(train) in (1, 4) else ("mine:0.7", "other:0.3"))


@pytest.mark.parametrize("parts", [(7, 3), (3, 7), (1, 1), (1, 1000), (5, 2, 4), (1,), (10**30, 3 * 10**30, 10**30)])
def test_interleaving_is_exact(parts):
    """Each source gives its windows one by one, and of every whole round exactly its share, at any distance."""
    order, total = Interleaved(parts), sum(parts)
    for start in (0, 10**9, 10**18 // total * total):
        taken = [order[k] for k in range(start, start + 3000)]
        for source in range(len(parts)):
            numbers = [index for chosen, index in taken if chosen == source]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    counts = Counter(source for source, _ in (order[k] for k in range(total))) if total < 10**6 else {}
    assert not counts or [counts[i] for i in range(len(parts))] == list(parts)
    # Never further than one window for each source from its share.
    seen = [0] * len(parts)
    for k in range(500):
        source, index = order[k]
        assert index == seen[source]
        seen[source] += 1
        for i, part in enumerate(parts):
            assert abs(seen[i] - Fraction(part * (k + 1), total)) < len(parts)


def windows(first, count, name):
    """count windows that begin with the ids first, first + LENGTH..."""
    return Windows(np.arange(first, first + count * LENGTH + 1), LENGTH, 1 << 31, name)


# Grain's shuffle takes the longer for an index, the smaller a source is.
SOURCES = (windows(0, 40, "a"), windows(1000, 90, "b"), windows(5000, 30, "c"))
MIXES = {"one": (SOURCES[:1], None), "by size": (SOURCES, None), "weights": (SOURCES, (5, 3, 2))}


def make(mix, batch, seed=0, **options):
    sources, ratio = MIXES[mix]
    return data.Batches(sources, batch, seed=seed, proportions=ratio, **options)


def take(batches, count):
    return np.concatenate(list(itertools.islice(batches, count)))


@functools.cache
def one_by_one(mix):
    """The first 240 windows, which are more than an epoch."""
    return take(make(mix, 1, prefetch=0), 240)


@pytest.mark.parametrize("batch", [4, 6])
@pytest.mark.parametrize("mix", MIXES)
def test_a_run_goes_on_exactly_in_the_middle(mix, batch):
    """Every window, from positions that batches end at, with this batch size and with others, over epochs."""
    whole = one_by_one(mix)
    assert np.array_equal(take(make(mix, batch), 240 // batch), whole)
    for stop in (1, 17):
        first = make(mix, batch)
        take(first, stop)
        state = json.loads(json.dumps(first.state()))  # as a checkpoint keeps it
        assert state["samples"] == stop * batch
        for other in (1, 8):
            rest = make(mix, other)
            rest.restore(state)
            count = (240 - state["samples"]) // other
            assert np.array_equal(take(rest, count), whole[state["samples"] :][: count * other]), (stop, other)
            assert rest.samples == state["samples"] + count * other


def test_shares_and_epochs():
    """By weights each source has its share, and all its windows once before the first comes again."""
    starts = one_by_one("weights")[:, 0]
    source = np.searchsorted([1000, 5000], starts, side="right")
    assert np.bincount(source).tolist() == [120, 72, 48]
    for i, count in ((0, 40), (2, 30)):
        own = starts[source == i]
        epochs = own[: len(own) // count * count].reshape(-1, count)
        assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len(set(epochs[0])) == count
        assert len({tuple(epoch) for epoch in epochs}) == len(own) // count
    assert len(set(starts[source == 1])) == 72
    assert not np.array_equal(starts, take(make("weights", 10, seed=1), 24)[:, 0])


def test_by_size_each_window_comes_once_an_epoch():
    starts = one_by_one("by size")[:, 0]
    assert len(set(starts[:160])) == 160 and set(starts[160:]) < set(starts[:160])
    assert not np.array_equal(starts[:80], starts[160:])


def test_sources_of_one_size_have_orders_of_their_own():
    twins = (windows(0, 50, "a"), windows(1000, 50, "b"))
    starts = take(data.Batches(twins, 10, seed=0, proportions=(1, 1)), 10)[:, 0]
    assert not np.array_equal(starts[starts < 1000], starts[starts >= 1000] - 1000)


def test_a_state_without_sources_is_that_of_one():
    """As checkpoints of before have it."""
    state = {"samples": 8, "seed": 0, "windows": 40}
    batches = make("one", 4)
    batches.restore(state)
    assert np.array_equal(next(batches), one_by_one("one")[8:12])
    with pytest.raises(data.DataError, match="number of sources is 3, the checkpoint's data had 1 .*use the same data"):
        make("by size", 4).restore(state)
    with pytest.raises(data.DataError, match="a: has 40 windows, the checkpoint's data had 41"):
        make("one", 4).restore(state | {"windows": 41})


OTHERS = {
    "seed": (lambda: make("weights", 4, seed=1), "seed=1: .* drawn with seed 0"),
    "fewer": (lambda: make("one", 4), "the number of sources is 1, the checkpoint's data had 3 (a, b, c)"),
    "weights": (lambda: data.Batches(SOURCES, 4, seed=0, proportions=(5, 2, 3)), "the weights of a, b, c are 5:2:3, "
                "the checkpoint's were 5:3:2; use the same weights or another --workdir"),
    "by size": (lambda: make("by size", 4), "are by size, the checkpoint's were 5:3:2"),
    "order": (lambda: data.Batches((SOURCES[1], SOURCES[0], SOURCES[2]), 4, seed=0, proportions=(3, 5, 2)),
              "b: has 90 windows, the checkpoint's data had 40"),
    "tokens": (lambda: data.Batches((windows(1, 40, "d"), *SOURCES[1:]), 4, seed=0, proportions=(5, 3, 2)),
               "d: holds other tokens than the checkpoint's data (a); use the same data.train, in its order, or"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_sources_are_refused(name):
    other, message = OTHERS[name]
    state = json.loads(json.dumps(make("weights", 4).state()))
    pattern = message if ".*" in message else re.escape(message)
    with pytest.raises(data.DataError, match=pattern) as error:
        other().restore(state)
    assert "\n" not in str(error.value)


def test_the_same_tokens_elsewhere_are_the_same_source():
    """A folder may have moved; the weights may be written as ratios."""
    state = make("weights", 4).state()
    moved = [Windows(np.asarray(w.tokens, np.uint32), LENGTH, 1 << 31, f"moved/{w.name}") for w in SOURCES]
    data.Batches(moved, 4, seed=0, proportions=(5, 3, 2)).restore(state)


def test_a_run_of_several_sources(tmp_path):
    """From folders and files to batches: weights, validation parts together, what the first lines say."""
    config = write_sources(tmp_path)
    training, validation = data.open_data(config.data, 256)
    assert [len(s.tokens) for s in training.sources] == [90, 76, 95] and training.proportions == (5, 3, 2)
    # The prepared folder's own part, the file named val, the end of the third.
    assert validation[:].tolist() == [1] * 20 + [2] * 9 + [3] * 5 and len(training) == 261
    batches = data.batches(config, training)
    assert Counter(take(batches, 25)[:, 0].tolist()) == {11: 50, 12: 30, 3: 20}
    names = [str(tmp_path / name) for name in ("mine", "other", "third.npy")]
    assert batches.describe() == f"{names[0]} 50.00%, {names[1]} 30.00%, {names[2]} 20.00%"
    found = list(data.evaluation_batches(config, validation))
    assert sum(b["weights"].sum() for b in found) == (34 - 1) // LENGTH * LENGTH
    own = dataclasses.replace(config.data, validation=names[0])
    assert data.open_data(own, 256)[1][:].tolist() == [1] * 20
    # A part of its own stays out of the training tokens, whatever the validation is.
    assert len(data.open_data(own, 256)[0]) == 90 + 76 + 100


def write_sources(folder):
    write.prepared(folder / "mine", [[11] * 40, [11] * 50], [[1] * 20])
    (folder / "other").mkdir()
    write.llmc(folder / "other" / "b_train_0.bin", [12] * 76)
    write.llmc(folder / "other" / "b_val_0.bin", [2] * 9)
    np.save(folder / "third.npy", np.full(100, 3))
    train = tuple(f"{folder / name}:{weight}" for name, weight in (("mine", 0.5), ("other", 0.3), ("third.npy", 0.2)))
    model = ModelConfig(vocab_size=256)
    return TrainConfig(data=DataConfig(train=train, sequence_length=LENGTH), global_batch=4, model=model)


def test_two_names_of_the_same_tokens(tmp_path):
    path = write.megatron(tmp_path / "a", [[1, 2, 3], [4]])
    names = (str(path), str(path.with_suffix(".idx")))
    with pytest.raises(data.DataError, match="a.idx': holds the same tokens as .*a.bin; name a source once"):
        data.open_data(DataConfig(train=names), 256)


def test_a_source_that_is_too_short(tmp_path):
    config = write_sources(tmp_path)
    np.save(tmp_path / "third.npy", np.full(8, 3))
    with pytest.raises(data.DataError, match="third.npy: too short: 8 tokens, one window needs"):
        data.batches(config, data.open_data(config.data, 256)[0])
