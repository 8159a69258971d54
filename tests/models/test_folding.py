"""Orders of residual channels, folded into weights: the model stays the same, and bad orders are refused."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from model_helpers import CONFIGS, GEMMA, GPT2, QWEN2, QWEN3, WINDOWS, Run, assert_gradients_close, by_path, unpadded

from taco_jax.config import ConfigError
from taco_jax.models.arrangement import DIMS, fold, inverse
from taco_jax.models.params import init_params

UNTIED = dataclasses.replace(GPT2, tied_head=False)
DAILY = {"gpt2_untied": UNTIED}
NIGHTLY = CONFIGS | {"windows": WINDOWS, "gemma": GEMMA}


def drawn(d_model: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(d_model)


@pytest.mark.parametrize(
    "config",
    [*(pytest.param(c, id=n) for n, c in DAILY.items()),
     *(pytest.param(c, id=n, marks=pytest.mark.slow) for n, c in NIGHTLY.items())],
)  # fmt: skip
def test_a_folded_model_is_the_same_and_its_gradients_are_folded_alike(config):
    run, order = Run(config, tp=2), drawn(config.d_model)
    params, *batch = run.arguments()
    folded = fold(params, order, config)
    table, own = params["embed"]["table"], folded["embed"]["table"]
    np.testing.assert_array_equal(own, table[:, order])  # the first entry is the channel that comes first
    moved = [name for name, leaf in by_path(params).items() if (leaf != by_path(folded)[name]).any()]
    still = ("attn/q/bias", "attn/k/bias", "attn/v/bias", "mlp/up/bias", "mlp/gate/bias", "attn/q_norm/scale",
             "attn/k_norm/scale")  # fmt: skip
    assert {name.removeprefix("layers/") for name in by_path(params).keys() - set(moved)} <= set(still)
    np.testing.assert_allclose(run.logits(folded), run.logits(params), rtol=1e-5, atol=2e-6)
    step = run.compiled()[0]
    (loss, grads, _), (loss_folded, grads_folded, _) = step(params, *batch), step(folded, *batch)
    np.testing.assert_allclose(loss_folded, loss, rtol=1e-6)
    want = by_path(unpadded(fold(grads, order, config), config))
    assert_gradients_close(by_path(unpadded(grads_folded, config)), want, exact=True)


def test_the_inverse_order_gives_the_parameters_back():
    params = Run(QWEN3).params()
    order = drawn(QWEN3.d_model)
    back = fold(fold(params, order, QWEN3), inverse(order), QWEN3)
    for name, leaf in by_path(back).items():
        np.testing.assert_array_equal(leaf, by_path(params)[name])


def test_every_leaf_of_every_family_has_its_dim():
    gated = dataclasses.replace(UNTIED, gated_mlp=True, qk_norm=True)
    for config in (gated, *DAILY.values(), *NIGHTLY.values()):
        shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
            dim = DIMS["/".join(key.key for key in path)]
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
def test_what_is_no_order_is_refused(order, message):
    with pytest.raises(ConfigError) as error:
        fold(Run(QWEN2).params(), order, QWEN2)
    assert message in str(error.value)


def test_a_tensor_that_is_not_the_decoders_is_refused():
    with pytest.raises(ConfigError, match="'layers/attn_nrm/scale' is not of the decoder's; did you mean"):
        fold({"layers": {"attn_nrm": {"scale": np.zeros((2, 32))}}}, drawn(32), QWEN2)
