"""Data parallelism: sums over dp in a codec and optimiser states of shares train as one device does, and send what is
listed."""

import dataclasses

import jax
import numpy as np
import pytest
from model_helpers import assert_gradients_close, by_path, unpadded

from taco_jax.config import (
    CompressionConfig,
    DataConfig,
    DataParallelConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from taco_jax.mesh import make_mesh
from taco_jax.step import build

# Three layers of width 36: most leaves have a dim that 2, 4 or 8 ranks divide, norms have none that 8 do.
MODEL = ModelConfig(
    vocab_size=300, d_model=36, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=8, d_mlp=64, gated_mlp=False,
    activation="gelu_tanh", mlp_bias=True, max_length=64,
)  # fmt: skip
# With a large eps AdamW's step is the gradient's mean times learning_rate / eps; what has almost no gradient stays.
SGD = OptimizerConfig(
    learning_rate=100, min_learning_rate=100, warmup_steps=0, eps=1e3, weight_decay=1e-5, clip_norm=None
)
ADAM = OptimizerConfig(learning_rate=3e-3, warmup_steps=0, eps=1e-5, clip_norm=0.1)
CONFIG = TrainConfig(
    model=MODEL,
    compression=CompressionConfig("none", "none"),
    data=DataConfig(sequence_length=16),
    optimizer=SGD,
    global_batch=8,
    steps=20,
    compute_dtype="float32",
)
SLOW = pytest.mark.slow


def on(dp=1, tp=1, config=CONFIG, optimizer=None, **data_parallel):
    changes = {"accumulation": data_parallel.pop("accumulation", config.accumulation)}
    return dataclasses.replace(
        config,
        mesh=MeshConfig(dp=dp, tp=tp),
        optimizer=optimizer or config.optimizer,
        data_parallel=DataParallelConfig(**data_parallel),
        **changes,
    )


def program(config):
    return build(config, make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp))


def batch(p, step=0):
    shape = (p.config.global_batch, p.config.data.sequence_length + 1)
    tokens = np.random.default_rng(step).integers(0, p.config.model.vocab_size // 4, shape, np.int32)
    return {"tokens": jax.device_put(tokens, p.batch_sharding)}


def whole(p, tree):
    """A tree like the parameters' as the model has it, by path: without the padding of shares and of the vocabulary."""
    if p.data_parallel.sharded and jax.tree.leaves(tree)[0].sharding.spec != jax.tree.leaves(p._param_specs)[0]:
        tree = jax.jit(p.data_parallel.whole)(tree)
    return by_path(unpadded(tree, p.config.model))


def moments(p, state):
    return whole(p, state.opt_state[1][0].mu)


@dataclasses.dataclass
class Trained:
    """What three steps give. gradient: of the first, as the optimiser saw it (clipped)."""

    losses: list
    norms: list
    gradient: dict
    start: dict
    params: dict
    state: object
    program: object


RUNS = {}


def train(config) -> Trained:
    key = repr(config)
    if key not in RUNS:
        RUNS[key] = _train(config)
    return RUNS[key]


def _train(config, steps=3) -> Trained:
    p = program(config)
    state = p.init(jax.random.key(config.seed))
    start, losses, norms = whole(p, state.params), [], []
    for i in range(steps):
        state, metrics = p.step(state, batch(p, i))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        if i == 0:
            # The mean starts at zero.
            gradient = {path: m / (1 - config.optimizer.beta1) for path, m in moments(p, state).items()}
    return Trained(losses, norms, gradient, start, whole(p, state.params), state, p)


def check_exact(config):
    got, want = train(config), train(on(optimizer=config.optimizer))
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-6)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5)
    assert_gradients_close(got.gradient, want.gradient, exact=True)
    # Where g is near eps Adam's step has the gradient's error many times over: an update is compared, more loosely.
    for path in want.params:
        moved, expected = got.params[path] - got.start[path], want.params[path] - want.start[path]
        assert np.linalg.norm(moved - expected) <= 2e-4 * np.linalg.norm(expected), path
    return got


EXACT = [
    (2, 2, SGD, {}), (4, 2, ADAM, {}), (8, 1, SGD, {}),
    (2, 2, ADAM, dict(zero1=True)), (4, 2, SGD, dict(zero1=True, bucket_mb=0.01)), (8, 1, ADAM, dict(zero1=True)),
    (4, 2, ADAM, dict(zero1=True, accumulation=2)),
]  # fmt: skip


@pytest.mark.parametrize("dp, tp, optimizer, settings", EXACT)
def test_exact_steps_equal_those_of_one_device(dp, tp, optimizer, settings):
    check_exact(on(dp, tp, optimizer=optimizer, **settings))
