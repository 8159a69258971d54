"""Statistics and costs of sums written by hand, batches, seconds, and the budgets."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import REPOSITORY
from model_helpers import QWEN2

from taco_jax.calibration import command, plans
from taco_jax.calibration.batches import batches
from taco_jax.calibration.command import Budget, Subject
from taco_jax.calibration.measure import Model, Statistics
from taco_jax.calibration.probe import HEAD, OF_CODEC
from taco_jax.calibration.times import of as times_of
from taco_jax.config import ConfigError, cli
from taco_jax.data.tokens import DataError
from taco_jax.forecast import hardware, links, predict
from taco_jax.forecast.cost import Machine
from taco_jax.inference.text import ByteTokenizer

CODECS = ("int6h", "int4h")
# Two batches, two layers. Each of 4 ranks made the same 8 results of 16 values: sums over ranks.
SIGNAL = [[400.0, 100.0], [200.0, 300.0]]


def _statistics(gradient_error=None, layers=2, diagonal=(0.4, 4.0), fed=(0.1, 1.0)) -> Statistics:
    whole = lambda value: np.full((2, 2), value)
    head = {"unused": whole(0), "values": whole(64), "square": whole(32), "fourth": whole(80), "results": whole(32)}
    noise = np.array([0.5, 5.0]) * np.ones((2, 2, 1))
    of_codec = {name: np.zeros((2, 2, 2)) for name in OF_CODEC} | {
        "noise": noise, "diagonal": np.array(diagonal) * np.ones((2, 2, 1)),
        "diagonal_fed": np.array(fed) * np.ones((2, 2, 1)),
    }  # fmt: skip
    channels = np.ones((2, 2, 8))
    channels[:, 0, 2] = 37.0  # 6.08 times the others' root mean square; in one of two layers
    channels[:, :, 5] = 36.5
    return Statistics(CODECS, head | {"signal": np.array(SIGNAL)}, of_codec, channels, 8, layers, 2, gradient_error)


def test_statistics_by_hand():
    found = _statistics()
    assert list(found.head) == list(HEAD)
    assert found.kurtosis == pytest.approx(80 / 64 / (32 / 64) ** 2)
    assert found.outlying_channels == 2  # of two layers 2 and 1: their mean, rounded to even
    assert found.layer(1).outlying_channels == 1
    np.testing.assert_allclose(found.relative_errors, [2 / 1000, 20 / 1000])
    np.testing.assert_allclose(found.snr_db(), [26.9897, 16.9897], rtol=1e-5)
    # Both layers' sums of g^2 e^2, each counted by 4 ranks; half of it, over 2 tokens.
    np.testing.assert_allclose(found.rises(), [[0.8 / 4 / 4, 8 / 4 / 4]] * 2)
    np.testing.assert_allclose(found.rises(feedback=True), [[0.2 / 4 / 4, 2 / 4 / 4]] * 2)
    # Over the batch's own relative squared error.
    np.testing.assert_allclose(found.sensitivities(), [0.05 / (1 / 500)] * 2)
    assert found.sensitivity(feedback=True) == pytest.approx(0.0125 * 500)
    np.testing.assert_allclose(found.layer(0).rises(), [[0.4 / 4 / 4, 4 / 4 / 4]] * 2)


def test_costs_by_hand():
    forward = _statistics(gradient_error=np.array([0.004, 0.008]))
    np.testing.assert_allclose(forward.gradient_sensitivities(), [2.0, 4.0])  # by the error of int6h, 1/500
    rise, share = np.array([0.05, 0.5]), 3 * np.array([0.002, 0.02])
    np.testing.assert_allclose(plans.costs(forward, "forward", False), rise + 0.1 * share)
    # With feedback the loss feels a quarter, and so does the gradient.
    np.testing.assert_allclose(plans.costs(forward, "forward", True), (rise + 0.1 * share) / 4)
    backward = _statistics(gradient_error=np.array([0.004, 0.008]), diagonal=(0, 0), fed=(0, 0))
    np.testing.assert_allclose(plans.costs(backward, "backward", False), 0.1 * share)


def test_messages_count_with_their_calls_and_what_is_delivered_is_free():
    measured = {("layers/attn/out", "forward"): _statistics(), ("layers/mlp/down", "forward"): _statistics()}
    elements = 1 << 16
    messages = plans.messages_of(plans.by_layer(measured), CODECS, elements=elements, feedback=True,
                                 delivered=frozenset({"layers/1/mlp/down"}))  # fmt: skip
    assert [m.site for m in messages] == [f"layers/{i}/{row}" for i in (0, 1) for row in ("attn/out", "mlp/down")]
    by_site = {m.site: {o.codec: o for o in m.options} for m in messages}
    assert by_site["layers/0/attn/out"]["int4h"].cost > 0 == by_site["layers/1/mlp/down"]["int4h"].cost
    assert by_site["layers/0/attn/out"]["int4h"].size == 4.125 * elements
    assert by_site["layers/0/attn/out"]["none"] == plans.Option("none", False, 0.0, 16.0 * elements)
    (whole,) = plans.messages_of(
        {("layers/attn/qkv", "backward"): _statistics(gradient_error=np.ones(2))}, CODECS, elements=elements,
        feedback=True,
    )  # fmt: skip
    assert [o.size for o in whole.options[:2]] == [2 * 6.125 * elements, 2 * 4.125 * elements]  # of both layers
    assert not any(o.feedback for o in whole.options)


def _subject(use: str = "first_token", by_layer: bool = True) -> Subject:
    model = Model(QWEN2, None, None, None)
    sites = ("layers/attn/out", "layers/mlp/down")
    return Subject(model, use, sites, None, feedback=True, by_layer=by_layer, data="d", length=64, elements=1 << 16)


@pytest.mark.parametrize("use, loss", [("first_token", 3.0), ("training", 3.0)])
def test_budgets(use, loss):
    measured = {
        ("layers/attn/out", "forward"): _statistics(fed=(0.01, 0.1)),
        ("layers/mlp/down", "forward"): _statistics(),
    }
    plan = lambda budget: command.plan_of(
        measured, loss, _subject(use), budget, CODECS, forecast=None, made={"use": use}
    )[0]
    by_bits = plan(Budget("bits", 5.125, "5.125 bits"))
    assert by_bits.made["bits"] == 5.125
    bits = lambda row: sum(plans.bits_of(by_bits.sites[f"layers/{i}/{row}"].forward, 1 << 16) for i in (0, 1))
    # What is felt ten times as much has more bits; what is added exactly at the end has few.
    assert (bits("mlp/down") > bits("attn/out")) == (use == "training")
    share = 0.02
    by_loss = plan(Budget("loss", share, "2% loss"))
    bound = loss * share if use == "training" else np.log1p(share)
    assert 0 < by_loss.made["predicted_rise"] <= bound
    with pytest.raises(ConfigError, match="--bits 4: no choice of codecs has so few; the least is 4.125 bits"):
        plan(Budget("bits", 4, "4 bits"))
    text = json.dumps(by_loss.as_dict())
    assert "NaN" not in text and by_loss.sites["layers/0/attn/out"].forward_measured["calls"] == 1


def test_seconds():
    """Budgets of time, by the forecast of the 7B model's step; what is compressed alone adds up to both together."""
    config = cli.parse(["--config", str(REPOSITORY / "experiments/qwen7b.py")])
    gpu = hardware.gpu("H200", None, None)
    machine = Machine(gpu, links.parse("host", gpu), config.mesh.size)
    measured = {("layers/attn/out", "forward"): _statistics(), ("layers/mlp/up", "backward"): _statistics()}
    subject = dataclasses.replace(_subject("training", by_layer=False), model=Model(config.model, None, None, None))
    size, others, exact = times_of(machine, config, subject, measured, ("int8h", "int4h"), length=None)
    plan = {"layers/attn/out": "int4h:none", "layers/mlp/up": "none:int8h"}
    compression = dataclasses.replace(config.compression, forward="none", backward="none", plan=plan)
    data = dataclasses.replace(config.data_parallel, gradients="int8h")
    want = predict.step(dataclasses.replace(config, compression=compression, data_parallel=data), machine).seconds
    got = others + size("layers/attn/out", "forward", "int4h") + size("layers/mlp/up", "backward", "int8h")
    assert got == pytest.approx(want, rel=0.02) and got < exact
    assert others + sum(size(*message, "none") for message in measured) == pytest.approx(exact)
    budget = Budget("time", 0.5, "50% of the exact time", share=True)
    messages = plans.messages_of(measured, CODECS[1:], elements=1 << 16, feedback=False, size=size)
    with pytest.raises(ConfigError, match="--time 50% of the exact time: no choice of codecs is so fast; the least is"):
        command._in_time(messages, budget, (size, others, exact))


