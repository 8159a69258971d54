"""Gradients that are summed over dp layer by layer, inside of the backward pass: values, bits, and what is listed."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
from data_parallel_programs import ADAM, CONFIG, batch
from hlo import collectives
from model_helpers import assert_gradients_close, by_path, compare_replicas, unpadded

from taco_jax.codec import CODECS
from taco_jax.config import (
    CheckpointConfig,
    CompressionConfig,
    ConfigError,
    DataParallelConfig,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    PipelineConfig,
    overlap,
)
from taco_jax.config.checks import check
from taco_jax.mesh import make_mesh
from taco_jax.train import dry_run
from taco_jax.train.checkpoint import Checkpoints
from taco_jax.train.step import build

SLOW = pytest.mark.slow


def on(dp=1, tp=1, changes=None, model=None, **data_parallel):
    mesh = MeshConfig(dp=dp, tp=tp, devices_per_host=data_parallel.pop("devices_per_host", None))
    data_parallel = DataParallelConfig(**{"gradients": "none"} | data_parallel)
    model = dataclasses.replace(CONFIG.model, **model or {})
    parts = {"mesh": mesh, "model": model, "optimizer": ADAM, "data_parallel": data_parallel}
    return dataclasses.replace(CONFIG, **parts | (changes or {}))


PROGRAMS, GRADIENTS = {}, {}


def program(config):
    key = repr(config)
    if key not in PROGRAMS:
        PROGRAMS[key] = build(config, make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp))
    return PROGRAMS[key]


def gradients(config):
    """(loss, gradients by path, measures of the sites) of a new state's first batch."""
    key = repr(config)
    if key not in GRADIENTS:
        p = program(config)
        state = p.init(jax.random.key(0))
        loss, grads, measures = jax.jit(lambda s, tokens: p._gradients(s, tokens, True))(state, batch(p)["tokens"])
        if p.data_parallel.sharded:
            grads = jax.jit(p.data_parallel.whole)(grads)
        GRADIENTS[key] = float(loss), by_path(unpadded(grads, config.model)), jax.tree.map(np.asarray, measures)
    return GRADIENTS[key]


def check_bits(got, want):
    assert got[0] == want[0]
    for path in want[1]:
        np.testing.assert_array_equal(got[1][path], want[1][path], err_msg=str(path))
    assert got[2].keys() == want[2].keys()
    for site in want[2]:
        np.testing.assert_array_equal(got[2][site], want[2][site], err_msg=site)


@pytest.mark.parametrize(
    "dp, tp, settings",
    [
        (2, 2, {}),
        (2, 2, dict(zero1=True)),
        pytest.param(2, 1, {}, marks=SLOW),
        pytest.param(2, 1, dict(zero1=True, parameters="bfloat16"), marks=SLOW),
        # Exchanges of two ranks, whose blocks are those of the buckets: matrices of MODEL have whole blocks.
        (2, 1, dict(gradients="int8h")),
        pytest.param(2, 1, dict(gradients="int8h", bucket_mb=0.02), marks=SLOW),
    ],
    ids=str,
)
def test_sums_in_the_backward_pass_have_the_bits_of_those_after_it(dp, tp, settings):
    config = on(dp, tp, overlap=True, **settings)
    assert sum(jax.tree.leaves(program(config).data_parallel.by_layer)) == 6
    check_bits(gradients(config), gradients(on(dp, tp, **settings)))
    if config.data_parallel.gradients == config.data_parallel.parameters == "none":
        loss, alone, _ = gradients(on())
        np.testing.assert_allclose(gradients(config)[0], loss, rtol=1e-6)
        assert_gradients_close(gradients(config)[1], alone, exact=True)


QWEN = dict(n_kv_heads=1, gated_mlp=True, activation="silu", mlp_bias=False, qk_norm=True)
"""Kernels and norms that ranks of tp hold whole, whose gradients are summed over tp and go after the backward pass."""


