"""Orders of residual channels: exact models stay the same, costs are those of real codecs, bad orders are refused."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import CONFIGS, GEMMA, GPT2, QWEN2, QWEN3, WINDOWS, Run, assert_gradients_close, by_path, unpadded

from taco_jax.codec import as_codec
from taco_jax.config import ConfigError
from taco_jax.models.params import init_params

UNTIED = dataclasses.replace(GPT2, tied_head=False)
DAILY = {"gpt2_untied": UNTIED}
NIGHTLY = CONFIGS | {"windows": WINDOWS, "gemma": GEMMA}


@pytest.fixture
def arrangement(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "experiments")
    return importlib.import_module("arrangement")


def drawn(d_model: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(d_model)


@pytest.mark.parametrize(
    "config",
    [*(pytest.param(c, id=n) for n, c in DAILY.items()),
     *(pytest.param(c, id=n, marks=pytest.mark.slow) for n, c in NIGHTLY.items())],
)  # fmt: skip
def test_a_folded_model_is_the_same_and_its_gradients_are_folded_alike(arrangement, config):
    run, order = Run(config, tp=2), drawn(config.d_model)
    params, *batch = run.arguments()
    folded = arrangement.fold(params, order, config)
    moved = [name for name, leaf in by_path(params).items() if (leaf != by_path(folded)[name]).any()]
    still = ("attn/q/bias", "attn/k/bias", "attn/v/bias", "mlp/up/bias", "mlp/gate/bias", "attn/q_norm/scale",
             "attn/k_norm/scale")  # fmt: skip
    assert {name.removeprefix("layers/") for name in by_path(params).keys() - set(moved)} <= set(still)
    np.testing.assert_allclose(run.logits(folded), run.logits(params), rtol=1e-5, atol=2e-6)
    step = run.compiled()[0]
    (loss, grads, _), (loss_folded, grads_folded, _) = step(params, *batch), step(folded, *batch)
    np.testing.assert_allclose(loss_folded, loss, rtol=1e-6)
    want = by_path(unpadded(arrangement.fold(grads, order, config), config))
    assert_gradients_close(by_path(unpadded(grads_folded, config)), want, exact=True)


def test_the_inverse_order_gives_the_parameters_back(arrangement):
    params = Run(QWEN3).params()
    order = drawn(QWEN3.d_model)
    back = arrangement.fold(arrangement.fold(params, order, QWEN3), arrangement.inverse(order), QWEN3)
    for name, leaf in by_path(back).items():
        np.testing.assert_array_equal(leaf, by_path(params)[name])


def test_every_leaf_of_every_family_has_its_dim(arrangement):
    gated = dataclasses.replace(UNTIED, gated_mlp=True, qk_norm=True)
    for config in (gated, *DAILY.values(), *NIGHTLY.values()):
        shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
            dim = arrangement.DIMS["/".join(key.key for key in path)]
            assert dim is None or leaf.shape[dim] == config.d_model


@pytest.mark.parametrize(
    "order, message",
    [
        ([0, 1, 2], "arrangement.order: has 3 entries; must have each of the model's channels, 0 to 31, once"),
        ([*range(31), 30], "arrangement.order: has 30 2 times;"),
        ([*range(31), 32], "arrangement.order: has 32;"),
        (np.arange(32) / 2, "arrangement.order: has entries that are no integers;"),
    ],
)
def test_what_is_no_order_is_refused(arrangement, order, message):
    with pytest.raises(ConfigError) as error:
        arrangement.fold(Run(QWEN2).params(), order, QWEN2)
    assert message in str(error.value)


def test_a_tensor_that_is_not_the_decoders_is_refused(arrangement):
    with pytest.raises(ConfigError, match="'layers/attn_nrm/scale' is not of the decoder's; did you mean"):
        arrangement.fold({"layers": {"attn_nrm": {"scale": np.zeros((2, 32))}}}, drawn(32), QWEN2)


@pytest.mark.parametrize("d_model, block", [(24, 16), (32, 8), (20, 8)])
def test_places_share_a_block_as_often_as_in_the_flattened_message(arrangement, d_model, block):
    tokens = 64
    blocks = (np.arange(tokens * d_model) // block).reshape(tokens, d_model)
    want = np.zeros((d_model, d_model))
    for token in range(1, tokens - 1):
        for place in range(d_model):
            want[place] += (blocks[token - 1 : token + 2] == blocks[token, place]).sum(0)
    got = arrangement.together(d_model, block) * block
    # The ends of the text have one neighbour less.
    np.testing.assert_allclose(got, want / (tokens - 2), atol=2 / tokens)


def test_the_learned_order_is_one_that_no_exchange_makes_better(arrangement):
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


def test_the_cost_is_that_of_a_rotated_codec(arrangement):
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


def test_sizes_and_slopes_are_those_of_the_model(arrangement):
    """The sums of a model at tp 2 are those of the same at tp 1, and slopes are what a small error costs."""
    run = Run(QWEN2, tp=2)
    tokens_WL = np.random.default_rng(0).integers(0, 300, (2, 13)).astype(np.int32)
    two = arrangement.measure(QWEN2, run.mesh, run.params(), tokens_WL, samples=12)
    one = arrangement.measure(QWEN2, Run(QWEN2).mesh, Run(QWEN2).params(), tokens_WL, samples=12)
    for name in ("sums", "gradients"):
        np.testing.assert_allclose(getattr(two, name), getattr(one, name), rtol=1e-4)
    np.testing.assert_allclose(two.sent[:, :, :2].sum(2), two.sent[:, :, 2], atol=1e-5)
    np.testing.assert_allclose(two.terms, np.square(two.sent[:, :, :2]).sum(2).mean(1), rtol=1e-4)
    np.testing.assert_allclose(two.slopes_fed[:-1], (two.slopes[:-1] - two.slopes[1:]), atol=1e-7)
    assert not two.slopes_fed[-1].any() and (two.gradients > 0).all()


def test_simple_orders(arrangement):
    squares = np.ones((4, 32))
    squares[:, [5, 9, 30]] = [100, 400, 25]
    sites = arrangement.Sites(squares, 0 * squares, *[None] * 6)
    assert list(arrangement.by_size(sites)[:3]) == [9, 5, 30]
    assert list(arrangement.clustered(sites)[:5]) == [5, 9, 30, 0, 1]
    assert [next(i for i in (5, 9, 30) if i in part) for part in np.split(arrangement.spread(sites, 8), 4)[:3]] == [
        9, 5, 30
    ]  # fmt: skip
