"""Training runs of tiny models, saved by the trainer's own checkpoints without training: `save_run(folder, config)`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from model_helpers import Run

from taco_jax.config import CheckpointConfig, TrainConfig, to_dict
from taco_jax.models.config import ModelConfig
from taco_jax.nn.vocab_parallel import pad_vocab
from taco_jax.train.checkpoint import Checkpoints
from taco_jax.train.step import TrainState


def save_run(folder: Path, config: ModelConfig, *, dp=1, tp=1, steps=(3,), data=None, files=None) -> Path:
    """A run's folder with checkpoints whose parameters are those of `Run(config).params(seed=step)`.

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
            params = run.params(seed=step)
            moments = jax.tree.map(lambda leaf: leaf + 7, params)  # never those that are read
            counts = [jnp.int32(step), jnp.int32(0), jnp.int32(0)]
            state = TrainState(counts[0], params, {"mu": moments, "nu": moments}, {}, *counts[1:])
            vocabulary = (config.vocab_size, pad_vocab(config.vocab_size, tp))
            checkpoints.save(step, state, {"data": {"samples": 12}, "seed": 0}, vocabulary=vocabulary)
    return folder
