"""A run with a guard: outliers that grow and go, the line, the record, the program afterwards, resuming."""

import dataclasses
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hlo import collectives
from jax.experimental import multihost_utils
from outliers import outliers
from programs import shared_programs

from taco_jax.codec import UNCALIBRATED, as_codec
from taco_jax.compression import plan_file
from taco_jax.compression.compression import Compression
from taco_jax.compression.plan_file import SitePlan
from taco_jax.config import (
    CheckpointConfig,
    CompressionConfig,
    DataConfig,
    DataParallelConfig,
    EvalConfig,
    LoraConfig,
    MeshConfig,
    MetricsConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)
from taco_jax.config.checks import check
from taco_jax.mesh import make_mesh
from taco_jax.models import decoder
from taco_jax.models.config import ModelConfig
from taco_jax.train import guarded, loop, site_plan, site_stats, step
from taco_jax.train.guard import FORMER_EVERY, Event, Measured, ladder, text_of
from taco_jax.train.guarded import GuardedPrograms, mode_and_bounds
from taco_jax.train.metrics import read_records

# Blocks of 64, as wide as the residual stream, without a rotation: one large channel takes a bit and more from all
# others. Every second step is measured, every eighth the codecs before.
PLAIN, BETTER = "int4h,block=64,rotation=none", "int6h,block=64,rotation=none"
SITE = "layers/attn/out"
CONFIG = check(
    TrainConfig(
        model=ModelConfig(d_model=64, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=16, d_mlp=64),
        mesh=MeshConfig(tp=2),
        compression=CompressionConfig(
            "none", "none", min_bytes=0, plan={SITE: f"{PLAIN}:none"}, guard="act", guard_patience=2
        ),
        data=DataConfig(sequence_length=32, prefetch=0),
        optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=0),
        checkpoint=CheckpointConfig(every=1000),
        evaluation=EvalConfig(every=1000, batches=1),
        metrics=MetricsConfig(every=1000, snr_every=2),
        global_batch=4,
        steps=60,
        compute_dtype="float32",
        devices="cpu:8",
    )
)


@pytest.fixture(scope="module", autouse=True)
def programs():
    with shared_programs():
        yield


def run(workdir, stop_after, *, guard="act", at=None, **changes):
    compression = dataclasses.replace(CONFIG.compression, guard=guard, **changes.pop("compression", {}))
    programs = {}
    with outliers(at or {}, lambda run, step: programs.update({step: run.program})):
        loop.train(dataclasses.replace(
            CONFIG, workdir=str(workdir), stop_after=stop_after, compression=compression, **changes
        ))  # fmt: skip
    run.programs = programs
    return {record["step"]: record for record in read_records(workdir / "metrics.jsonl")}


def events(records):
    return {step: record["guard"] for step, record in records.items() if "guard" in record}


