"""The forecast's constants are those of the results, and its errors are those that are written down."""

import importlib
import json

import pytest
from helpers import REPOSITORY

from taco_jax.config import cli
from taco_jax.forecast.constants import ERRORS, load

RESULTS = REPOSITORY / "experiments" / "results"


@pytest.fixture
def experiment(monkeypatch):
    """f(name): a file of experiments/ as a module."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "experiments"))
    return importlib.import_module


def test_constants_are_those_of_the_results(experiment, capsys):
    assert experiment("fit_forecast").main(["--check"]) == 0, capsys.readouterr().out


def test_a_changed_constant_is_noticed(experiment, tmp_path, monkeypatch, capsys):
    fit = experiment("fit_forecast")
    for name in ("constants.json", "record.json"):
        (tmp_path / name).write_text((fit.PACKAGE / name).read_text())
    content = json.loads((tmp_path / "record.json").read_text())
    content["training"]["int6h"]["change"] = 0.0
    (tmp_path / "record.json").write_text(json.dumps(content))
    recommended = tmp_path / "recommended.json"
    content = json.loads(fit.RECOMMENDED.read_text())
    content["training"]["forward"] = "taco"
    recommended.write_text(json.dumps(content))
    monkeypatch.setattr(fit, "PACKAGE", tmp_path)
    monkeypatch.setattr(fit, "ROOT", tmp_path)
    monkeypatch.setattr(fit, "RECOMMENDED", recommended)
    assert fit.main(["--check"]) == 1
    said = "{} is not what the results say: python experiments/fit_forecast.py\n"
    assert capsys.readouterr().out == said.format("record.json") + said.format("recommended.json")


def test_the_fit_finds_constants_again(experiment):
    fit = experiment("fit_forecast")
    rows = [(1.0, x, y) for x, y in ((1, 5), (2, 1), (9, 3), (4, 4))]
    constants, worst = fit.fit(rows, [3 + 0.5 * x + 0.25 * y for _, x, y in rows])
    assert constants == pytest.approx([3, 0.5, 0.25]) and worst < 1e-9
    line, worst = fit._line([(1e6, 60.0), (5e6, 260.0)], None, 1, one_size=False)
    assert line == pytest.approx({"us": 10, "gb_s": 20}) and worst < 1e-9
    line, _ = fit._line([(1e6, 60.0)], {"us": 5.0}, 2, one_size=True)
    assert line == pytest.approx({"us": 10, "gb_s": 20})


def test_constants_of_kernels_are_found_again(experiment, monkeypatch):
    fit = experiment("fit_forecast")
    truth = {"share": 0.85, "k0": 120.0, "load": 16, "memory": 0.2, "start_us": 3.0}
    per_us = 0.83 * 4800e3
    shapes = [(m, n, k) for m in (64, 512, 4096, 16384) for n, k in ((768, 3072), (3584, 1792), (4096, 1024))]
    slowed = lambda us, flops: us * (1 + 0.6 * min(0.36, max(0.0, 1e6 * flops / us / fit.H200_PEAK - 0.5)))
    rows = []
    for m, n, k in shapes:
        us = 2.0 + fit._product_us(truth, (m, n, k, 2), per_us)
        rows.append({"form": "forward", "m": m, "n": n, "k": k, "us": slowed(us, 2.0 * m * n * k)})
    flops, alone_us, pass_us = 2.0 * 8192**3, 1300.0, 270.0
    mixed = []
    for passes in (0, 1, 2, 3, 5):
        whole = alone_us + passes * pass_us
        us = alone_us * slowed(whole, flops) / whole
        mixed.append({"m": 8192, "passes": passes, "bytes": passes << 30, "us": us + passes * pass_us})
    attention = []
    for what, products in (("forward", 2), ("backward", 5)):
        for length, width in ((2048, 64), (2048, 128), (512, 64)):
            pairs = 4 * 14 * length * (length + 128) / 2
            us = 2.0 + 5.0 + 1e-6 * pairs * (0.001 * products * 2 * width + 0.3)
            shape = {"sequences": 4, "length": length, "heads": 14, "width": width}
            attention.append({"what": what, "us": us} | shape)
    sums = [{"what": "sum", "bytes": b, "us": 12.0 + b / (0.5 * per_us)} for b in (1e7, 1e8)]
    sums.append({"what": "elementwise", "bytes": 1 << 30, "us": pass_us})
    kernels = {"products": rows, "mixed": mixed, "attention": attention, "passes": sums}
    monkeypatch.setattr(fit, "alone", lambda folder="": kernels)
    limit = fit.limit_of_power(mixed)
    assert limit["slower"] == pytest.approx([slowed(1.0, x * 1e-6 * fit.H200_PEAK) for x in limit["activity"]])
    power = limit
    found = fit.products(2.0, 0.83, power)
    assert found["worst"] < 0.03 and found["share_of_peak"] == pytest.approx(truth["share"], rel=0.05)
    for what in ("forward", "backward"):
        constants = fit.attention(2.0)[what]
        assert {key: float(constants[key]) for key in ("ps_per_flop", "us")} == pytest.approx(
            {"ps_per_flop": 0.001, "us": 5.0}, rel=0.01
        )
    assert fit.sums(0.83)["us"] == pytest.approx(12.0) and fit.sums(0.83)["share_of_copy"] == pytest.approx(0.5)


def test_errors_are_those_of_the_forecast(experiment):
    errors = experiment("forecast_errors")
    groups = errors.group_errors(errors.measured())
    written = json.loads((RESULTS / "forecast" / "summary.json").read_text())
    for name, group in groups.items():
        for where in (written["groups"], load(ERRORS)["groups"]):
            assert where[name] == pytest.approx(group), name
    steps, prompts = groups["steps of 7B"], groups["first token"]
    # Chains and copies are among them.
    assert sum("2 chains" in row["what"] for row in written["rows"]) == 4
    assert sum("copied" in row["what"] for row in written["rows"]) == 2
    assert steps["median"] <= 0.05 and steps["worst"] <= 0.10 and steps["rows"] >= 54
    assert prompts["median"] <= 0.05 and prompts["worst"] <= 0.10 and prompts["rows"] >= 15
    assert groups["all"]["median"] <= 0.05 and groups["all"]["worst"] <= 0.10 and groups["all"]["rows"] >= 93
    for now, then in zip(errors.published(), written["published"], strict=True):
        assert now["forecast"] == pytest.approx(then["forecast"]), now["what"]


def test_a_study_of_few_gpus(experiment, tmp_path, monkeypatch):
    study = experiment("scale_study")
    monkeypatch.setattr(study, "SHAPES", {"7B": study.SHAPES["7B"]})
    monkeypatch.setattr(study, "SPEEDS", {"100Gb/s": "100Gb/s,10us"})
    assert cli.run(study.main, ["--out", str(tmp_path / "s"), "--gpus", "8..16", "--commit", "x"]) == 0
    text = (tmp_path / "s" / "README.md").read_text()
    assert "### 7B, 100Gb/s, one card for a host" in text and (tmp_path / "s" / "scale.png").stat().st_size > 10_000
    points = json.loads((tmp_path / "s" / "summary.json").read_text())["7B"]["100Gb/s"]["8"]
    written = json.loads((RESULTS / "scale" / "summary.json").read_text())["7B"]["100Gb/s"]["8"]
    for now, then in zip(points, (p for p in written if p["gpus"] <= 16), strict=True):
        assert now == pytest.approx(then)