def test_batches_are_spread_and_sets_share_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "".join(f"{i:06d} " for i in range(2000))
    (tmp_path / "a.txt").write_text(text)
    arguments = {"vocab_size": 256, "tokenizer": None, "length": 20, "tokens": 320}
    read = batches("a.txt", **arguments)
    assert len(read) == 8 and {b.shape for b in read} == {(2, 21)}
    joined = ["".join(map(chr, row)) for batch in read for row in batch]
    assert joined[0] == text[:21] and joined[-1] == text[-21:] and all(row in text for row in joined)
    sets = [np.concatenate(batches("a.txt", **arguments, part=part, parts=2)) for part in (0, 1)]
    assert not {row.tobytes() for row in sets[0]} & {row.tobytes() for row in sets[1]}
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "c.txt").write_text(text)
    for name in ("b.jsonl", "folder"):
        (row, *_) = batches(name, **arguments | {"tokenizer": ByteTokenizer(), "tokens": 20})[0]
        assert "".join(map(chr, row)) == text[:21]
    np.arange(400, dtype=np.uint16).tofile(tmp_path / "t.u16.bin")
    assert (batches("t.u16.bin", **arguments | {"vocab_size": 400, "tokens": 20})[0] == np.arange(21)).all()
    with pytest.raises(DataError, match="256"):
        batches("t.u16.bin", **arguments | {"tokens": 320})
    with pytest.raises(ConfigError, match="--data a.txt: is text, and the model has no tokenizer"):
        batches("a.txt", **arguments | {"vocab_size": 300})
    with pytest.raises(ConfigError, match="--data a.txt: has 14,000 tokens; 2000 windows of 20 tokens need 42,000"):
        batches("a.txt", **arguments | {"tokens": 40_000})
    with pytest.raises(DataError, match="none"):
        batches("none.txt", **arguments)