def test_outliers_that_grow_move_a_site_and_it_goes_back_when_they_are_gone(tmp_path, capsys):
    """Stopped after the move and gone on from there, the run begins with the codec that it moved to."""
    workdir = tmp_path / "run"
    records = run(workdir, 14, at={8: 20.0})
    out = capsys.readouterr().out
    ((event,),) = events(records).values()
    assert events(records).keys() == {12}  # the second measurement with outliers
    assert {key: event[key] for key in ("kind", "site", "direction", "from", "to", "why", "first_step")} == {
        "kind": "raise", "site": SITE, "direction": "forward", "from": PLAIN, "to": BETTER, "why": "snr",
        "first_step": 13,
    }  # fmt: skip
    first = np.median([records[s]["sites"][f"{SITE}/forward"]["snr_db"] for s in (2, 4, 6)])
    assert event["bound_db"] == pytest.approx(first - 3) and event["snr_db"] < event["bound_db"]
    assert event["snr_db"] == records[12]["sites"][f"{SITE}/forward"]["snr_db"] and event["compile_seconds"] > 0
    lines = [line for line in out.splitlines() if line.startswith("guard: step")]
    assert len(lines) == 1 and re.fullmatch(
        rf"guard: step 12: {SITE} forward {PLAIN} -> {BETTER} \(SNR 1\d\.\d dB, bound 1\d\.\d, 2 in a row\); "
        r"from step 13 on, compiled in \d+ s", lines[0],
    )  # fmt: skip
    # Bytes of the records, and of what is compiled.
    assert records[14]["comm_bytes"] - records[12]["comm_bytes"] == more_bytes()
    before, after = (bytes_in(run.programs[s]) for s in (11, 12))
    assert after - before == more_bytes() * 2  # a sum of two ranks gathers both wires
    assert records[14]["sites"][f"{SITE}/forward"]["snr_db"] > event["bound_db"] + 1.5

    records = run(workdir, 44, at={16: 1 / 20})
    out = capsys.readouterr().out
    assert "resumed from step 14\n" in out and f"moved: {SITE}/forward {BETTER} instead of {PLAIN}" in out
    assert records[16]["comm_bytes"] == records[14]["comm_bytes"]
    (at,) = events(records).keys() - {12}
    (event,) = events(records)[at]
    # Measurements of the codec before: every fourth one; the first of them came before the outliers were gone, or not.
    assert at in (24, 32) and event["kind"] == "back" and event["to"] == PLAIN
    assert event["snr_db"] == pytest.approx(first, abs=1)
    assert f"{SITE} forward {BETTER} -> {PLAIN} again ({PLAIN} has SNR" in out
    assert records[at + 2]["comm_bytes"] == records[12]["comm_bytes"]
    assert records[at + 2]["sites"][f"{SITE}/forward"]["snr_db"] == pytest.approx(first, abs=1)


def more_bytes():
    """What the site's forward messages take more in the better codec, by the bytes of its wires."""
    elements = CONFIG.global_batch * CONFIG.data.sequence_length * CONFIG.model.d_model
    return as_codec(BETTER).wire_bytes(elements) - as_codec(PLAIN).wire_bytes(elements)


def bytes_in(program):
    """What all sums of a compiled step bring in codecs, counted in its HLO."""
    return sum(elements for _, dtype, elements in collectives(program.step) if dtype == "uint8")


def test_a_warning_changes_nothing(tmp_path, capsys):
    records = run(tmp_path / "run", 16, guard="warn", at={8: 20.0})
    ((event,),) = events(records).values()
    assert events(records).keys() == {12} and event["kind"] == "warn" and event["to"] == BETTER
    assert "first_step" not in event and len({record["comm_bytes"] for record in records.values()}) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("guard: step")]
    assert len(lines) == 1 and re.fullmatch(
        rf"guard: step 12: {SITE} forward stays in {PLAIN} \(SNR 1\d\.\d dB, bound 1\d\.\d, 2 in a row; "
        rf"compression.guard=act would send it in {BETTER}\)", lines[0],
    )  # fmt: skip


def test_a_plan_file_brings_bounds_and_warnings(tmp_path):
    measured = {"snr_db": 21.5, "guard_snr_db": 18.5}
    sites = {SITE: SitePlan(PLAIN, "int8h", forward_measured=measured, backward_measured={"snr_db": 44.0})}
    path, names = tmp_path / "plan.json", decoder.site_names(CONFIG.model, 2)
    plan_file.write(plan_file.PlanFile(sites, {"shape": plan_file.shape_of(CONFIG.model), "sites": names}), path)
    for guard, mode in ((None, "warn"), ("off", "off"), ("act", "act")):
        compression = CompressionConfig("none", "none", min_bytes=0, plan=str(path), guard=guard)
        config = check(dataclasses.replace(CONFIG, compression=compression))
        assert mode_and_bounds(config) == (mode, {f"{SITE}/forward": 18.5})
    made = GuardedPrograms(config, step.build(config, make_mesh(tp=2)), 0, None)
    assert made.guard.bound(f"{SITE}/forward") == 18.5
    # The other direction of the site is no message here: the column-parallel product before it has the gradient's.
    assert list(made.guard.ways) == [f"{SITE}/forward"]
    assert mode_and_bounds(dataclasses.replace(config, compression=CompressionConfig())) == ("off", {})


def test_a_direction_in_another_codec_leaves_the_other_one():
    plan = {SITE: Compression("int4h", backward="int8h", between_hosts="int4h", chunks=3), "head": None}
    assert site_plan.in_other_codecs(plan, {}) == plan
    moved = site_plan.in_other_codecs(plan, {f"{SITE}/backward": "none"})
    assert moved == {SITE: Compression("int4h", backward="none", chunks=3), "head": None}
    assert site_plan.in_other_codecs(plan, {f"{SITE}/backward": "none", f"{SITE}/forward": "none"})[SITE] is None


