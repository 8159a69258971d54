"""The study of plans: its arithmetic, its report, and what it refuses. Its runs are for machines with time."""

import importlib
import json
import lzma
import sys
import types

import numpy as np
import pytest

from taco_jax.config import cli


@pytest.fixture
def study(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "experiments")
    return importlib.import_module("calibration_study")


def test_ranks_and_paired_seeds(study):
    assert study.rank_correlation([1, 2, 3, 4], [10, 20, 25, 90]) == pytest.approx(1)
    assert study.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    of = lambda *losses: {str(seed): {"loss": loss, "ratio": 1.0} for seed, loss in enumerate(losses)}
    found = study.compared({"int6h": of(2.0, 4.0), "plan": of(2.02, 4.12, 9.9)})
    assert found["plan"] == {"difference": pytest.approx(0.02), "error": pytest.approx(0.01), "seeds": 2}
    assert found["int6h"]["difference"] == 0


def test_texts_of_two_places(study, tmp_path):
    with lzma.open(tmp_path / "book.train.txt.xz", "wt") as file:
        file.write("".join(f"{i:07d} " for i in range(80_000)))
    first, second = (study.texts(tmp_path, ["book"], part, 100)[0] for part in range(2))
    assert first.startswith("0012501 ") and second.startswith("0050001 ") and len(first) <= 100


def held_out(tmp_path, **tokens):
    """A file of held-out text: numbers by source, one a token."""
    path = tmp_path / "val.jsonl"
    pieces = [{"src": source, "text": " ".join(map(str, range(of)))} for source, of in tokens.items()]
    path.write_text("".join(json.dumps(piece) + "\n" for piece in pieces))
    return path


def test_windows_that_nothing_was_chosen_on(study, tmp_path):
    encode = lambda text: [int(word) for word in text.split()]
    path = held_out(tmp_path, b=60, a=70, c=20, short=3, d=30)
    first = study.windows(path, 2, 5, encode)
    found = study.other_windows(path, 2, 2, 5, encode)
    assert first == [*range(5), *range(5), 0]
    assert found == {"next": [[*range(5, 10)], [*range(10, 15)]] * 2, "others": [[*range(5)]] * 2}
    with pytest.raises(study.ConfigError, match="--more=13: b has fewer than 14 windows of 5 tokens; take fewer"):
        study.other_windows(path, 2, 13, 5, encode)


def test_a_plan_is_paired_window_by_window(study):
    from taco_jax.inference.perplexity import Score

    of = lambda *nll: Score(np.array(nll), np.array([1, 2, 3, 4, 5, 6]), {}, {}, 1.0, 4.0)
    exact, own = of(1, 1, 2, 2, 3, 3.0), of(1.1, 1.3, 2, 2.2, 3.5, 3.5)
    found = study.parted(own, exact, {"next": [[0, 0], [0, 0]], "others": [[0, 0]]}, 2)
    assert found["next"]["windows"] == [0.2, 0.1] and found["others"]["windows"] == [0.5]
    assert found["next"]["change"] == pytest.approx(np.expm1(0.15)) and found["next"]["tokens"] == 4
    assert found["next"]["error_of_windows"] == pytest.approx(0.05)
    assert found["next"]["error"] == pytest.approx(np.std([0.1, 0.3, 0, 0.2]) / 2)
    assert found["others"]["perplexity"] == pytest.approx(np.exp(3.5)) and np.isnan(found["others"]["error_of_windows"])


