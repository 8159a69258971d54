"""The study of compressed weights: its flags, its arithmetic, its report, and how the record takes it."""

import importlib
import json
import statistics

import pytest

from taco_jax.config import cli


@pytest.fixture
def study(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "experiments")
    monkeypatch.chdir(repository)
    return importlib.import_module("weights_study")


@pytest.fixture
def trained(study, monkeypatch):
    """Runs of a trainer that is not there: losses by (codec, seed), and what was asked of it."""
    losses, asked = {}, []
    monkeypatch.setattr(study.runs, "hardware", lambda: "a test")

    def train(config, workdir, flags, timeout):
        value = lambda flag: flags[flags.index(flag) + 1]
        run = value("--data-parallel.parameters"), value("--seed")
        asked.append((run, flags))
        if run not in losses:
            raise RuntimeError("a test")
        record = {"step": 3, "tokens_per_second": 1.0, "step_seconds": 1.0, "comm_bytes": 0.0, "comm_bytes_bf16": 0.0}
        return [record | {"validation_loss": losses[run], "comm": {"dp": {"bytes": 100.0}}}]

    monkeypatch.setattr(study.runs, "train", train)
    return losses, asked


def test_seeds_are_paired_and_runs_kept(study, trained, tmp_path, capsys):
    losses, asked = trained
    losses |= {
        ("none", "0"): 2.0,
        ("none", "1"): 4.0,
        ("int8h", "0"): 2.002,
        ("int8h", "1"): 4.012,
        ("int4h", "1"): 4.2,
    }
    arguments = ["--out", str(tmp_path), "--seeds", "0,1", "--codecs", "none,int8h,int4h", "--commit", "abc"]
    assert cli.run(study.main, arguments) == 1
    assert "FAILED int4h, seed 0: a test" in capsys.readouterr().err
    assert [run for run, _ in asked] == [(codec, seed) for seed in "01" for codec in ("none", "int8h", "int4h")]
    for _, flags in asked:
        assert flags[: len(study.SETTINGS)] == study.SETTINGS and "--data-parallel.zero1" in flags
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["none"]["change"] == 0 and summary["int8h"]["change"] == pytest.approx(0.002)
    assert summary["int8h"]["error"] == pytest.approx(statistics.stdev([0.001, 0.003]) / 2**0.5)
    assert summary["int4h"]["runs"] == 1 and summary["int4h"]["error"] is None
    text = (tmp_path / "README.md").read_text()
    assert "| `int8h` | 8.125 | 100 | 3.0070 | +0.20% | 0.10% | yes | 0: 2.0020, 1: 4.0120 |" in text
    assert "| `int4h` | 4.125 | 100 | 4.2000 | +5.00% |  | no | 1: 4.2000 |" in text
    asked.clear()
    assert cli.run(study.main, [*arguments, "--report"]) == 0 and not asked
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    losses["int4h", "0"] = 2.001
    assert cli.run(study.main, arguments) == 0 and [run for run, _ in asked] == [("int4h", "0")]


def test_the_record_takes_the_codecs_of_weights(study, tmp_path, monkeypatch):
    fit = importlib.import_module("fit_forecast")
    row = {"change": 0.001, "error": 0.0005, "runs": 3, "steps": 340}
    monkeypatch.setattr(fit, "RESULTS", tmp_path)
    assert fit.weights() == {}
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "summary.json").write_text(json.dumps({"none": row, "int8h": row}))
    source = "weights: 2.5M parameters, dp 4 with ZeRO-1, all else exact, 340 steps"
    assert fit.weights() == {"int8h": {"change": 0.001, "error": 0.0005, "runs": 3, "source": source}}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--codecs", "int8hh"], "--codecs='int8hh': did you mean"),
        (["--codecs", "none,int8_token"], "data_parallel.parameters='int8_token': has one scale a token"),
        (["--data-parallel.parameters", "int4h"], "no flag for a study's runs: the codecs are those of --codecs"),
        (["--data-parallel.no-zero1"], "--data-parallel.no-zero1: no flag for a study's runs: it is what is studied"),
        (["--seeds", "x"], "--seeds=x: must be integers"),
        (["--every", "0"], "--every=0: must be 1 step or more"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(study, arguments, message, tmp_path, capsys):
    assert cli.run(study.main, ["--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and not (tmp_path / "out").exists()
