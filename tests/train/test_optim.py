"""Schedules, clipping, and which leaves have weight decay. Optimisers but AdamW: test_optimizers.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from taco_jax.config import OptimizerConfig
from taco_jax.models.params import init_params
from taco_jax.models.presets import preset
from taco_jax.train import optim


def test_learning_rate():
    schedule = optim.learning_rate(OptimizerConfig(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4), 14)
    values = [float(schedule(t)) for t in range(16)]
    np.testing.assert_allclose(values[:5], [0.25, 0.5, 0.75, 1, 1], rtol=1e-6)
    # The middle of the nine steps from 4 to 13, the end, and after it.
    assert values[8] + values[9] == pytest.approx(1.1) and values[13:] == pytest.approx([0.1] * 3)
    assert all(a >= b for a, b in zip(values[4:], values[5:], strict=False))


def test_schedules_are_their_formulas():
    """Warm-up in steps 0 to 4; the last of 25 steps, 24, and those after it have the floor, but for constant."""
    options = dict(learning_rate=2.0, min_learning_rate=0.5, warmup_steps=5, decay_fraction=0.32)
    warmup = [2.0 * (t + 1) / 5 for t in range(5)]
    share = lambda t: min(1.0, (t - 5) / 19)
    after = {
        "cosine": lambda t: 0.5 + 1.5 * (1 + np.cos(np.pi * share(t))) / 2,
        "linear": lambda t: 2.0 - 1.5 * share(t),
        # 0.32 x 25 = 8 steps: the learning rate is highest up to step 16.
        "wsd": lambda t: 2.0 - 1.5 * min(1.0, max(0.0, t - 16) / 8),
        "constant": lambda t: 2.0,
    }
    for name, formula in after.items():
        schedule = optim.learning_rate(OptimizerConfig(schedule=name, **options), 25)
        values = [float(schedule(t)) for t in range(28)]
        np.testing.assert_allclose(values, warmup + [formula(t) for t in range(5, 28)], rtol=1e-6, err_msg=name)
    optaxs = optax.warmup_cosine_decay_schedule(0.0, 2.0, 5, 24, 0.5)
    schedule = optim.learning_rate(OptimizerConfig(**options), 25)
    # The same after the warm-up, which begins one step later there.
    np.testing.assert_allclose([schedule(t) for t in range(5, 28)], [optaxs(t) for t in range(5, 28)], rtol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup, steps", [(0, 1), (5, 5), (10, 3), (0, 10)])
def test_schedule_of_odd_lengths(warmup, steps, name):
    schedule = optim.learning_rate(OptimizerConfig(schedule=name, warmup_steps=warmup, decay_fraction=1.0), steps)
    values = np.array([schedule(t) for t in range(steps + 1)])
    assert (values > 0).all() and (values <= 3e-4 * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", ["gpt2_124m", "qwen3_0p6b"])
def test_only_matrices_decay(name):
    shapes = jax.eval_shape(lambda: init_params(preset(name), jax.random.key(0)))
    flags = jax.tree_util.tree_flatten_with_path(optim.decayed(shapes))[0]
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): flag for path, flag in flags}
    for leaf, flag in names.items():
        assert flag == leaf.endswith(("kernel", "table", "positions")), leaf
    assert any(names.values()) and not all(names.values())


def update(config, gradient, steps=10):
    params = {"layers": {"kernel": jnp.ones((2, 3, 3)), "bias": jnp.ones((2, 3, 3))}}
    optimizer, _ = optim.make(config, steps)
    grads = jax.tree.map(lambda p: jnp.full_like(p, gradient), params)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    return updates["layers"], state


def test_first_step():
    """With bias correction it is lr * sign(g), plus lr * decay * w for matrices; the warm-up scales both."""
    config = OptimizerConfig(learning_rate=0.1, min_learning_rate=0.01, warmup_steps=2, weight_decay=0.5)
    updates, _ = update(config, 2.0)
    np.testing.assert_allclose(updates["bias"], -0.05, rtol=1e-4)
    np.testing.assert_allclose(updates["kernel"], -0.05 * 1.5, rtol=1e-4)


def test_clipping_keeps_the_state_alike():
    """A resumed run may change any setting: the state's structure is the same."""
    clipped, a = update(OptimizerConfig(clip_norm=1.0, eps=1.0), 3.0)
    free, b = update(OptimizerConfig(clip_norm=None, eps=1.0), 3.0)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    # 36 gradients of 3 have norm 18: clipped to 1/6 each. With eps = 1 the step shows it: g / (g + 1).
    lr = 3e-4 / 100
    np.testing.assert_allclose(clipped["bias"], -lr * (1 / 6) / (1 / 6 + 1), rtol=1e-3)
    np.testing.assert_allclose(free["bias"], -lr * 3 / 4, rtol=1e-3)
