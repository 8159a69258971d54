"""A step in stages beside one device's: goals by hand, what it refuses, and a run on emulated devices."""

import importlib
import json

import pytest

from taco_jax.config import cli

CONFIG = """
import dataclasses
from taco_jax.config import CompressionConfig, DataConfig, MeshConfig, ModelConfig, TrainConfig
config = TrainConfig(
    model=ModelConfig(vocab_size=256, d_model=32, n_layers=4, n_heads=2, n_kv_heads=2, head_dim=16, d_mlp=32),
    mesh=MeshConfig(tp=4), compression=CompressionConfig("none", "none"), data=DataConfig(sequence_length=8),
    global_batch=8, compute_dtype="float32",
)
"""
QUICKSTART = ["--config", "experiments/quickstart.py"]
BAD = [
    (["--schedules", "gpip"], "--schedules='gpip': did you mean 'gpipe'?"),
    (["--remats", "auto"], "--remats='auto': known: "),
    (["--data-parallel", "int8h"], "--data-parallel=int8h: must have none"),
    (["--data-parallel", "none,none"], "must name each once"),
    (["--schedules", "", "--data-parallel", "none,int8"], "data_parallel.gradients='int8' is unknown: did you mean"),
    (["--schedules", "", "--data-parallel", ""], "--schedules='': must name one, or --data-parallel must"),
    (
        ["--data-parallel.overlap", "True"],
        "--data-parallel.overlap True: no flag for a study's runs: --data-parallel names the ways",
    ),
    (["--stages", "1"], "--stages=1: must be at least 2"),
    (["--steps-per-round", "0"], "--steps-per-round=0: must be at least 1"),
    (["--mesh.pp", "2"], "--mesh.pp 2: no flag for a study's runs: --stages and --ranks say how many"),
    (["--remat", "full"], "--remat full: no flag for a study's runs: the modes are those of --remats"),
    (["--accumulation", "2"], "--accumulation 2: no flag for a study's runs: --microbatches says how many"),
    (["--microbatches", "3"], "accumulation=3"),
]


@pytest.fixture
def study(monkeypatch, repository):
    monkeypatch.syspath_prepend(repository / "experiments")
    monkeypatch.chdir(repository)
    return importlib.import_module("bench_pipeline")


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_is_one_line_and_exit_code_2(study, arguments, message, tmp_path, capsys):
    assert cli.run(study.main, ["--out", str(tmp_path / "out"), *QUICKSTART, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.iterdir())


def test_goals(study):
    assert study.share("gpipe", 2, 8, 1) == pytest.approx(9 / 16)
    assert study.share("circular", 4, 8, 2) == pytest.approx(9.5 / 32)
    assert study.share("1f1b", 2, 8, 2) == pytest.approx(0.75)
    rows = [study.Row("one", [], seconds=[0.3, 0.2, 0.25]), study.Row("gpipe", [], "one", 0.5, [0.15] * 3)]
    found = study.summarise(rows)
    assert found["gpipe"]["goal_ms"] == pytest.approx(125) and found["gpipe"]["of_goal"] == pytest.approx(1.2)
    assert "goal_ms" not in found["one"] and found["one"]["fastest_ms"] == pytest.approx(200)
    assert "| gpipe | 150.0 | 150.0, 150.0 | 125.0 | 1.200 | 0.0 |" in study.table("stages", found)


def test_on_emulated_devices(study, tmp_path, capsys):
    config, out = tmp_path / "config.py", tmp_path / "out"
    config.write_text(CONFIG)
    rounds = ["--rounds", "2", "--steps-per-round", "1", "--microbatches", "4", "--commit", "none"]
    arguments = ["--config", str(config), "--out", str(out), "--remats", "dots", *rounds]
    ways = ["--schedules", "gpipe", "--data-parallel", "none,zero1:int8h:int8h"]
    assert cli.run(study.main, [*arguments, *ways]) == 0
    found = json.loads((out / "summary.json").read_text())
    assert {group: list(rows) for group, rows in found.items()} == {
        "stages, remat dots": ["one device", "gpipe"],
        "data parallel": ["one device, its part of the batch", "none", "zero1:int8h:int8h"],
    }
    stages, ranks = found.values()
    assert stages["gpipe"]["goal_ms"] == pytest.approx(5 / 8 * stages["one device"]["ms"])
    assert ranks["zero1:int8h:int8h"]["goal_ms"] == pytest.approx(ranks["none"]["ms"])
    text = (out / "README.md").read_text()
    assert "| stages, remat dots | ms (median) |" in text and "* commit: none" in text
    assert set(text.splitlines()[-6:]) <= set(capsys.readouterr().out.splitlines())