def test_a_site_that_changes_its_codec_starts_uncalibrated():
    """Another element has other block scales, and those of a site that was exact are old."""
    compression = CompressionConfig("taco", "taco", min_bytes=0, guard="act")
    config = check(dataclasses.replace(CONFIG, compression=compression))
    made = GuardedPrograms(config, step.build(config, make_mesh(tp=2)), 0, None)
    scales = jax.tree.map(lambda a: a + a.dtype.type(3), made.program.init_scales())
    found = made._fresh_scales(SimpleNamespace(scales=scales), [f"{SITE}/forward"])
    for site in scales:
        changed = not jax.tree.all(jax.tree.map(np.array_equal, found[site], scales[site]))
        assert changed == (site == SITE)
    assert (np.array(found[SITE].exponents) == UNCALIBRATED).all() and not np.array(found[SITE].history).any()


def test_processes_take_what_the_first_one_measured(monkeypatch):
    first = np.float32([0.5, *range(24)])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda own: {first.shape: first}[own.shape])
    own = {"layers/b": np.full((1, 2, 6), 7.0), "a": np.full((2, 6), 8.0)}
    cost, stats = guarded._agree(9.0, own)
    assert cost == 0.5 and stats.keys() == own.keys()
    assert np.array_equal(stats["a"], np.arange(12).reshape(2, 6))
    assert np.array_equal(stats["layers/b"], np.arange(12, 24).reshape(1, 2, 6))


@pytest.mark.slow
def test_the_codec_that_a_site_moved_to_is_in_force_on_another_mesh_and_goes_with_the_guard(tmp_path, capsys):
    records = run(tmp_path / "run", 12, at={8: 20.0})
    (event,) = events(records)[12]
    codecs_of_site = lambda: {row.codec for row in run.programs[13].table.rows() if row.site == SITE}
    # The run ended with the step that decided: nothing was compiled for it.
    assert event["compile_seconds"] is None and "from step 13 on\n" in capsys.readouterr().out
    for mesh in (MeshConfig(dp=2, tp=4), MeshConfig(dp=2, pp=1, tp=2)):
        copy = tmp_path / f"{mesh.dp}-{mesh.tp}"
        shutil.copytree(tmp_path / "run", copy)
        run(copy, 14, mesh=mesh)
        assert f"moved: {SITE}/forward {BETTER} instead of {PLAIN}" in capsys.readouterr().out
        assert codecs_of_site() == {as_codec(BETTER).name}
        shutil.copytree(tmp_path / "run", copy.with_name("off"))
        run(copy.with_name("off"), 14, mesh=mesh, guard="off")
        out = capsys.readouterr().out
        assert f"guard: {SITE}/forward goes back from {BETTER} to {PLAIN}, since compression.guard=off" in out
        assert codecs_of_site() == {as_codec(PLAIN).name}
        shutil.rmtree(copy.with_name("off"))


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    """Stopped right after the move."""
    whole = run(tmp_path / "whole", 20, at={8: 20.0})
    run(tmp_path / "parts", 12, at={8: 20.0})
    parts = run(tmp_path / "parts", 20)
    assert events(parts).keys() == events(whole).keys() == {12}
    assert [parts[s]["loss"] for s in (14, 20)] == pytest.approx([whole[s]["loss"] for s in (14, 20)], rel=1e-6)
    assert [parts[s]["sites"] for s in (14, 20)] == [whole[s]["sites"] for s in (14, 20)]


