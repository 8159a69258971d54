"""The studies of error feedback in the backward pass: their rows, comparisons and refusals."""

import importlib

import jax
import numpy as np
import pytest
from model_helpers import QWEN2, Run

from taco_jax.config import cli
from taco_jax.config.checks import check


@pytest.fixture
def study(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "experiments")
    return lambda name: importlib.import_module(name)


def test_flags_of_rows(study):
    backward = study("feedback_backward")
    for row in backward.ROWS:
        c = check(cli.parse(backward.row_flags(row))).compression
        assert (c.forward, c.backward) == (("none",) * 2 if row == "none" else ("int4h",) * 2)
        assert c.error_feedback is row.startswith("int4h_fed")
        assert c.backward_error_feedback is row.endswith(":int4h_fed")


def test_comparison(study):
    exact = {"embed/table": np.ones(4), "layers/attn/q/kernel": np.full(2, 2.0), "layers/attn_norm/scale": np.zeros(3)}
    got = {"embed/table": np.ones(4), "layers/attn/q/kernel": np.full(2, 3.0), "layers/attn_norm/scale": np.zeros(3)}
    found = study("feedback_gradients").compare(got, exact)
    assert found["error"] == pytest.approx((2 / 12) ** 0.5) and found["slope"] == pytest.approx(16 / 12)
    assert found["leaves"]["embed/table"] == {"error": 0, "slope": 1}
    assert found["groups"]["attention"] == {"error": 0.5, "slope": 1.5}
    assert "layers/attn_norm/scale" not in found["leaves"]  # nothing to compare with


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        (
            "feedback_backward",
            ["--config", "experiments/quickstart.py", "--rows", "int4h_fd"],
            "--rows='int4h_fd':",
        ),
        ("feedback_backward", ["--config", "experiments/quickstart.py", "--every", "0"], "--every=0: must be 1 step"),
        (
            "feedback_backward",
            ["--config", "experiments/quickstart.py", "--compression.backward-error-feedback"],
            "--compression.backward-error-feedback: no flag for a study's runs: name a row of --rows",
        ),
        ("feedback_gradients", ["--model", "m", "--text", "t", "--rows", "none:int4"], "--rows='int4': did you mean"),
        ("feedback_gradients", ["--model", "m", "--text", "nowhere"], "--text=nowhere: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(study, name, arguments, message, tmp_path, capsys):
    assert cli.run(study(name).main, ["--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_variants_are_what_they_say(study):
    """Nothing is left of a variant afterwards; what is dropped or delivered shows in the gradient's error."""
    gradients, run = study("feedback_gradients"), Run(QWEN2, tp=4)
    tokens = np.random.default_rng(0).integers(0, QWEN2.vocab_size, (2, 33), np.int32)

    def error(row):
        with gradients.variant(row or ""):
            grads = gradients.gradient(QWEN2, run.mesh, row, "full")(run.params(), tokens)[1]
        named = jax.tree_util.tree_leaves_with_path(grads)
        return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in named}

    exact = error(None)
    distance = {
        row: gradients.compare(error(row), exact)["error"] for row in (*gradients.VARIANTS, "none:int4h_fed", "int8h")
    }
    fed, moved = distance["none:int4h_fed"], distance["none:int4h_moved"]
    assert distance["none:int4h_fed_delivered"] < fed < 0.5 * min(moved, distance["none:int4h_fed_layers"])
