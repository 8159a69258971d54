"""What the forecast says is sent, against the site table of the traced step."""

import dataclasses

import pytest
from model_helpers import GPT2, QWEN2, QWEN3

from taco_jax.config import (
    CompressionConfig,
    DataConfig,
    DataParallelConfig,
    MeshConfig,
    PipelineConfig,
    TrainConfig,
)
from taco_jax.config.checks import check
from taco_jax.forecast import hardware, links, messages, predict, work
from taco_jax.forecast.cost import Machine
from taco_jax.mesh import make_mesh
from taco_jax.models.decoder import LAYER_SITES
from taco_jax.train import step

WIDE = dataclasses.replace(QWEN2, d_model=128)


def config(mesh, model=WIDE, **changes):
    given = {"data": DataConfig(sequence_length=16), "global_batch": 16, "loss_chunk": 24}
    return check(TrainConfig(model=model, mesh=MeshConfig(**mesh), **(given | changes)))


CASES = {
    "tp": config({"tp": 4}, compression=CompressionConfig("int8h", "int4h", min_bytes=0)),
    "tied head, positions": config({"tp": 2}, dataclasses.replace(GPT2, d_model=128), accumulation=2),
    "cut sequences": config({"tp": 4}, sequence_parallel=True, remat="full"),
    "chains": config({"tp": 2}, chains=2, remat="full"),
    "a plan, exact heads": config(
        {"tp": 2}, QWEN3, compression=CompressionConfig("taco", "taco", plan={"layers/mlp/*": "int8h:int4h"})
    ),
    "gpipe": config({"pp": 2, "tp": 2}, pipeline=PipelineConfig(microbatches=4)),
    "shared head": config(
        {"pp": 2}, dataclasses.replace(WIDE, vocab_size=20_000), pipeline=PipelineConfig(microbatches=4)
    ),
    "1f1b": config({"pp": 2, "tp": 2}, pipeline=PipelineConfig(schedule="1f1b", microbatches=4)),
    "circular": config(
        {"pp": 2, "tp": 2},
        dataclasses.replace(WIDE, n_layers=4),
        pipeline=PipelineConfig(schedule="circular", microbatches=4, chunks=2),
    ),
    "zero1": config(
        {"dp": 2, "tp": 2}, data_parallel=DataParallelConfig(zero1=True, gradients="int8h", parameters="int4h")
    ),
    "exact gradients": config({"dp": 4}, data_parallel=DataParallelConfig(gradients="none")),
}


@pytest.mark.parametrize("way, key", [("forward", "error_feedback"), ("backward", "backward_error_feedback")])
def test_sums_that_take_errors_along_are_marked(way, key):
    """Their codec takes longer: it also writes what a wire has lost."""
    fed = config({"tp": 4}, compression=CompressionConfig("int4h", "int4h", min_bytes=0, **{key: True}))
    marked = {(m.site, m.direction) for m in messages.training(fed) if m.feedback}
    sites = {"forward": ("attn/out", "mlp/down"), "backward": ("attn/qkv", "mlp/up")}
    assert {(f"layers/{site}", way) for site in sites[way]} <= marked and {each for _, each in marked} == {way}