SETTINGS = {
    "taco": {"compression": {"forward": "taco"}},
    "accumulation": {"accumulation": 2},
    "feedback": {"compression": {"error_feedback": True, "backward_error_feedback": True}},
    "chains": {"chains": 2},
    "sequence-parallel": {"sequence_parallel": True},
    "gpipe": {"mesh": MeshConfig(dp=2, pp=2, tp=2), "pipeline": PipelineConfig(microbatches=2)},
    "1f1b": {"mesh": MeshConfig(pp=2, tp=2), "pipeline": PipelineConfig(schedule="1f1b", microbatches=2)},
    "circular": {"mesh": MeshConfig(pp=2, tp=2), "pipeline": PipelineConfig(schedule="circular", microbatches=2)},
    "zero1": {"mesh": MeshConfig(dp=2, tp=2), "data_parallel": DataParallelConfig(zero1=True)},
    "levels": {"mesh": MeshConfig(tp=4, devices_per_host=2), "compression": {"between_hosts": "int4h"}},
    "adapters": {"lora": LoraConfig(rank=4)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_programs_of_moved_codecs(name):
    """With each: what is measured apart is what the step measures; a step in other codecs, and in exact ones, keeps the
    state's form and the loss; the way back is the first program."""
    changes = dict(SETTINGS[name])
    options = {"forward": "int6h", "backward": "int8h", "guard": "act", "guard_patience": 1, "calibration_steps": 1}
    compression = CompressionConfig(**options | {"min_bytes": 0} | changes.pop("compression", {}))
    model = dataclasses.replace(CONFIG.model, n_layers=4)
    config = check(dataclasses.replace(CONFIG, model=model, global_batch=8, compression=compression, **changes))
    mesh = make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp)
    program = step.build(config, mesh)
    made = GuardedPrograms(config, program, 0, None)
    ways = made.guard.ways
    assert set(ways) >= {"layers/attn/out/forward", "head/backward"}
    assert ("pp/act/forward" in ways) == (mesh.shape["pp"] > 1)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 33)).astype(np.int32)
    batch = {"tokens": jax.device_put(tokens, program.batch_sharding)}
    state, _ = program.step(program.init(jax.random.key(0)), batch)
    apart = site_stats.summarise_stats(jax.device_get(program.measure(state, batch)))
    state, metrics = program.step_with_stats(state, batch)
    within, loss = site_stats.summarise_stats(jax.device_get(metrics["stats"])), float(metrics["loss"])
    assert apart.keys() == within.keys() == set(ways)
    for way in ways:
        assert apart[way]["snr_db"] == pytest.approx(within[way]["snr_db"], abs=0.01), way

    # Every way but one to something better, some of them exact.
    structure = jax.tree.structure(state)
    moving = {way: known for way, known in ways.items() if way != "head/backward"}
    for i, known in enumerate(moving.values()):
        known.codecs.append(text_of(ladder(as_codec(known.codec))[-1 if i % 2 else 0]))
    found = {"why": "snr", "measured": Measured(1.0, 0.0, 0.0), "bound_db": 2.0}
    events = [Event("raise", way, *known.codecs, **found) for way, known in moving.items()]
    state, _ = made.change(events, state)
    assert jax.tree.structure(state) == structure
    state, _ = made.program.step(state, batch)
    state, metrics = made.program.step_with_stats(state, batch)
    stats = jax.device_get(metrics["stats"])
    better, rows = site_stats.summarise_stats(stats), made.program.table.rows()
    assert abs(float(metrics["loss"]) - loss) < 0.1 and float(metrics["skipped"]) == 0
    assert better.keys() == {way for way, known in ways.items() if known.codec != "none"}
    codecs = {f"{row.site}/{row.direction}": row.codec for row in rows if row.kind == "activation"}
    assert {way: codecs[way] for way in ways} == {way: as_codec(known.codec).name for way, known in ways.items()}
    for way in moving.keys() & better.keys():
        assert better[way]["snr_db"] > apart[way]["snr_db"] + 3, way

    # All measured as they would be in the codecs before, which changes nothing.
    made.budget._count = FORMER_EVERY - 1
    made.guard._bounds = {way: values["snr_db"] - 2 for way, values in apart.items()}
    before = jax.device_get(state.params)
    events = made.measured(4, stats, state, batch)
    assert {event.way: event.kind for event in events} == dict.fromkeys(moving, "back")
    for event in events:
        assert event.measured.snr_db == pytest.approx(apart[event.way]["snr_db"], abs=1.0), event.way
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(state.params)))
    state, _ = made.change(events, state)
    assert made.program is program and made.guard.moved == {}
    _, metrics = program.step(state, batch)
    assert abs(float(metrics["loss"]) - loss) < 0.1
