"""Loss, gradients and measures of a training step's program, for tests that compare meshes and schedules."""

import dataclasses

import jax
import numpy as np
from model_helpers import GPT2, by_path, unpadded

from taco_jax.config import (
    CompressionConfig,
    DataConfig,
    MeshConfig,
    PipelineConfig,
    TrainConfig,
    check,
    pipeline_schedule,
)
from taco_jax.mesh import make_mesh
from taco_jax.pipeline import layout
from taco_jax.step import build

EXACT = TrainConfig(
    model=dataclasses.replace(GPT2, n_layers=8),
    compression=CompressionConfig("none", "none", min_bytes=0),
    pipeline=PipelineConfig(forward="none", backward="none"),
    data=DataConfig(sequence_length=16),
    global_batch=16,
    compute_dtype="float32",
)  # fmt: skip


def on(config, dp=1, pp=1, tp=1, schedule="gpipe", microbatches=4, chunks=2, **changes):
    """`config` on a mesh and with a schedule."""
    pipeline = dataclasses.replace(config.pipeline, schedule=schedule, microbatches=microbatches, chunks=chunks)
    return check(dataclasses.replace(config, mesh=MeshConfig(dp, pp, tp), pipeline=pipeline, **changes))


def tokens(config):
    shape = (config.global_batch, config.data.sequence_length + 1)
    return np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)


def program(config):
    return build(config, make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp))


def state_of(p):
    """A state in which every parameter matters: biases and norm scales are random too, the same on every mesh."""
    state = p.init(jax.random.key(0))
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, p.to_stored(state).params))
    rng = np.random.default_rng(1)
    nudge = lambda a: a + 0.1 * rng.standard_normal(a.shape).astype(np.float32) if a.max() == a.min() else a
    params = jax.tree.unflatten(structure, [nudge(a) for a in leaves])
    stored = dataclasses.replace(p.to_stored(state), params=params)
    return p.from_stored(stored)


def gradients(config, with_stats=False):
    """(loss, gradients by path, measures by site) of one batch, of sizes that do not depend on the mesh."""
    p = program(config)
    run = jax.jit(lambda state, tokens: p._gradients(state, tokens, with_stats))
    loss, grads, measures = run(state_of(p), jax.device_put(tokens(config), p.batch_sharding))
    whole = jax.tree.map(layout.join(layout.chunks_of(pipeline_schedule(config))), grads, layout.in_layers(grads))
    return float(loss), by_path(unpadded(whole, config.model)), jax.tree.map(np.asarray, measures)
