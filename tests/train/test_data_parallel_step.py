"""Data parallelism: sums over dp in a codec and optimiser states of shares train as one device does, and send what is
listed."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from data_parallel_programs import ADAM, CONFIG, MODEL, SGD, batch
from hlo import collectives
from model_helpers import assert_gradients_close, by_path, compare_replicas, unpadded

from taco_jax.codec import CODECS
from taco_jax.config import (
    CheckpointConfig,
    DataParallelConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
)
from taco_jax.mesh import make_mesh
from taco_jax.train import loop as trainer
from taco_jax.train.checkpoint import Checkpoints
from taco_jax.train.step import build

SLOW = pytest.mark.slow


def on(dp=1, tp=1, config=CONFIG, optimizer=None, **data_parallel):
    changes = {"accumulation": data_parallel.pop("accumulation", config.accumulation)}
    hosts = data_parallel.pop("devices_per_host", None)
    return dataclasses.replace(
        config,
        mesh=MeshConfig(dp=dp, tp=tp, devices_per_host=hosts),
        optimizer=optimizer or config.optimizer,
        data_parallel=DataParallelConfig(**{"gradients": "none"} | data_parallel),
        **changes,
    )


def program(config):
    return build(config, make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp))


def whole(p, tree):
    """A tree like the parameters' as the model has it, by path: without the padding of shares and of the vocabulary."""
    if p.data_parallel.sharded and jax.tree.leaves(tree)[0].sharding.spec != jax.tree.leaves(p._param_specs)[0]:
        tree = jax.jit(p.data_parallel.whole)(tree)
    return by_path(unpadded(tree, p.config.model))


def moments(p, state):
    return whole(p, state.opt_state[1][0].mu)


@dataclasses.dataclass
class Trained:
    """What three steps give. gradient: of the first, as the optimiser saw it (clipped)."""

    losses: list
    norms: list
    gradient: dict
    start: dict
    params: dict
    state: object
    program: object


RUNS = {}


def train(config) -> Trained:
    key = repr(config)
    if key not in RUNS:
        RUNS[key] = _train(config)
    return RUNS[key]


def _train(config, steps=3) -> Trained:
    p = program(config)
    state = p.init(jax.random.key(config.seed))
    start, losses, norms = whole(p, state.params), [], []
    for i in range(steps):
        state, metrics = p.step(state, batch(p, i))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        if i == 0:
            # The mean starts at zero.
            gradient = {path: m / (1 - config.optimizer.beta1) for path, m in moments(p, state).items()}
    return Trained(losses, norms, gradient, start, whole(p, state.params), state, p)


def check_exact(config):
    got, want = train(config), train(on(optimizer=config.optimizer))
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-6)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5)
    assert_gradients_close(got.gradient, want.gradient, exact=True)
    # Where g is near eps Adam's step has the gradient's error many times over: an update is compared, more loosely.
    for path in want.params:
        moved, expected = got.params[path] - got.start[path], want.params[path] - want.start[path]
        assert np.linalg.norm(moved - expected) <= 2e-4 * np.linalg.norm(expected), path
    return got


EXACT = [
    pytest.param(2, 2, {}, marks=SLOW),
    (4, 2, dict(zero1=True, bucket_mb=0.01, accumulation=2)),
    pytest.param(8, 1, dict(zero1=True), marks=SLOW),
]
CODED = on(4, 2, optimizer=ADAM, zero1=True, gradients="int8h", parameters="int8h", bucket_mb=0.02)

PLACES = {
    "one": on(optimizer=ADAM),
    "dp2 tp2": on(2, 2, optimizer=ADAM),
    "dp4 tp2 zero1": on(4, 2, optimizer=ADAM, zero1=True, bucket_mb=0.01, accumulation=2),
    "dp8 zero1": on(8, 1, optimizer=ADAM, zero1=True),
    "coded": CODED,
}


@pytest.mark.parametrize("dp, tp, settings", EXACT)
def test_exact_steps_equal_those_of_one_device(dp, tp, settings):
    check_exact(on(dp, tp, optimizer=ADAM, **settings))


