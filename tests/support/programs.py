"""A small training run, and one program for all runs of a test module that have the same settings."""

import contextlib
import dataclasses
from unittest import mock

from helpers import REPOSITORY

from taco_jax.config import CheckpointConfig, DataConfig, EvalConfig, MetricsConfig, TrainConfig, cli
from taco_jax.data.sources import end_token
from taco_jax.train import step

# The quickstart's own file, cut down, with codecs on two axes. Tests that need any compiled step take this one.
FILE = REPOSITORY / "experiments" / "quickstart.py"
FLAGS = [
    "--model.d-model", "64", "--model.n-layers", "2", "--model.n-heads", "8", "--model.n-kv-heads", "4",
    "--model.head-dim", "8", "--model.d-mlp", "128", "--compression.forward", "taco",
    "--compression.backward", "int8h",
    "--data-parallel.gradients", "int8h", "--data.sequence-length", "32", "--global-batch", "8", "--steps", "6",
    "--optimizer.learning-rate", "3e-3", "--optimizer.min-learning-rate", "3e-5", "--optimizer.warmup-steps", "2",
    "--checkpoint.every", "4", "--evaluation.every", "4", "--evaluation.batches", "2", "--devices", "cpu:8",
]  # fmt: skip
CONFIG = cli.parse(["--config", str(FILE), *FLAGS])

# They say where a run begins and ends, what it writes and how often it validates. So does what its data are, but for
# the length of a sequence and the token that ends documents, where attention stays inside them.
OF_THE_RUN = {
    "workdir": "", "seed": 0, "stop_after": None, "checkpoint": CheckpointConfig(), "metrics": MetricsConfig(),
    "evaluation": EvalConfig(), "profile": None, "log_file": None,
}  # fmt: skip


@contextlib.contextmanager
def shared_programs():
    """Within it the trainer builds a program once: a program keeps no state, and compiling is what a short run costs.

    The first run with some settings builds and compiles as ever.
    """
    made, build = {}, step.build

    def shared(config: TrainConfig, mesh, codecs=None) -> step.Program:
        data = DataConfig(sequence_length=config.data.sequence_length)
        compression = dataclasses.replace(config.compression, guard=None, guard_margin_db=3.0, guard_patience=3)
        changes = OF_THE_RUN | {"data": data, "compression": compression}
        key = repr(dataclasses.replace(config, **changes)), end_token(config), mesh, frozenset((codecs or {}).items())
        if key not in made:
            made[key] = build(config, mesh, codecs)
        return made[key]

    with mock.patch.object(step, "build", shared):
        yield