@pytest.mark.parametrize(
    "dp, tp, model, changes",
    [
        (2, 2, QWEN, dict(remat="dots", chains=2)),
        pytest.param(2, 2, {}, dict(sequence_parallel=True, remat="full"), marks=SLOW),
        pytest.param(2, 2, QWEN, dict(remat="full", chains=2, sequence_parallel=True), marks=SLOW),
        pytest.param(2, 4, QWEN, dict(remat="none"), marks=SLOW),
        pytest.param(4, 1, QWEN | dict(tied_head=False, norm="rmsnorm"), dict(remat="full"), marks=SLOW),
        pytest.param(2, 2, dict(sliding_window=4, post_norms=True, attention_pattern="sfs"), {}, marks=SLOW),
    ],
)
@pytest.mark.parametrize("zero1", [False, pytest.param(True, marks=SLOW)])
def test_each_gradient_is_the_unsharded_models(dp, tp, model, changes, zero1):
    config = on(dp, tp, changes, model, overlap=True, zero1=zero1)
    loss, alone, _ = gradients(on(changes={k: v for k, v in changes.items() if k == "remat"}, model=model))
    np.testing.assert_allclose(gradients(config)[0], loss, rtol=1e-6)
    assert_gradients_close(gradients(config)[1], alone, exact=True)
    if model is QWEN and tp == 2:
        assert sum(jax.tree.leaves(program(config).data_parallel.by_layer)) == 5  # without k and v


@pytest.mark.parametrize(
    "dp, tp, settings",
    [
        pytest.param(2, 2, dict(gradients="int8h", zero1=True), marks=SLOW, id="shares"),
        pytest.param(4, 2, dict(gradients="int8h"), marks=SLOW, id="two hops"),
        pytest.param(4, 1, dict(gradients="sdp4", devices_per_host=2), marks=SLOW, id="levels"),
        pytest.param(4, 2, dict(gradients="sdp4", devices_per_host=2, zero1=True), marks=SLOW, id="shares in levels"),
        pytest.param(3, 1, dict(gradients="int8h", zero1=True), marks=SLOW, id="padded shares"),
        pytest.param(2, 2, dict(gradients="int8h", zero1=True, bucket_mb=0.004), marks=SLOW, id="chunks"),
    ],
)
def test_coded_sums_differ_from_exact_ones_by_the_codec(dp, tp, settings):
    changes = {"global_batch": 2 * dp}
    _, grads, _ = gradients(on(dp, tp, changes, overlap=True, **settings))
    _, after, _ = gradients(on(dp, tp, changes, **settings))
    _, exact, _ = gradients(on(changes=changes))
    error = lambda g, path: np.linalg.norm(g[path] - exact[path]) / np.linalg.norm(exact[path])
    layers = [path for path in exact if path.startswith("layers/") and path.endswith("kernel")]
    assert len(layers) == 6
    for path in layers:
        # No more than before, but for the noise of other blocks; a codec that was not used would lose nothing.
        assert 0 < error(grads, path) < 1.25 * error(after, path) + 1e-3, path


@SLOW
@pytest.mark.parametrize("feedback", ["error_feedback", "backward_error_feedback"])
def test_compressed_layers_measure_what_they_did(feedback):
    compression = CompressionConfig("taco", "int8h", min_bytes=0, **{feedback: True})
    changes = {"compression": compression, "compute_dtype": "bfloat16"}
    got, want = gradients(on(2, 2, changes, overlap=True)), gradients(on(2, 2, changes))
    assert set(want[2]) >= {"layers/attn/out", "layers/mlp/up"}
    check_bits(got, want)


@pytest.fixture(scope="module")
def trained():
    """(program, state after three steps, losses) of int8h in shares with 8-bit changes."""
    config = on(2, 2, overlap=True, gradients="int8h", zero1=True, parameters="int8h")
    return _train(config)


def _train(config):
    p = program(config)
    state, losses = p.init(jax.random.key(0)), []
    for i in range(3):
        state, metrics = p.step(state, batch(p, i))
        losses.append(float(metrics["loss"]))
    return p, state, losses


def test_steps_repeat_and_follow_the_exact_curve(trained):
    p, state, losses = trained
    again = _train(p.config)
    assert again[2] == losses
    assert compare_replicas(state) > 50
    exact = _train(on(2, 2))[2]
    np.testing.assert_allclose(losses, exact, rtol=2e-3)
    assert losses != exact