@SLOW
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("dp, tp", [(2, 2), (4, 2), (2, 4), (8, 1)])
def test_exact_steps_full_product(dp, tp, zero1, accumulation, optimizer):
    if (8 // dp) % accumulation:
        pytest.skip("a device has one sequence")
    check_exact(on(dp, tp, optimizer=optimizer, zero1=zero1, accumulation=accumulation))


def check_coded(config):
    got, want = train(config), train(on(optimizer=config.optimizer))
    np.testing.assert_allclose(got.losses, want.losses, rtol=2e-3)
    np.testing.assert_allclose(got.norms, want.norms, rtol=0.02)
    assert_gradients_close(got.gradient, want.gradient, exact=False)
    with pytest.raises(AssertionError):
        assert_gradients_close(got.gradient, want.gradient, exact=True)


@SLOW
def test_eight_bit_steps():
    check_coded(CODED)


@SLOW
@pytest.mark.parametrize("codec", ["int8h", "e4m3h", "mxint8"])
@pytest.mark.parametrize("settings", [{}, dict(zero1=True), dict(zero1=True, parameters="int8h")], ids=str)
@pytest.mark.parametrize("dp, tp", [(2, 2), (4, 2), (8, 1)])
def test_eight_bit_full_product(dp, tp, settings, codec):
    check_coded(on(dp, tp, optimizer=ADAM, gradients=codec, **settings))


@SLOW
@pytest.mark.parametrize(
    "settings",
    [
        dict(gradients="int8h"),
        dict(gradients="sdp4", devices_per_host=4),
        dict(gradients="sdp4", devices_per_host=4, zero1=True, parameters="int4h"),
        dict(gradients="int8h", zero1=True, parameters="bfloat16"),
    ],
    ids=str,
)
def test_curve_of_bfloat16_steps_follows_the_exact_one(settings):
    adam = OptimizerConfig(learning_rate=3e-3, warmup_steps=3)
    config = dataclasses.replace(on(4, 2, optimizer=adam, **settings), compute_dtype="bfloat16")
    got, want = _train(config, 20), _train(on(optimizer=adam), 20)
    assert want.losses[-1] < want.losses[0] - 0.5
    np.testing.assert_allclose(got.losses, want.losses, rtol=0.01)


@pytest.mark.parametrize("config", [CODED, PLACES["dp4 tp2 zero1"]], ids=["coded", "exact"])
def test_the_compiled_step_sends_what_the_table_lists(config):
    p = train(config).program
    sent, rows = collectives(p.step), p.table.rows()
    listed = [message for row in rows for message in row.hlo if message[0] != "all-reduce"]
    # All-reduces are of scalars, of tp, and of the global norm; nothing else is gathered over dp.
    assert [c for c in sent if c[0] != "all-reduce"] == sorted(listed)
    over_dp = [row for row in rows if row.kind in ("gradient", "parameter")]
    assert {row.kind for row in over_dp} == {"gradient", "parameter"}
    assert sum(row.calls for row in rows if row.site.startswith("dp/")) == len(over_dp) + 1
    coded = config is CODED
    for row in over_dp:
        assert row.codec == ("int8h" if coded else "none") and row.ranks == config.mesh.dp
        if coded:
            chunks = len(row.hlo)
            assert {dtype for _, dtype, _ in row.hlo} == {"uint8"}
            bound = row.ranks * CODECS["int8h"].wire_bytes(row.elements // row.ranks)
            assert bound <= sum(n for _, _, n in row.hlo) < bound + chunks * row.ranks * 1152
    largest = max(elements for opcode, _, elements in sent if opcode == "all-reduce")
    assert largest <= config.global_batch // config.mesh.dp * config.data.sequence_length * MODEL.d_model
    sums_over_dp = [row for row in rows if row.op == "psum" and "dp" in row.axis]
    assert [(row.site, row.elements) for row in sums_over_dp] == [("dp/loss", 1)]


@pytest.mark.parametrize(
    "config",
    [pytest.param(CODED, id="coded"), pytest.param(on(8, 1, optimizer=ADAM, zero1=True), marks=SLOW, id="exact")],
)
def test_no_device_holds_a_whole_optimiser_state(config):
    run = train(config)
    p, dp, tp = run.program, config.mesh.dp, config.mesh.tp
    elements = lambda tree: sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree))
    whole = sum(np.prod(c.shape) for c in jax.tree.leaves(p.data_parallel.cuts))
    adam = run.state.opt_state[1][0]
    for moment in (adam.mu, adam.nu, *([run.state.params] if config is CODED else [])):
        for leaf, cut in zip(*map(jax.tree.leaves, (moment, p.data_parallel.cuts))):
            assert leaf.addressable_shards[0].data.shape == cut.share_shape
        # Norms are padded: little.
        assert whole / dp <= elements(moment) <= 1.03 * whole / dp
    held = run.state.copy if config is CODED else run.state.params
    assert elements(held) == whole
    arguments = p.step.memory_analysis().argument_size_in_bytes
    moments = 2 + (config is CODED)
    assert arguments < 4 * whole * (1 + 1.03 * moments / dp) + 5000 < 4 * whole * 3
    assert tp in (1, 2)