def test_the_report(study, tmp_path, capsys):
    predicted = {
        name: {"element": 0.01 * i, "token": 0.02, "text": 0.02} for i, (name, *_) in enumerate(study.RECORDED, 1)
    }
    record = {name: 0.011 * i for i, (name, *_) in enumerate(study.RECORDED, 1)}
    del record["int8h_feedback"]  # it has not been measured
    scored = {"tokens": 7168, "ratio": 3.5, "perplexity": 32.0, "change": 0.007, "error": 0.002, "agreement": 0.94}
    measured = {"tokens": 9, "rank_correlation": 0.99, "rank_correlation_with_feedback": 0.98, "predicted": predicted,
                "record": record, "plans": {"bits_4_57": {"predicted": 0.008}}}  # fmt: skip
    of_quickstart = {"steps": 3, "rank_correlation": 0.9, "rank_correlation_gradient": 0.8, "bits": 5.0,
                     "plan": {"embed": "int6h:none"}}  # fmt: skip
    confirmed = scored | {"exact": 31.5, "error_of_windows": 0.003, "windows": [0.007] * 7}
    trained = {"int6h": {"0": {"loss": 2.0, "ratio": 2.6}}, "plan": {"0": {"loss": 2.002, "ratio": 3.2}}}
    summary = {
        "measure": measured,
        "perplexity": {"bits_4_57": scored},
        "confirm": {"bits_4_57": {"ratio": 3.5, "others": confirmed}},
        "quickstart": of_quickstart,
        "training": trained,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"compared": study.compared(trained)}))
    assert cli.run(study.main, ["report", "--out", str(tmp_path), "--commit", "abc"]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "| `bits_4_57` | 7168 | 3.50 | +0.80% | 32.00 | +0.70% | 0.20% | 94.0% |" in text
    assert "| `bits_4_57` | 7 `others` | 7168 | 3.50 | 31.50 | 32.00 | +0.70% | 0.20% | 0.30% | 94.0% |" in text
    assert "| `int8h_feedback` | +2.00% | +2.00% | +2.00% |  |" in text
    assert "by element 1.000 and 1.10, by token" in text and "| embed | int6h:none |" in text
    assert (
        "| plan | 3.20 | 0: 2.0020 | +0.100% | nan% |" in text
        and "| `int8h` | +1.00% | +2.00% | +2.00% | +1.10% |" in text
    )


def test_trainings_side_by_side_are_joined(study, tmp_path, monkeypatch, capsys):
    asked = []

    class Programs:
        def __init__(self, mesh, config_of):
            self.of, self.close = config_of, lambda: None

        def get(self, way, to_train):
            return types.SimpleNamespace(way=way, config=self.of(way))

    def train(seed, parts):
        ((program, steps),) = parts
        asked.append((program.config.mesh.dp, program.config.mesh.tp, program.config.compression.plan != {}, steps))
        loss = 2.0 + 0.1 * seed + 0.01 * (program.way == "plan")
        return [{"validation_loss": loss, "comm_bytes": 1, "comm_bytes_bf16": 3}]

    monkeypatch.setitem(sys.modules, "in_turn", types.SimpleNamespace(Programs=Programs, train=train))
    monkeypatch.setattr(study.runs, "hardware", lambda: "a test")
    plan = (study.RECORD.parents[1] / "calibration" / "plan_quickstart.json").read_text()
    for part, seeds in (("b", "2,0"), ("a", "1")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "plan_quickstart.json").write_text(plan)
        arguments = ["training", "--out", str(tmp_path / part), "--seeds", seeds, "--ways", "int6h,plan"]
        arguments += ["--mesh.dp", "1", "--mesh.tp", "2", "--devices", "cpu:2", "--steps", "7"]
        assert cli.run(study.main, [*arguments, "--evaluation.every", "7", "--optimizer.warmup-steps", "1"]) == 0
    assert asked == [(1, 2, False, 7), (1, 2, True, 7)] * 3
    arguments = ["join", "--parts", str(tmp_path / "b"), str(tmp_path / "a"), "--out", str(tmp_path / "out")]
    assert cli.run(study.main, [*arguments, "--commit", "abc"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(summary["training"]["plan"]) == ["0", "1", "2"] and summary["compared"]["plan"]["seeds"] == 3
    found = [0.01 / loss for loss in (2.0, 2.1, 2.2)]
    assert summary["compared"]["plan"]["difference"] == pytest.approx(np.mean(found))
    assert (
        "| plan | 3.00 | 0: 2.0100, 1: 2.1100, 2: 2.2100 | +0.477% | 0.013% |"
        in (tmp_path / "out" / "README.md").read_text()
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["measure", "--model", "m.gguf"], "--corpus=None: the part measure needs it"),
        (["perplexity", "--model", "m.gguf"], "--text=None: the part perplexity needs it"),
        (["confirm", "--model", "m.gguf"], "--text=None: the part confirm needs it"),
        (["confirm", "--more", "0"], "--more=0: must be above 0"),
        (
            ["measure", "--length", "2", "--mesh.tp", "2"],
            "flags=--mesh.tp 2: the part training alone hands flags on to",
        ),
        (["training", "--mesh.tpp", "2"], "unknown option --mesh.tpp; did you mean --mesh.tp?"),
        (
            ["training", "--compression", "int4h"],
            "--compression int4h: no flag for a study's runs: each way has its own",
        ),
        (["join", "--parts", "nowhere"], "--parts=nowhere/summary.json: no such file; name folders in which the part"),
        (["measure", "--length", "0"], "--length=0: must be above 0"),
        (["training"], "plan_quickstart.json: no such file; run the part quickstart first"),
    ],
)
def test_refused_in_one_line(study, tmp_path, capsys, arguments, message):
    assert cli.run(study.main, [*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
