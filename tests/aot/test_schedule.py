"""Chains put matrix products beside messages, in the order in which XLA runs a training step on H100s."""

import jax
import numpy as np
import pytest
from aot.instructions import beside_collectives, collectives
from aot.topology import devices
from jax.sharding import AxisType

from taco_jax.config import CompressionConfig, DataConfig, MeshConfig, ModelConfig, TrainConfig
from taco_jax.train.step import build

MODEL = ModelConfig(
    vocab_size=4096, d_model=2048, n_layers=2, n_heads=16, n_kv_heads=4, head_dim=128, d_mlp=8192, qkv_bias=True
)
MESSAGE = 4 * 512 * 2048  # of a chain


def compiled_step(codec, chains, **changes):
    mesh = jax.sharding.Mesh(np.array(devices()).reshape(1, 1, 4), ("dp", "pp", "tp"), axis_types=(AxisType.Auto,) * 3)
    config = TrainConfig(
        model=MODEL, mesh=MeshConfig(tp=4), compression=CompressionConfig(codec, codec, min_bytes=0, link="nccl"),
        data=DataConfig(sequence_length=512), global_batch=8, remat="full", chains=chains,
        attention_implementation="xla", **changes,
    )  # fmt: skip
    return build(config, mesh).step


def in_layers(compiled, backward):
    """How many products are beside each collective in the layers of one direction."""
    found = beside_collectives(compiled, MESSAGE // 2)
    return [n for i, n in found if "while/body" in i.text and ("transpose(" in i.text) == backward]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("codec, hops", [("none", 1), ("taco", 2)])
def test_messages_travel_beside_products(codec, hops, sequence_parallel):
    if sequence_parallel:
        hops = 2  # a gather and a scatter
    one, two = (compiled_step(codec, n, sequence_parallel=sequence_parallel) for n in (1, 2))
    forward, backward = in_layers(two, False), in_layers(two, True)
    # Two messages a layer and direction, and chain: XLA made neither one message of two, nor one product.
    assert len(forward) >= 4 * hops and len(backward) >= 4 * hops
    assert not any(in_layers(one, False))
    if sequence_parallel:  # XLA chooses, and often puts nothing beside one of two hops
        assert sum(map(bool, forward)) >= 3
        assert sum(map(bool, backward)) >= len(backward) / 2
    else:  # every hop, but for the first one of the last message backward; the last sum is handed to the next layer
        assert sum(map(bool, forward)) >= 4 * hops
        assert sum(map(bool, backward)) >= 4 * hops - 1
    assert sum(map(bool, backward)) > sum(map(bool, in_layers(one, True)))


def test_two_chains_send_the_bytes_of_one():
    sizes = lambda n: sum(
        elements for _, _, elements in collectives(compiled_step("taco", n)) if elements > MESSAGE // 2
    )
    # Behind the loop the last layer's last sum is sent, in two hops; a loop's body counts once.
    assert sizes(2) == pytest.approx(sizes(1) + 2 * MESSAGE, rel=0.01)
