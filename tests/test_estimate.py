"""The dry run: what it says is what the state and the compiled step are."""

import dataclasses
import re

import jax
import pytest

from taco_jax import estimate, step
from taco_jax.config import CompressionConfig, DataConfig, MeshConfig, ModelConfig, TrainConfig
from taco_jax.mesh import make_mesh

CONFIG = TrainConfig(
    model=ModelConfig(d_model=64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=8, d_mlp=128),
    mesh=MeshConfig(dp=2, tp=4),
    compression=CompressionConfig("taco", "int8h"),
    data=DataConfig(sequence_length=32),
    global_batch=8,
)


@pytest.fixture(scope="module")
def program():
    return step.build(CONFIG, make_mesh(2, 1, 4))


def test_memory_is_that_of_the_arrays(program):
    memory = estimate.memory(program)
    state = program.init(jax.random.key(0))
    local = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    assert memory.params == memory.gradients == local(state.params)
    assert memory.optimizer == local(state.opt_state)
    assert memory.scales == local(state.scales)
    assert memory.peak >= memory.params + memory.optimizer + memory.temporary > memory.temporary > 0


def test_report_allocates_nothing_and_lists_every_site(program):
    before = len(jax.live_arrays())
    text = estimate.report(CONFIG, program.mesh)
    assert len(jax.live_arrays()) == before
    for site in ("embed", "layers/attn/qkv", "layers/attn/out", "layers/mlp/up", "layers/mlp/down", "head"):
        assert re.search(rf"^  {site} .* (taco|int8h) ", text, re.M), site
    for exact in ("dp/grads", "head/softmax", "scales/amax"):
        assert re.search(rf"^  {exact} .* none ", text, re.M), exact
    sent, bf16 = program.table.total()
    assert f"{sent / 1e6:.3f} MB a step, {bf16 / sent:.3f}x less" in text
    assert "jnp: " in text and '"sequence_length": 32' in text


@pytest.mark.parametrize("gigabytes, verdict", [(80.0, "fits 80 GB"), (1e-6, "does NOT fit 1e-06 GB")])
def test_verdict(program, gigabytes, verdict):
    assert verdict in estimate._memory_text(dataclasses.replace(CONFIG, gpu_memory_gb=gigabytes), program)


def test_one_rank_sends_nothing():
    config = dataclasses.replace(CONFIG, mesh=MeshConfig())
    assert "TP activation traffic: none (tp 1)" in estimate.report(config, make_mesh())
