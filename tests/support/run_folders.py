"""Training runs of tiny models, saved by the trainer's own checkpoints without training: `save_run(folder, config)`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from model_helpers import Run

from taco_jax.config import CheckpointConfig, TrainConfig, to_dict
from taco_jax.models.config import ModelConfig
from taco_jax.nn.vocab_parallel import pad_vocab
from taco_jax.train.checkpoint import Checkpoints
from taco_jax.train.state import TrainState


def save_run(folder: Path, config: ModelConfig, *, dp=1, tp=1, steps=(3,), data=None, files=None, params=None) -> Path:
    """A run's folder with checkpoints whose parameters are those of `Run(config).params(seed=step)`, or `params`.

    data: fields of its data settings. files: {name: content} of its folder `model`, JSON where it is no text.
    """
    folder.mkdir(parents=True)
    settings = to_dict(TrainConfig(model=config))
    settings["data"] |= data or {}
    (folder / "config.json").write_text(json.dumps(settings))
    for name, content in (files or {}).items():
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / name).write_text(content if isinstance(content, str) else json.dumps(content))
    run = Run(config, dp=dp, tp=tp)
    with Checkpoints(folder / "checkpoints", CheckpointConfig(keep=None)) as checkpoints:
        for step in steps:
            weights = run.params(seed=step) if params is None else _placed(params, run)
            moments = jax.tree.map(lambda leaf: leaf + 7, weights)  # never those that are read
            counts = [jnp.int32(step), jnp.int32(0), jnp.int32(0)]
            state = TrainState(counts[0], weights, {"mu": moments, "nu": moments}, {}, *counts[1:])
            vocabulary = (config.vocab_size, pad_vocab(config.vocab_size, tp))
            checkpoints.save(step, state, {"data": {"samples": 12}, "seed": 0}, vocabulary=vocabulary)
    return folder


def _placed(params, run):
    return jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(run.mesh, spec), run.specs))
