"""Pipelines, data and tensor parallelism together train as one device does, and their checkpoints fit every mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from model_helpers import by_path, unpadded
from pipeline_programs import COMPRESSED, EXACT, batch, on, program, state

from taco_jax.config import DataParallelConfig, OptimizerConfig

OPTIMIZER = OptimizerConfig(learning_rate=3e-3, warmup_steps=0, eps=1e-5, clip_norm=0.1)
EXACT, COMPRESSED = (dataclasses.replace(c, optimizer=OPTIMIZER, steps=10) for c in (EXACT, COMPRESSED))
ZERO1 = {"data_parallel": DataParallelConfig("none", zero1=True, bucket_mb=0.02)}
CODED = {
    "data_parallel": DataParallelConfig(gradients="int8h", zero1=True, parameters="int8h", bucket_mb=0.02),
}  # fmt: skip
STEPS = 3


def stored(p, of):
    """The parameters of a state as checkpoints have them, by path."""
    return by_path(unpadded(p.stored.pack(of).params, p.config.model))


_trained = {}


def train(config):
    """(losses, gradient norms, how far each parameter moved) of three steps."""
    key = repr(config)
    if key not in _trained:
        p = program(config)
        s, losses, norms = state(p), [], []
        start = stored(p, s)
        for _ in range(STEPS):
            s, metrics = p.step(s, batch(p))
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
        end = stored(p, s)
        _trained[key] = losses, norms, {path: end[path] - start[path] for path in end}
    return _trained[key]


def assert_trains_alike(config, reference, rtol, moves):
    got, want = train(config), train(reference)
    np.testing.assert_allclose(got[0], want[0], rtol=rtol)
    np.testing.assert_allclose(got[1], want[1], rtol=10 * rtol)
    norm = np.linalg.norm
    whole = np.sqrt(sum(norm(move) ** 2 for move in want[2].values()))
    for path, expected in want[2].items():
        # A key's bias has no true gradient.
        assert norm(got[2][path] - expected) <= moves * max(norm(expected), 1e-2 * whole), path


SLOW = pytest.mark.slow


# On every change the trainer's tests with stages compare losses and norms of such a run.
@SLOW
@pytest.mark.parametrize(
    "mesh, schedule",
    [
        ((2, 2, 2), "circular"),
        ((2, 2, 2), "gpipe"),
        ((2, 2, 2), "1f1b"),
        ((4, 2, 1), "circular"),
        ((2, 4, 1), "1f1b"),
    ],
)
def test_exact_steps_with_shares_of_the_optimiser(mesh, schedule):
    chunks = {"chunks": 2} if schedule == "circular" else {}
    assert_trains_alike(on(EXACT, *mesh, schedule, microbatches=4, **chunks, **ZERO1), on(EXACT), 1e-5, 5e-4)


@SLOW
@pytest.mark.parametrize("schedule", ["circular", "gpipe", "1f1b"])
def test_compressed_steps(schedule):
    # The three directions in 8 bits: losses as near as those of tensor parallelism alone.
    assert_trains_alike(on(COMPRESSED, 2, 2, 2, schedule, microbatches=4, **CODED), on(EXACT), 5e-3, 0.5)


@pytest.mark.parametrize(
    "target",
    [
        on(EXACT, 1, 1, 2),
        pytest.param(on(EXACT, 4, 2, 1, "gpipe", **ZERO1), marks=SLOW),
        pytest.param(on(EXACT, 1, 4, 1, "1f1b", **CODED), marks=SLOW),
        pytest.param(on(EXACT, 2, 1, 4, **CODED), marks=SLOW),
    ],
)
def test_what_is_stored_fits_every_mesh(target):
    source = program(on(EXACT, 2, 2, 2, "circular", chunks=2, **CODED))
    kept = source.stored.pack(state(source))
    assert jax.tree.map(lambda a: a.shape, kept.params) == jax.tree.map(lambda a: a.shape, source.stored.shapes.params)
    other = program(target)
    placed = jax.tree.map(lambda a, like: jax.device_put(np.asarray(a), like.sharding), kept.params,
                          other.stored.shapes.params)  # fmt: skip
    empty = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), other.stored.shapes)
    back = other.stored.pack(other.stored.unpack(dataclasses.replace(empty, params=placed, copy=None)))
    for path, value in by_path(kept.params).items():
        np.testing.assert_array_equal(by_path(back.params)[path], value)
