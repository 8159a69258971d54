"""Chains, and sums of gradients over dp in the backward pass, put matrix products beside messages, in the order in
which XLA runs a training step on H100s."""

import jax
import numpy as np
import pytest
from aot.instructions import beside_collectives, collectives, computations
from aot.topology import devices
from jax.sharding import AxisType

from pallas_kernels import compat
from taco_jax.config import (
    CompressionConfig,
    DataConfig,
    DataParallelConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from taco_jax.train.step import build

MODEL = ModelConfig(
    vocab_size=4096, d_model=2048, n_layers=2, n_heads=16, n_kv_heads=4, head_dim=128, d_mlp=8192, qkv_bias=True
)
MESSAGE = 4 * 512 * 2048  # of a chain


def compiled_step(codec, chains, tp=4, link="nccl", backward_link=None, global_batch=8, **changes):
    grid = np.array(devices(tp)).reshape(1, 1, tp)
    mesh = jax.sharding.Mesh(grid, ("dp", "pp", "tp"), axis_types=(AxisType.Auto,) * 3)
    compression = CompressionConfig(codec, codec, min_bytes=0, link=link, backward_link=backward_link)
    config = TrainConfig(
        model=MODEL, mesh=MeshConfig(tp=tp), compression=compression,
        data=DataConfig(sequence_length=512), global_batch=global_batch, remat="full", chains=chains,
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


def test_copies_travel_beside_the_products_of_weights():
    """The gradients of a layer's inputs are two copies, each beside the product that is the weights' gradient."""
    compiled = compiled_step("taco", 1, tp=2, backward_link="copy")
    copies = [(i, n) for i, n in beside_collectives(compiled, MESSAGE) if i.opcode == "collective-permute"]
    in_layers = [n for i, n in copies if "while/body" in i.text]
    assert len(in_layers) == 2 and all(in_layers)


def test_a_piece_travels_beside_the_product_of_the_next():
    """The mlp's sum of the forward pass is two copies: a product is beside the larger one, which comes first."""
    compiled = compiled_step("taco", 1, tp=2, link="copy", global_batch=16)
    copies = beside_collectives(compiled, MESSAGE // 2)
    found = [(i, n) for i, n in copies if i.opcode == "collective-permute" and "transpose(" not in i.text]
    first, second, *_ = [n for i, n in found if "while/body" in i.text][-2:]
    assert first and not second
    assert len({i.elements for i, _ in found[-2:]}) == 2


@pytest.mark.skipif(not compat.WARPS_KNOW_THE_MESH, reason="NVLink kernels need jax 0.11")
def test_the_norm_adds_attention_s_sum_to_the_stream():
    """Of a layer's two additions one stays by itself, at its end: the other is part of the norm's kernel."""
    compiled = compiled_step("taco", 1, tp=2, link="nvlink")
    layer = [i for body in computations(compiled).values() for i in body if "jvp()/while/body" in i.text]
    forward = [i for i in layer if "transpose(" not in i.text and i.opcode == "fusion" and i.elements == 2 * MESSAGE]
    additions = [i for i in forward if '/add"' in i.text and "__triton" not in i.text]
    assert len(additions) == 1, additions


def test_two_chains_send_the_bytes_of_one():
    sizes = lambda n: sum(
        elements for _, _, elements in collectives(compiled_step("taco", n)) if elements > MESSAGE // 2
    )
    # Behind the loop the last layer's last sum is sent, in two hops; a loop's body counts once.
    assert sizes(2) == pytest.approx(sizes(1) + 2 * MESSAGE, rel=0.01)


SMALL = ModelConfig(
    vocab_size=4096, d_model=512, n_layers=3, n_heads=8, n_kv_heads=8, head_dim=64, d_mlp=2048, gated_mlp=False
)


def in_backward_loop(dp, **settings):
    """(opcode, products beside it) of each layer's messages in the loop of the backward pass, and products there."""
    mesh = jax.sharding.Mesh(
        np.array(devices(dp)).reshape(dp, 1, 1), ("dp", "pp", "tp"), axis_types=(AxisType.Auto,) * 3
    )
    config = TrainConfig(
        model=SMALL, mesh=MeshConfig(dp=dp), compression=CompressionConfig("none", "none"),
        data=DataConfig(sequence_length=256), global_batch=8, remat="dots", attention_implementation="xla",
        data_parallel=DataParallelConfig(overlap=True, **settings),
    )  # fmt: skip
    compiled = build(config, mesh).step
    found = [(i, n) for i, n in beside_collectives(compiled, 1 << 20) if "while/body" in i.text]
    names = {i.name for i, _ in found}
    body = next(body for body in computations(compiled).values() if names & {i.name for i in body})
    return [(i.opcode, n) for i, n in found], sum("gemm" in i.name or "$gemm" in i.text for i in body)


@pytest.mark.parametrize(
    "dp, settings, messages",
    [
        (2, dict(gradients="none"), ["all-reduce"]),
        (2, dict(gradients="int8h"), ["all-gather"]),
        (2, dict(gradients="none", zero1=True), ["reduce-scatter"]),
        (2, dict(gradients="int8h", zero1=True, parameters="int8h"), ["all-to-all"]),
        (4, dict(gradients="int8h"), ["all-to-all", "all-gather"]),
    ],
    ids=str,
)
def test_gradients_travel_beside_the_products_of_another_layer(dp, settings, messages):
    found, products = in_backward_loop(dp, **settings)
    assert [opcode for opcode, _ in found] == messages
    beside = [n for _, n in found]
    # Two products of each of six matrices, and those of attention. Hops follow each other, none of them alone.
    assert products >= 12 and sum(beside) == products and min(beside) >= products / 4
