"""A run with a guard: outliers that grow and go, the line, the record, the program afterwards, resuming."""

import contextlib
import dataclasses
import re

import jax
import numpy as np
import pytest
from hlo import collectives
from programs import shared_programs

from taco_jax.codec import as_codec
from taco_jax.config import (
    CheckpointConfig,
    CompressionConfig,
    DataConfig,
    EvalConfig,
    MeshConfig,
    MetricsConfig,
    OptimizerConfig,
    TrainConfig,
)
from taco_jax.config.checks import check
from taco_jax.mesh import make_mesh
from taco_jax.models.config import ModelConfig
from taco_jax.train import loop, step
from taco_jax.train.guarded import GuardedPrograms
from taco_jax.train.metrics import read_records

# Blocks of 64, as wide as the residual stream, without a rotation: one large channel takes a bit and more from all
# others. Every second step is measured, every eighth the codecs before.
PLAIN, SITE = "int4h,block=64,rotation=none", "layers/attn/out"
BETTER = PLAIN.replace("int4h", "int6h")
CONFIG = check(
    TrainConfig(
        model=ModelConfig(d_model=64, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=16, d_mlp=64),
        mesh=MeshConfig(tp=2),
        compression=CompressionConfig(PLAIN, "int8h", min_bytes=0, guard="act", guard_patience=2),
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


@contextlib.contextmanager
def outliers(*, at: dict[int, float]):
    """Within it one channel of what attention adds to the residual stream is multiplied, after the steps `at`, by the
    factor there."""
    unchanged = loop.Run.finish

    def scaled(factor, path, w):
        if tuple(key.key for key in path)[-3:] != ("attn", "out", "kernel"):
            return w
        values = np.array(w)
        values[..., 0] *= factor
        return jax.device_put(values, w.sharding)

    def finish(run, at_step, *arguments, **options):
        unchanged(run, at_step, *arguments, **options)
        if at_step in at:
            change = lambda path, w: scaled(at[at_step], path, w)
            params = jax.tree_util.tree_map_with_path(change, run.state.params)
            run.state = dataclasses.replace(run.state, params=params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Run, "finish", finish)
        yield


def run(workdir, stop_after, *, guard="act", at=None, **changes):
    compression = dataclasses.replace(CONFIG.compression, guard=guard, **changes.pop("compression", {}))
    with outliers(at=at or {}):
        loop.train(dataclasses.replace(
            CONFIG, workdir=str(workdir), stop_after=stop_after, compression=compression, **changes
        ))  # fmt: skip
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
        "kind": "raise", "site": SITE, "direction": "forward", "from": PLAIN_NAME, "to": BETTER_NAME, "why": "snr",
        "first_step": 13,
    }  # fmt: skip
    first = np.median([records[s]["sites"][f"{SITE}/forward"]["snr_db"] for s in (2, 4, 6)])
    assert event["bound_db"] == pytest.approx(first - 3) and event["snr_db"] < event["bound_db"]
    assert event["snr_db"] == records[12]["sites"][f"{SITE}/forward"]["snr_db"] and event["compile_seconds"] > 0
    lines = [line for line in out.splitlines() if line.startswith("guard: step")]
    assert len(lines) == 1 and re.fullmatch(
        rf"guard: step 12: {SITE} forward {PLAIN_NAME} -> {BETTER_NAME} \(SNR 1\d\.\d dB, bound 1\d\.\d, 2 in a row\); "
        r"from step 13 on, compiled in \d+ s", lines[0],
    )  # fmt: skip
    # What is sent then is what the site table of a run with such a plan says.
    assert records[14]["comm_bytes"] - records[12]["comm_bytes"] == more_bytes()
    assert records[14]["sites"][f"{SITE}/forward"]["snr_db"] > event["bound_db"] + 1.5

    records = run(workdir, 44, at={16: 1 / 20})
    out = capsys.readouterr().out
    assert f"resumed from step 14\n" in out and f"moved: {SITE}/forward {BETTER_NAME} instead of {PLAIN_NAME}" in out
    assert records[16]["comm_bytes"] == records[14]["comm_bytes"]
    (at,) = events(records).keys() - {12}
    (event,) = events(records)[at]
    # Measurements of the codec before: every fourth one; the first of them came before the outliers were gone, or not.
    assert at in (24, 32) and event["kind"] == "back" and event["to"] == PLAIN_NAME
    assert event["snr_db"] == pytest.approx(first, abs=1)
    assert f"{SITE} forward {BETTER_NAME} -> {PLAIN_NAME} again ({PLAIN_NAME} has SNR" in out
    assert records[at + 2]["comm_bytes"] == records[12]["comm_bytes"]
    assert records[at + 2]["sites"][f"{SITE}/forward"]["snr_db"] == pytest.approx(first, abs=1)


PLAIN_NAME, BETTER_NAME = "int4h,block=64,rotation=none", "int6h,block=64,rotation=none"


def more_bytes():
    """What the site's forward messages take more in the better codec, by the bytes of its wires."""
    elements = CONFIG.global_batch * CONFIG.data.sequence_length * CONFIG.model.d_model
    return as_codec(BETTER).wire_bytes(elements) - as_codec(PLAIN).wire_bytes(elements)
