"""The trainer with stages: what it says, what it saves, and that a run goes on with other stages."""

import dataclasses
import re

import numpy as np
import pytest
from programs import shared_programs

from taco_jax.config import (
    CheckpointConfig,
    CompressionConfig,
    DataConfig,
    DataParallelConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)
from taco_jax.config.checks import check
from taco_jax.mesh import make_mesh
from taco_jax.train import dry_run
from taco_jax.train.loop import train
from taco_jax.train.metrics import read_records
from taco_jax.train.site_plan import resolve_plan
from taco_jax.train.step import build

MODEL = ModelConfig(d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, d_mlp=64, tied_head=True)
WHOLE = {"mesh": MeshConfig()}
GPIPE = {"mesh": MeshConfig(dp=2, pp=2)}
CIRCULAR = {"mesh": MeshConfig(pp=2, tp=2), "pipeline": PipelineConfig("circular", forward="none", backward="none")}
SHARES = CIRCULAR | {
    "mesh": MeshConfig(dp=2, pp=2, tp=2),
    "data_parallel": DataParallelConfig("none", zero1=True, bucket_mb=0.02),
}
ONE_F1B = {"mesh": MeshConfig(pp=4, tp=2), "pipeline": PipelineConfig("1f1b", forward="none", backward="none")}


def make_config(workdir, **changes) -> TrainConfig:
    config = TrainConfig(
        model=MODEL,
        compression=CompressionConfig("none", "none"),
        pipeline=PipelineConfig(forward="none", backward="none"),
        data_parallel=DataParallelConfig(gradients="none"),
        data=DataConfig(sequence_length=32),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=2, weight_decay=1.0),
        checkpoint=CheckpointConfig(every=10),
        evaluation=EvalConfig(every=10, batches=1),
        global_batch=8,
        steps=4,
        workdir=str(workdir),
        compute_dtype="float32",
    )
    return check(dataclasses.replace(config, **changes))


def run(workdir, *parts):
    """The records of a run of one step after the other, each with its own changes; the last part goes to the end."""
    for number, changes in enumerate(parts, 1):
        last = number == len(parts)
        train(make_config(workdir, stop_after=None if last else number, **changes))
    return read_records(workdir / "metrics.jsonl")


def assert_same_curve(records, whole):
    values = lambda records, key: [r[key] for r in records if key in r]
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose(values(records, key), values(whole, key), rtol=1e-4)
    assert records[-1]["validation_loss"] == pytest.approx(whole[-1]["validation_loss"], rel=1e-5)


@pytest.fixture(scope="module", autouse=True)
def programs():
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), WHOLE)


@pytest.mark.slow
def test_a_run_goes_on_in_stages(tmp_path, whole, capfd):
    """Three axes, and optimiser states of shares."""
    assert_same_curve(run(tmp_path, WHOLE, SHARES), whole)
    out, err = capfd.readouterr()
    assert "Involuntary full rematerialization" not in err  # of chunks that become layers; jax 0.12 says it
    assert "pipeline circular: 4 microbatches, bubble 11.1%\n" in out
    assert re.search(r"^codecs: tp .*; pp none forward, none backward; dp none gradients, none weights$", out, re.M)
    assert re.search(r"^tensor- and pipeline-parallel activation traffic: .* ratio", out, re.M)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        (WHOLE, CIRCULAR),
        (CIRCULAR, WHOLE),
        (GPIPE, CIRCULAR, WHOLE, ONE_F1B),
        (ONE_F1B, GPIPE),
        (CIRCULAR, ONE_F1B, CIRCULAR),
    ],
    ids=lambda parts: "-".join(str(part["mesh"].pp) for part in parts),
)
def test_a_run_goes_on_with_other_stages(tmp_path, whole, parts):
    assert_same_curve(run(tmp_path, *parts), whole)


@pytest.mark.parametrize("pp, given, taken", [(1, "auto", "auto"), (2, "auto", "nccl"), (2, "nvlink", "nvlink")])
def test_stages_take_nccl_unless_nvlink_is_asked_for(pp, given, taken):
    config = make_config("unused", mesh=MeshConfig(pp=pp, tp=2), compression=CompressionConfig("taco", link=given))
    sites = {site: c for site, c in resolve_plan(config).items() if site != "pp/act"}
    assert {c.link for c in sites.values()} == {taken}


@pytest.mark.slow
def test_dry_run():
    changes = {"compression": CompressionConfig("taco", "taco"), "global_batch": 32, "accumulation": 2}
    mesh = MeshConfig(pp=2, tp=2)
    config = make_config("unused", mesh=mesh, pipeline=PipelineConfig("circular"), **changes)
    program = build(config, make_mesh(1, 2, 2))
    choices = dry_run.trace(program)
    text = "\n".join(
        [
            dry_run._kernel_text(program, choices),
            *dry_run._sequence_text(config),
            dry_run._pipeline_text(program),
            dry_run._site_text(program),
        ]
    )
    for line in (
        "sequence parallelism: on (each of the 2 ranks of a stage sends 1/2 of its activations)",
        "pipeline (circular)",
        "  stages       2 of 2 layers, in 2 chunks each",
        "  microbatches 4 of 4 sequences, 2 times a step",
        "  bubble       11.1% of a stage's time, 9 ticks",
        "  remat        dots (with stages it takes less time, and less memory, than to keep everything)",
        "  link         NCCL's: link=auto takes no NVLink kernels in stages",
    ):
        assert line in text.splitlines(), line
    assert re.search(r"^  pp/act +forward +ppermute +pp +int8_token +18 ", text, re.M)
    assert re.search(r"^  pp/act +backward +ppermute +pp +e4m3h +18 ", text, re.M)
    assert re.search(r"^  TP and PP activation traffic .* MB a step, .*x less than bf16", text, re.M)
    assert "messages from" in text and "int8_token   messages" not in text
