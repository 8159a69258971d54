"""The mlp's activation: its values are autodiff's, and its gradient keeps its arguments alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import GPT2, QWEN2

from taco_jax.models.blocks import _activated, activation, mlp
from taco_jax.models.run_config import Parallel


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["silu", "relu", "gelu", "gelu_tanh"])
def test_activation(name, gated):
    rng = np.random.default_rng(0)
    *ys, ct = (jnp.asarray(rng.standard_normal((2, 4, 8)), jnp.bfloat16) for _ in range(3 if gated else 2))
    plain = lambda first, *up: activation(name)(first) * (up[0] if gated else 1)
    want, of_plain = jax.vjp(plain, *ys)
    got, vjp = jax.vjp(lambda *ys: _activated(name, *ys), *ys)
    np.testing.assert_array_equal(got, want)
    jax.tree.map(np.testing.assert_array_equal, vjp(ct), of_plain(ct))


@pytest.mark.parametrize("config", [GPT2, QWEN2])
def test_the_mlp_keeps_what_its_first_product_makes(config):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    names = ("gate", "up") if config.gated_mlp else ("up",)
    params = {name: {"kernel": draw(config.d_model, config.d_mlp)} for name in names}
    x_BLD = draw(2, 4, config.d_model)
    vjp = jax.vjp(lambda x, params: mlp(x, params, config, Parallel(dtype=jnp.float32)), x_BLD, params)[1]
    wide = [leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.shape == (2, 4, config.d_mlp)]
    assert len(wide) == len(names)
