"""Products that share an input, as XLA compiles a training step for H100s: joined arrays are written once."""

import re

import jax
import numpy as np
import pytest
from aot.topology import devices
from aot.traffic import program
from jax.sharding import AxisType

from taco_jax.config import CompressionConfig, DataConfig, MeshConfig, ModelConfig, TrainConfig
from taco_jax.train.step import build

TP, WIDTH, MLP = 2, 2048, 8192
MODEL = ModelConfig(
    vocab_size=4096, d_model=WIDTH, n_layers=2, n_heads=16, n_kv_heads=4, head_dim=128, d_mlp=MLP, qkv_bias=True
)
JOINED = 2 * MLP // TP


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_gate_and_up_are_joined_once_a_pass(remat):
    mesh = jax.sharding.Mesh(
        np.array(devices(TP)).reshape(1, 1, TP), ("dp", "pp", "tp"), axis_types=(AxisType.Auto,) * 3
    )
    config = TrainConfig(
        model=MODEL, mesh=MeshConfig(tp=TP), compression=CompressionConfig("none", "none"), remat=remat,
        data=DataConfig(sequence_length=512), global_batch=8, chains=1, attention_implementation="xla",
        sequence_parallel=False,
    )  # fmt: skip
    found, _ = program(build(config, mesh).step.as_text())
    wide = lambda line: re.match(rf"bf16\[[\d,]*\b{JOINED}\]", line.shape) is not None
    joins = {name: body for name, body in found.items() if any(i.opcode == "concatenate" and wide(i) for i in body)}
    # No product joins for itself; what joins casts, or computes, in the same kernel.
    assert not any(i.opcode == "dot" for body in joins.values() for i in body)
    kernels = [
        body for body in joins.values() if any(i.shape.startswith("f32") and "parameter" in i.opcode for i in body)
    ]
    cotangents = [body for body in joins.values() if any(i.opcode == "exponential" for i in body)]
    assert len(joins) == 3 and len(kernels) == 2 and len(cotangents) == 1
