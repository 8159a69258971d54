"""Loss, gradients, measures and messages of a training step, for tests that compare meshes and schedules."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from model_helpers import GPT2, by_path, unpadded

from taco_jax.collectives import comm_log
from taco_jax.config import (
    CompressionConfig,
    DataConfig,
    DataParallelConfig,
    MeshConfig,
    PipelineConfig,
    TrainConfig,
)
from taco_jax.config import pipeline_schedule as schedule_of
from taco_jax.config.checks import check
from taco_jax.mesh import make_mesh
from taco_jax.pipeline import layout
from taco_jax.train.step import Program, build

EXACT = TrainConfig(
    model=dataclasses.replace(GPT2, n_layers=4),
    compression=CompressionConfig("none", "none", min_bytes=0),
    pipeline=PipelineConfig(forward="none", backward="none"),
    data_parallel=DataParallelConfig(gradients="none"),
    data=DataConfig(sequence_length=16),
    global_batch=16,
    compute_dtype="float32",
    sequence_parallel=False,
)
COMPRESSED = dataclasses.replace(
    EXACT, compression=CompressionConfig("taco", "int8h", min_bytes=0), pipeline=PipelineConfig()
)


def on(config: TrainConfig, dp=1, pp=1, tp=1, schedule="gpipe", microbatches=4, chunks=2, **changes) -> TrainConfig:
    """`config` on a mesh and with a schedule."""
    pipeline = dataclasses.replace(config.pipeline, schedule=schedule, microbatches=microbatches, chunks=chunks)
    return check(dataclasses.replace(config, mesh=MeshConfig(dp, pp, tp), pipeline=pipeline, **changes))


def batch(p: Program) -> dict[str, jax.Array]:
    shape = (p.config.global_batch, p.config.data.sequence_length + 1)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, p.config.model.vocab_size, shape, np.int32)
    if p.config.data.document_mask:  # documents of some tokens each
        tokens[rng.random(shape) < 0.2] = p.config.data.end_token_id
    return {"tokens": jax.device_put(tokens, p.batch_sharding)}


def program(config: TrainConfig) -> Program:
    return build(config, make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp))


def state(p: Program):
    """A state in which every parameter matters: biases and norm scales are random too. The same on every mesh."""
    stored = p.stored.shapes
    vocabulary = p.config.model.vocab_size
    leaves, structure = jax.tree_util.tree_flatten_with_path(stored.params)

    def param(number, path, leaf):
        # Rows and columns that pad the vocabulary to the mesh are zeros.
        ends = [
            slice(vocabulary) if path[0].key in ("embed", "head") and n >= vocabulary else slice(n) for n in leaf.shape
        ]
        value = np.zeros(leaf.shape, np.float32)
        real = value[tuple(ends)]
        std = 0.1 if path[-1].key in ("bias", "scale") else p.config.model.init_std
        real[:] = std * np.random.default_rng(number).standard_normal(real.shape) + (path[-1].key == "scale")
        return jax.device_put(value, leaf.sharding)

    params = [param(number, *leaf) for number, leaf in enumerate(leaves)]
    zeros = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), stored)
    # A copy that ranks compute with is made from these parameters.
    return p.stored.unpack(dataclasses.replace(zeros, params=jax.tree.unflatten(structure, params), copy=None))


class Result(NamedTuple):
    loss: float
    grads: dict[str, np.ndarray]  # by path, of the shapes that checkpoints have
    measures: dict[str, np.ndarray]
    table: comm_log.Table
    compiled: Any


_results: dict[tuple[str, bool], Result] = {}


def gradients(config: TrainConfig, with_stats: bool = False) -> Result:
    """What a step takes from one batch; made once."""
    key = repr(config), with_stats
    if key not in _results:
        _results[key] = _gradients(program(config), with_stats)
    return _results[key]


def _gradients(p: Program, with_stats: bool) -> Result:
    function = jax.jit(lambda state, tokens: p._gradients(state, tokens, with_stats))
    with comm_log.record() as table:
        compiled = function.lower(p.state_shapes, p.batch_shapes["tokens"]).compile()
    loss, grads, measures = compiled(state(p), batch(p)["tokens"])
    chunks = layout.chunks_of(schedule_of(p.config))
    whole = jax.tree.map(layout.join(chunks), grads, layout.in_layers(grads))
    measures = jax.tree.map(np.asarray, measures)
    return Result(float(loss), by_path(unpadded(whole, p.config.model)), measures, table, compiled)
