"""The study of codecs: each table row is of its own runs, whatever else lies in the folder."""

import json
import subprocess

import pytest

from taco_jax import cli

LOSSES = {
    "none": 3.0, "taco": 3.003, "e4m3": 3.01, "e5m2": 3.02, "int8h": 3.05, "int6h": 3.1, "int5h": 3.3, "int4h": 3.6,
    "int6h:none": 3.2, "none:int6h": 3.9,
}  # fmt: skip


@pytest.fixture
def study(monkeypatch, repository):
    monkeypatch.syspath_prepend(repository / "experiments")
    import codec_ablation

    monkeypatch.setattr(codec_ablation.runs, "hardware", lambda: "a test")
    return codec_ablation


def metrics(loss):
    numbers = {"tokens_per_second": 1.0, "comm_bytes": 1, "comm_bytes_bf16": 2, "step_seconds": 1.0}
    return json.dumps({"step": 1, "validation_loss": loss} | numbers) + "\n"


def put(study, out, codec, seed, loss):
    (out / study.name_of("gpt2_124m", codec, seed)).write_text(metrics(loss))


def summary(out):
    return json.loads((out / "summary.json").read_text())["gpt2_124m"]


def test_no_codec_takes_the_runs_of_another(study, tmp_path):
    for seed in ("0", "12"):
        for codec, loss in LOSSES.items():
            put(study, tmp_path, codec, seed, loss + int(seed))
    assert set(LOSSES) == set(study.CODECS.split(","))
    assert len(list(tmp_path.iterdir())) == 2 * len(LOSSES)
    for other in ("gpt2_124m-none-int6h-0", "gpt2_124m-none", "gpt2_124m-none-0-copy", "gpt2_124mm-none-1"):
        (tmp_path / f"{other}.jsonl").write_text(metrics(99.0))
    assert cli.run(study.main, ["--out", str(tmp_path), "--report"]) == 0
    found = summary(tmp_path)
    assert list(found) == study.CODECS.split(",")
    assert {c: r["seeds"] for c, r in found.items()} == {c: {"0": x, "12": x + 12} for c, x in LOSSES.items()}
    assert "| none:int6h | 2.00 |" in (tmp_path / "README.md").read_text()


def test_the_report_is_of_all_that_is_there(study, tmp_path):
    for codec in ("mxfp4", "none", "taco_paper:none", "int8h"):
        put(study, tmp_path, codec, "0", 3.0)
    assert cli.run(study.main, ["--out", str(tmp_path), "--report", "--codecs", "int8h"]) == 0
    assert list(summary(tmp_path)) == ["none", "int8h", "mxfp4", "taco_paper:none"]


def test_codecs_are_paired_by_the_seeds_that_both_have(study, tmp_path):
    put(study, tmp_path, "none", "0", 3.0)
    for codec, seed, loss in (("taco", "0", 3.03), ("taco", "1", 9.0), ("int8h", "1", 4.0)):
        put(study, tmp_path, codec, seed, loss)
    assert cli.run(study.main, ["--out", str(tmp_path), "--report"]) == 0
    found = summary(tmp_path)
    assert found["taco"]["difference"] == pytest.approx(0.01) and found["taco"]["seeds"] == {"0": 3.03}
    assert found["int8h"]["difference"] is None and found["int8h"]["mean"] == 4.0
    text = (tmp_path / "README.md").read_text()
    assert "| +1.00% | no | 1 of 2 |" in text and "| int8h | 2.00 | 4.0000 | 0.0000 | | | 0 of 1 |" in text


@pytest.fixture
def tokens(tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes(2 * (64 * 1024 * 3 + 1)))
    (folder / "val.bin").write_bytes(bytes(2))
    return folder


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--config", "experiments/quickstart.py"], "the study names the experiment itself"),
        (["--optimizer.warmup_steps=7"], "set --warmup"),
        (["--global-batch", "8"], "set --batch"),
        (["--data.train", "austen"], "set --tokens"),
        (["--checkpoint.enabled"], "a run's folder is gone after it"),
        (["--checkpoint.no-enabled"], "a run's folder is gone after it"),
        (["--stop-after", "2"], "set --steps"),
    ],
)
def test_flags_that_the_study_sets_are_refused(study, flags, message, tokens, tmp_path, capsys):
    assert cli.run(study.main, ["--out", str(tmp_path / "out"), "--tokens", str(tokens), *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {' '.join(flags)}: no flag for a study's runs: {message}")
    assert not (tmp_path / "out").exists()


def test_what_the_runs_are_given(study, tokens, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(study.runs, "train", lambda config, workdir, flags, timeout: given.append(flags) or 1 / 0)
    arguments = ["--out", str(tmp_path / "out"), "--tokens", str(tokens), "--codecs", "taco"]
    for more in ([], ["--warmup", "2"], ["--data.sequence-length", "64", "--data.prefetch", "0"]):
        with pytest.raises(ZeroDivisionError):
            study.main([*arguments, *more])
    value = lambda flags, key: flags[flags.index(key) + 1]
    assert [value(flags, "--optimizer.warmup-steps") for flags in given] == ["0", "2", "5"]
    assert [value(flags, "--steps") for flags in given] == ["3", "3", "48"]  # one pass
    assert given[2][-4:] == ["--data.sequence-length", "64", "--data.prefetch", "0"]


def test_runs_go_on_after_one_that_fails_and_are_kept(study, tokens, tmp_path, monkeypatch):
    out, asked = tmp_path / "out", []

    def train(config, workdir, flags, timeout):
        asked.append((flags[1], flags[flags.index("--seed") + 1], flags[flags.index("--steps") + 1], timeout))
        if flags[1] == "int8h":
            raise subprocess.TimeoutExpired("train", timeout)
        return [json.loads(metrics(3.0))]

    monkeypatch.setattr(study.runs, "train", train)
    arguments = ["--out", str(out), "--tokens", str(tokens), "--codecs", "int8h,taco,none", "--seeds", "0,1"]
    assert cli.run(study.main, [*arguments, "--timeout", "7"]) == 1
    assert asked == [(codec, seed, "3", 7.0) for seed in "01" for codec in ("int8h", "taco", "none")]
    assert list(summary(out)) == ["none", "taco"]
    asked.clear()
    assert cli.run(study.main, arguments) == 1
    assert asked == [("int8h", "0", "3", None), ("int8h", "1", "3", None)]  # the others are there; no limit


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--codecs", "tacoo"], "--codecs='tacoo': did you mean 'taco'?"),
        (["--codecs", "int6h:nonee"], "--codecs='nonee': did you mean 'none'?"),
        (["--codecs", ""], "--codecs='': name at least one"),
        (["--seeds", "a"], "--seeds=a: must be integers of at least 0, separated by commas"),
        (["--steps", "0"], "--steps=0: must be above 0"),
        (["--timeout", "nan"], "--timeout=nan: must be above 0; leave it out for no limit"),
        (["--minutes", "nan"], "--minutes=nan: must be above 0"),
        (["--minutes", "-1"], "--minutes=-1.0: must be above 0"),
        (["--warmup", "-1"], "--warmup=-1: must be 0 or more steps"),
        (["--report", "--minute", "5"], "--report=--minute 5: runs nothing, so it takes no flags of the trainer"),
        (["--report"], "has no finished run of codec none to compare with"),
        ([], "--tokens=None: needed: a folder with train.bin and val.bin"),
        (["--tokens", "nowhere"], "--tokens=nowhere/train.bin: no such file; tokenize_corpus.py makes one"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(study, arguments, message, tmp_path, capsys):
    assert cli.run(study.main, ["--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and not (tmp_path / "out").exists()