def test_replicas_are_bit_identical_and_the_copy_is_near_the_masters():
    run = train(CODED)
    assert compare_replicas(run.state) > 50
    copy = by_path(unpadded(run.state.copy, MODEL))
    for path, master in run.params.items():
        # Three steps of Adam; a difference is of the last one, in 8 bits.
        assert 0 < np.abs(copy[path] - master).max() < 0.03 * np.abs(master - run.start[path]).max(), path


def fresh(state):
    """A copy: a step takes the arrays that it is given."""
    return jax.tree.map(lambda a: jax.device_put(np.asarray(a), a.sharding), state)


def test_a_non_finite_step_changes_nothing_but_the_position():
    run = train(CODED)
    state = fresh(run.state)
    norm = jax.tree.map(lambda a: a * np.inf, state.copy["final_norm"])
    state = dataclasses.replace(state, copy=state.copy | {"final_norm": norm})
    before = fresh(state)
    for _ in range(2):
        state, metrics = run.program.step(state, batch(run.program))
        assert metrics["skipped"] == 1 and not np.isfinite(metrics["grad_norm"])
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (5, 2, 2)
    for name in ("params", "opt_state", "copy"):
        for old, new in zip(*map(jax.tree.leaves, (getattr(before, name), getattr(state, name)))):
            for a, b in zip(old.addressable_shards, new.addressable_shards):
                np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))


def save(folder, run):
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        checkpoints.save(3, run.program.stored.pack(run.state), {})
    return folder


def restore(folder, p):
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        stored, _, remarks = checkpoints.restore(3, p.stored.shapes, MODEL.vocab_size, dict)
    return p.stored.unpack(stored), remarks


def check_state(p, state, run):
    """The same step, masters and moments as of `run`, whatever the mesh, and where `p` holds them."""
    assert int(state.step) == 3
    for path, leaf in whole(p, state.params).items():
        np.testing.assert_array_equal(leaf, run.params[path])
    for path, leaf in moments(p, state).items():
        np.testing.assert_array_equal(leaf, moments(run.program, run.state)[path])
    for leaf, shape in zip(*map(jax.tree.leaves, (state, p.state_shapes))):
        assert leaf.shape == shape.shape and leaf.dtype == shape.dtype
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)


@pytest.mark.parametrize(
    "start, end",
    [
        ("one", "dp4 tp2 zero1"),
        pytest.param("dp4 tp2 zero1", "one", marks=SLOW),
        pytest.param("dp2 tp2", "dp8 zero1", marks=SLOW),
        pytest.param("dp8 zero1", "dp2 tp2", marks=SLOW),
    ],
)
def test_resumed_elsewhere(tmp_path, start, end):
    """Steps go on as if there had been no other mesh."""
    run, p = train(PLACES[start]), train(PLACES[end]).program
    state, remarks = restore(save(tmp_path, run), p)
    assert remarks == []
    check_state(p, state, run)
    here = fresh(run.state)
    for step in (3, 4):
        state, metrics = p.step(state, batch(p, step))
        here, expected = run.program.step(here, batch(run.program, step))
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-5)


