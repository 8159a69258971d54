"""The study of orders of residual channels: its simple orders, and its refusals."""

import importlib

import numpy as np
import pytest

from taco_jax.calibration import arrangement
from taco_jax.config import cli


@pytest.fixture
def study(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "experiments")
    return importlib.import_module("arrangement_study")


def test_simple_orders(study):
    squares = np.ones((4, 32))
    squares[:, [5, 9, 30]] = [100, 400, 25]
    sites = arrangement.Sites(squares, 0 * squares, *[None] * 6)
    assert list(study.by_size(sites)[:3]) == [9, 5, 30]
    assert list(study.clustered(sites)[:5]) == [5, 9, 30, 0, 1]
    assert [next(i for i in (5, 9, 30) if i in part) for part in np.split(study.spread(sites, 8), 4)[:3]] == [
        9, 5, 30
    ]  # fmt: skip


def test_the_order_of_a_plan_is_one_of_the_orders(study):
    drawn = np.random.default_rng(0)
    pairs, squares = drawn.random((32, 32)), drawn.random((4, 32))
    sites = arrangement.Sites(squares, squares, squares, pairs, pairs, *[None] * 3)
    given = drawn.permutation(32)
    found = study.orders(sites, 16, True, 0, given)
    assert list(found["plan"]) == list(given) and "plan" not in study.orders(sites, 16, True, 0)
    assert set(found) == set(study.ORDERS)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--codecs", "int4hh_feedback"], "--codecs='int4hh' is unknown"),
        (["--orders", "sort"], "--orders='sort': did you mean"),
        (["--learn", "nowhere.txt"], "--learn=nowhere.txt: no such file; a text to learn the orders from"),
        (["--learn-context", "0"], "--learn-context=0: must be above 0"),
        (["--plan", "nowhere.json"], "--plan=nowhere.json: no such file; a plan that calibrate --arrange wrote"),
        (["--plan", "experiments/results/calibration/plan_bits_4_12.json"], "has no arrangement; write it with"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(study, arguments, message, tmp_path, capsys, repository, monkeypatch):
    monkeypatch.chdir(repository)
    (tmp_path / "text").write_text("text")
    own = ["--model", "m", "--text", "t", "--learn", str(tmp_path / "text"), "--out", str(tmp_path / "out")]
    assert cli.run(study.main, [*own, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and not (tmp_path / "out").exists()