NIGHTLY = ("circular", "a plan, exact heads", "exact gradients")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in NIGHTLY)) for n in CASES])
def test_messages_are_those_of_the_traced_step(name):
    given = CASES[name]
    table = step.build(given, make_mesh(given.mesh.dp, given.mesh.pp, given.mesh.tp)).table
    # Of what the forecast leaves out the largest are norms' gradients and biases, which go exactly.
    rows = {}
    for row in table.rows():
        if row.kind == "activation" or row.site in ("head/softmax", "pp/grads"):
            rows[row.site, row.direction, row.op] = (row.elements, row.calls, row.codec)
    forecast = {
        (m.site, m.direction, m.op): (m.elements, m.calls, m.codec.name)
        for m in messages.training(given)
        if m.axis != "dp"
    }
    ends = ("pp", "backward", "psum")
    assert rows.keys() == forecast.keys() and ends not in rows
    for key, (elements, calls, codec) in rows.items():
        assert (calls, codec) == forecast[key][1:], key
        assert forecast[key][0] == pytest.approx(elements, rel=0.01 if key[0] == "pp/grads" else 0), key
    for kind in ("gradient", "parameter"):
        sent = table.total(kind)[0] or sum(r.bytes for r in table.rows() if r.site == "dp/grads")
        of_kind = [m for m in messages.training(given) if m.kind == kind]
        if not of_kind:
            continue
        (message,) = of_kind
        share = (message.ranks - 1) / message.ranks * (2 if message.op == "psum" else 1)
        wire = message.nbytes if message.codec.exact else message.codec.wire_bytes(message.elements)
        assert share * wire == pytest.approx(sent, rel=0.1), kind  # wires of small leaves are padded


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("model", [WIDE, dataclasses.replace(WIDE, n_kv_heads=1)])
def test_gradients_of_a_layer_are_a_message(model, zero1):
    given = config(
        {"dp": 2, "tp": 2}, model, data_parallel=DataParallelConfig(gradients="none", overlap=True, zero1=zero1)
    )
    (row,) = (r for r in step.build(given, make_mesh(2, 1, 2)).table.rows() if r.site == messages.LAYER_GRADIENTS)
    found = {m.site: m for m in messages.training(given) if m.kind == "gradient"}
    of_layer = found[messages.LAYER_GRADIENTS]
    assert (of_layer.op, of_layer.calls) == (row.op, row.calls) == (row.op, model.n_layers)
    assert of_layer.elements == pytest.approx(row.elements, rel=0.03)  # tails of blocks are filled up
    shard = work.Shard(model, 2)
    assert found["dp/grads"].elements == shard.parameters(model.n_layers) - model.n_layers * of_layer.elements


@pytest.mark.parametrize("chains", [1, 2])
def test_what_chains_make_too_small_goes_exactly(chains):
    """A message of a layer has 65,536 bytes, a chain's half of it; both ends of the model have no chains."""
    given = config(
        {"tp": 2}, chains=chains, remat="full", compression=CompressionConfig("int8h", "int4h", min_bytes=40_000)
    )
    table, gpu = step.build(given, make_mesh(tp=2)).table, hardware.gpu("H200")
    exactly = {row.site for row in table.rows() if row.kind == "activation" and row.codec == "none"}
    assert exactly == (set(LAYER_SITES) if chains == 2 else set())
    found = predict.step(given, Machine(gpu, links.parse("host", gpu), 2))
    assert set(found.exactly) == exactly and found.chains == chains
    softmax = sum(r.bytes for r in table.rows() if r.site == "head/softmax")
    assert found.sent == pytest.approx(table.total("activation")[0] + softmax, rel=0.01)


@pytest.mark.parametrize("copied", [False, True])
def test_links_are_those_of_the_configuration(copied):
    link_of = lambda **c: {
        (m.direction, m.link)
        for m in messages.training(config({"tp": 2}, compression=CompressionConfig("int8h", "int8h", **c)), copied)
        if m.site in LAYER_SITES
    }
    backward = "copy" if copied else "auto"
    assert link_of() == {("forward", "auto"), ("backward", backward)}
    if not copied:
        assert link_of(link="nccl") == {("forward", "nccl"), ("backward", "nccl")}
        assert link_of(backward_link="copy") == {("forward", "auto"), ("backward", "copy")}
        staged = config({"tp": 2, "pp": 2}, compression=CompressionConfig("int8h", "int8h", backward_link="auto"))
        assert {m.link for m in messages.training(staged) if m.site in LAYER_SITES} == {"nccl"}


def test_bytes_of_a_step_are_those_of_the_site_table():
    given = config({"tp": 4}, data=DataConfig(sequence_length=128), compression=CompressionConfig(min_bytes=0))
    table = step.build(given, make_mesh(tp=4)).table
    gpu = hardware.gpu("H200")
    forecast = predict.step(given, Machine(gpu, links.parse("host", gpu), 4))
    softmax = sum(r.bytes for r in table.rows() if r.site == "head/softmax")
    sent, bf16 = table.total("activation")
    assert forecast.sent == pytest.approx(sent + softmax, rel=0.01)
    assert forecast.ratio == pytest.approx((bf16 + softmax / 2) / (sent + softmax), rel=0.01)