@SLOW
def test_resumed_where_the_copy_is(tmp_path):
    """A stored copy makes the resumed run the same bit for bit; others start from the masters, and say so."""
    run = train(CODED)
    save(tmp_path / "coded", run)
    state, remarks = restore(tmp_path / "coded", run.program)
    check_state(run.program, state, run)
    assert remarks == []
    here = fresh(run.state)
    for step in (3, 4):
        state, metrics = run.program.step(state, batch(run.program, step))
        here, expected = run.program.step(here, batch(run.program, step))
        assert float(metrics["loss"]) == float(expected["loss"])
    p = train(PLACES["one"]).program
    state, remarks = restore(tmp_path / "coded", p)
    check_state(p, state, run)
    assert remarks == [] and state.copy is None
    exact = train(PLACES["dp8 zero1"])
    state, remarks = restore(save(tmp_path / "exact", exact), run.program)
    check_state(run.program, state, exact)
    assert remarks == ["the ranks' copy of the parameters starts from the master weights"]
    for path, leaf in by_path(unpadded(state.copy, MODEL)).items():
        np.testing.assert_array_equal(leaf, exact.params[path])


@pytest.mark.parametrize(
    "start, settings",
    [
        pytest.param("dp4 tp2 zero1", dict(dp=1, tp=4), marks=SLOW),
        ("dp8 zero1", dict(dp=4, tp=2, zero1=True, parameters="bfloat16")),
        pytest.param("dp2 tp2", dict(dp=1, tp=4), marks=SLOW),
        pytest.param("dp2 tp2", dict(dp=8, zero1=True, parameters="int4h"), marks=SLOW),
        pytest.param("dp8 zero1", dict(dp=2, tp=4, zero1=True), marks=SLOW),
        pytest.param("coded", dict(dp=8), marks=SLOW),
    ],
)
def test_a_state_can_be_restored_on_any_mesh(tmp_path, start, settings):
    """Vocabularies padded for another tp and shares padded for another dp are the same numbers."""
    run, p = train(PLACES[start]), program(on(optimizer=ADAM, **settings))
    state, remarks = restore(save(tmp_path, run), p)
    check_state(p, state, run)
    assert len(remarks) == (settings.get("parameters") == "int4h")
    if p.data_parallel.has_copy:
        for path, leaf in by_path(unpadded(state.copy, MODEL)).items():
            assert leaf.dtype == ("float32" if settings["parameters"] == "int4h" else "bfloat16")
            np.testing.assert_array_equal(leaf, run.params[path].astype(leaf.dtype))


@SLOW
def test_trainer_resumes_on_another_mesh_at_the_same_data(tmp_path):
    """From dp 4 x tp 2 with shares and differences to dp 1 x tp 4, then dp 2 without, against one run that stays."""
    changes = dict(steps=9, workdir=str(tmp_path / "a"), evaluation=EvalConfig(batches=1))
    config = dataclasses.replace(CODED, **changes, model=dataclasses.replace(MODEL, vocab_size=256))
    trainer.train(dataclasses.replace(config, workdir=str(tmp_path / "whole")))
    trainer.train(dataclasses.replace(config, stop_after=3))
    for stop, mesh in ((6, MeshConfig(tp=4)), (9, MeshConfig(dp=2))):
        elsewhere = dataclasses.replace(config, mesh=mesh, data_parallel=DataParallelConfig(), stop_after=stop)
        trainer.train(elsewhere)
    records = [[json.loads(line) for line in open(tmp_path / name / "metrics.jsonl")] for name in ("a", "whole")]
    assert [r["samples"] for r in records[0]] == [r["samples"] for r in records[1]] == [8 * n for n in range(1, 10)]
    np.testing.assert_allclose(*([r["loss"] for r in run] for run in records), rtol=2e-3)
