"""Orders of residual channels: their costs are those of real codecs, and inference folds what a plan has."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from model_helpers import QWEN2, Run, by_path
from run_folders import save_run

from taco_jax import Generator
from taco_jax.calibration import arrangement, command
from taco_jax.codec import as_codec
from taco_jax.compression import plan_file
from taco_jax.config import ConfigError, TrainConfig, cli
from taco_jax.inference.loading import load_params, open_checkpoint
from taco_jax.models.arrangement import fold
from taco_jax.train.site_plan import check_plan

CAP = 1.5  # so that some tokens reach it
BYTES = dataclasses.replace(QWEN2, vocab_size=256, d_model=64, init_std=0.2, max_length=256)


@pytest.mark.parametrize("d_model, block", [(24, 16), (32, 8), (20, 8)])
def test_places_share_a_block_as_often_as_in_the_flattened_message(d_model, block):
    tokens = 64
    blocks = (np.arange(tokens * d_model) // block).reshape(tokens, d_model)
    want = np.zeros((d_model, d_model))
    for token in range(1, tokens - 1):
        for place in range(d_model):
            want[place] += (blocks[token - 1 : token + 2] == blocks[token, place]).sum(0)
    got = arrangement.together(d_model, block) * block
    # The ends of the text have one neighbour less.
    np.testing.assert_allclose(got, want / (tokens - 2), atol=2 / tokens)


def test_the_learned_order_is_one_that_no_exchange_makes_better():
    rng = np.random.default_rng(0)
    pairs = np.exp(rng.normal(size=(24, 24)))
    order = arrangement.learn(pairs, 16)
    least = arrangement.cost(order, pairs, 16)
    assert sorted(order) == list(range(24)) and least < 0.97 * arrangement.cost(range(24), pairs, 16)
    for i in range(24):
        for j in range(i):
            other = order.copy()
            other[[i, j]] = order[[j, i]]
            assert arrangement.cost(other, pairs, 16) >= least * (1 - 1e-5)


def test_the_cost_is_that_of_a_rotated_codec():
    """Channels of many sizes, and a loss that feels the small ones: orders are ranked as the codec's errors are."""
    rng = np.random.default_rng(0)
    sizes, slopes = np.exp(rng.normal(size=96)), np.exp(rng.normal(size=96))
    x = (rng.normal(size=(512, 96)) * sizes).astype(np.float32)
    pairs, codec = np.outer(slopes**2, sizes**2), as_codec("int8h,block=32")
    found = {"stored": np.arange(96), "learned": arrangement.learn(pairs, 32), "sorted": np.argsort(-sizes)}
    measured = {}
    for name, order in found.items():
        sent = x[:, order]
        back = codec.decode(codec.encode(jnp.asarray(sent)), sent.shape, jnp.float32)
        measured[name] = np.sum(np.mean(np.square(back - sent), 0) * slopes[order] ** 2)
    costs = {name: arrangement.cost(order, pairs, 32) for name, order in found.items()}
    assert measured["learned"] < 0.7 * measured["stored"]
    for name in found:
        ratio = measured[name] / measured["stored"] / (costs[name] / costs["stored"])
        assert ratio == pytest.approx(1, abs=0.15), name


def pairs_of(slopes_SND, sent_SND):
    """Mean over tokens of slopes of one channel times what is sent in another, tokens capped in their own window."""
    cost_SN1 = slopes_SND.sum(2, keepdims=True) * sent_SND.sum(2, keepdims=True)
    median_SN1 = np.concatenate([np.broadcast_to(np.median(c, 1, keepdims=True), c.shape)
                                 for c in np.split(cost_SN1, 2, axis=1)], 1)  # fmt: skip
    capped = slopes_SND * np.minimum(1, CAP * median_SN1 / np.maximum(cost_SN1, 1e-30))
    assert (cost_SN1 > CAP * median_SN1).any()
    return np.einsum("snc,snd->cd", capped, sent_SND) / slopes_SND.shape[1]


def test_sizes_and_slopes_are_those_of_the_model(monkeypatch):
    """The sums of a model at tp 2 are those of the same at tp 1, and slopes are what a small error costs."""
    monkeypatch.setattr(arrangement, "CAP", CAP)
    run = Run(QWEN2, tp=2)
    tokens_WL = np.random.default_rng(0).integers(0, 300, (2, 13)).astype(np.int32)
    two = arrangement.measure(QWEN2, run.mesh, run.params(), tokens_WL, samples=12)
    one = arrangement.measure(QWEN2, Run(QWEN2).mesh, Run(QWEN2).params(), tokens_WL, samples=12)
    for name in ("sums", "gradients"):
        np.testing.assert_allclose(getattr(two, name), getattr(one, name), rtol=1e-4)
    np.testing.assert_allclose(two.sent[:, :, :2].sum(2), two.sent[:, :, 2], atol=1e-5)
    np.testing.assert_allclose(two.terms, np.square(two.sent[:, :, :2]).sum(2).mean(1), rtol=1e-4)
    np.testing.assert_allclose(two.slopes_fed[:-1], (two.slopes[:-1] - two.slopes[1:]), atol=1e-7)
    for pairs, slopes in ((two.pairs, two.slopes), (two.pairs_fed, two.slopes_fed)):
        np.testing.assert_allclose(
            pairs, pairs_of(np.square(slopes), np.square(two.sent).sum(2)), rtol=1e-3, atol=1e-12
        )
    assert not two.slopes_fed[-1].any() and (two.gradients > 0).all()


def test_a_plan_has_the_order_and_inference_folds_it(tmp_path, monkeypatch, capsys):
    mesh = make_mesh(tp=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arrangement, "LEAST_GAIN", 0.0)
    run = str(save_run(tmp_path / "bytes", BYTES, tp=2))
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged, that a single man must want. " * 30)
    own = ["--model", run, "--data", "text.txt", "--mesh.tp", "2", "--bits", "17", "--length", "32", "--tokens", "64",
           "--codecs", "int8h", "--by", "kind", "--out", "plan.json"]  # fmt: skip
    assert cli.run(command.main, [*own, "--arrange"]) == 0
    assert "order of the residual channels: predicted to lose" in capsys.readouterr().out
    plan = plan_file.read("plan.json")
    order = plan.arrangement["order"]
    assert order != sorted(order) == list(range(64)) and plan.arrangement["predicted"] < 1
    # The codecs made exact: what is left is the order.
    exact = {name: dataclasses.replace(site, forward="none", error_feedback=False) for name, site in plan.sites.items()}
    plan_file.write(dataclasses.replace(plan, sites=exact), "order.json")
    folded = Generator(run, tp=2, compression="order.json", dtype="float32")
    params = load_params(open_checkpoint(run), mesh, "float32")
    for name, leaf in by_path(fold(params, order, BYTES)).items():
        np.testing.assert_array_equal(by_path(folded.programs.params)[name], leaf)
    stored = Generator(run, tp=2, dtype="float32")
    answers = [[token.id for token in g.generate([[5, 20, 7]], max_tokens=8)] for g in (folded, stored)]
    assert answers[0] == answers[1] and len(answers[0]) == 8


def test_training_refuses_an_order():
    plan = plan_file.PlanFile(arrangement={"order": list(range(256))}, source="plan.json")
    with pytest.raises(ConfigError) as error:
        check_plan(TrainConfig(), plan, ())
    assert str(error.value) == (
        "plan.json: arrangement: is of inference, which folds it into weights as it reads them; calibrate without "
        "--arrange"
    )