def test_the_compiled_step_sends_what_the_table_lists(trained):
    p, _, _ = trained
    rows = {row.site: row for row in p.table.rows() if row.kind == "gradient"}
    layer, sent = rows["dp/grads/layer"], collectives(p.step)
    assert layer.calls == p.config.model.n_layers and layer.codec == "int8h" and layer.op == "psum_scatter"
    # Twice in the program: in the loop, and for the first layer after it.
    for message in layer.hlo:
        assert sent.count(message) == 2
    rest = [message for site, row in rows.items() if row is not layer for message in row.hlo]
    assert rest and all(message in sent for message in rest)
    # All of a layer's matrices, each share from a whole block on.
    shares = [
        c.share_shape[1:]
        for c, own in zip(*map(jax.tree.leaves, (p.data_parallel.cuts, p.data_parallel.by_layer)))
        if own
    ]
    assert layer.elements == 2 * sum(-(-math.prod(shape) // 128) * 128 for shape in shares)
    assert layer.bytes == layer.calls * CODECS["int8h"].wire_bytes(layer.elements // 2)


def test_a_state_goes_on_where_sums_go_after_the_backward_pass(trained, tmp_path):
    """Shares are of other dims there, and checkpoints of neither."""
    p, state, _ = trained
    after = program(on(2, 2, gradients="int8h", zero1=True, parameters="int8h"))
    kernel = lambda p: p.data_parallel.cuts["layers"]["mlp"]["up"]["kernel"]
    assert kernel(p).dim == 1
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(3, p.stored.pack(state), {})
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        stored, _, _ = checkpoints.restore(3, after.stored.shapes, p.config.model.vocab_size, dict)
    there = after.stored.unpack(stored)
    for tree in ("params", "copy"):
        one, other = getattr(state, tree), getattr(there, tree)
        if tree == "params":
            one, other = jax.jit(p.data_parallel.whole)(one), jax.jit(after.data_parallel.whole)(other)
        for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_dry_run_says_it(trained):
    p, _, _ = trained
    (text,) = dry_run._data_parallel_text(p)
    assert "  sent each layer's beside the layer before it, in the backward pass (as configured)" in text
    (text,) = dry_run._data_parallel_text(program(on(2, 2)))
    assert re.search(r"^  sent after the backward pass \(--data-parallel.overlap sends", text, re.M)


STAGES = dict(mesh=MeshConfig(dp=2, pp=3), pipeline=PipelineConfig(microbatches=2))
REFUSED = [
    (dict(accumulation=2), "accumulation=2"),
    (STAGES | dict(global_batch=8), "mesh.pp=3"),
    (dict(lora=LoraConfig(rank=2)), "lora.rank=2"),
    (dict(optimizer=OptimizerConfig(name="muon")), "data_parallel.zero1 and optimizer.name='muon'"),
    (dict(model=dataclasses.replace(CONFIG.model, n_layers=1)), "model.n_layers=1"),
]


@pytest.mark.parametrize("changes, why", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_where_gradients_are_not_whole_they_go_after_the_backward_pass(changes, why):
    zero1 = "muon" in why
    assert overlap(on(2, changes=changes, zero1=zero1)) == (False, why)
    with pytest.raises(ConfigError, match=re.escape(f"data_parallel.overlap=True: must be False with {why}")):
        check(on(2, changes=changes, zero1=zero1, overlap=True))


def test_one_rank_sends_nothing():
    config = check(on(1, overlap=True))
    assert overlap(config) == (False, "mesh.dp=1")
    assert overlap(on(2, overlap=True)) == (True, "as configured") and not overlap(on(2, overlap=False))[0]


def test_shares_of_layers_sums_are_parts_of_every_layer():
    """Where as many ranks as layers would else have a whole layer each."""

    def dims(**settings):
        dp = program(on(3, changes={"global_batch": 6}, zero1=True, **settings)).data_parallel
        leaves = zip(*map(jax.tree.leaves, (dp.cuts["layers"], dp.by_layer["layers"])), strict=True)
        return [(c.dim, own) for c, own in leaves]

    assert {dim for dim, _ in dims()} == {0}
    assert {dim for dim, own in dims(overlap=True) if own} <= {1, 2}
