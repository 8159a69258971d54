"""experiments/bench_kernels.py: small kernels on the CPU, and what it writes."""

import importlib
import json

from taco_jax.config import cli


def test_small_kernels(monkeypatch, repository, tmp_path):
    monkeypatch.syspath_prepend(repository / "experiments")
    bench = importlib.import_module("bench_kernels")
    for name, value in {
        "PRODUCTS": (("forward", 16, 32, 64), ("dx", 16, 32, 64), ("dw", 16, 32, 64), ("forward", 16, 32, 1 << 40)),
        "ATTENTION": ((1, 32, 4, 2, 16),), "MIXED": 32, "MIXED_PASSES": (0, 1), "MIXED_VALUES": 1024, "REPEATS": 2,
        "PASSES": (("elementwise", 16, 64), ("norm", 16, 64), ("sum", 16, 64), ("adamw", 8, 8)), "LEAST_US": 1.0,
        "TINY": 4, "IN_LOOP": 2, "ROUNDS": 2,
    }.items():  # fmt: skip
        monkeypatch.setattr(bench, name, value)
    again = tmp_path / "again"
    given = ["--commit", "x", "--most-flops", "1e8", "--only", "mixed", "--warm-up", "0.1"]
    assert cli.run(bench.main, ["--out", str(again), *given]) == 0
    found = json.loads((again / "summary.json").read_text())
    assert {kind for kind, rows in found.items() if rows} == {"mixed"}
    assert cli.run(bench.main, ["--out", str(tmp_path), "--commit", "x", "--most-flops", "1e8"]) == 0
    found = json.loads((tmp_path / "summary.json").read_text())
    assert {kind: len(rows) for kind, rows in found.items()} == {
        "starts": 3, "mixed": 2, "passes": 4, "products": 3, "attention": 2,
    }  # fmt: skip
    of = [row for row in found["attention"] if row["what"] == "forward"]
    assert all(row["us"] > 0 for kind in ("starts", "mixed", "passes", "products") for row in found[kind]) and of
    text = (tmp_path / "README.md").read_text()
    assert "* command:" in text and "| dw | 16 | 32 | 64 |" in text and "| adamw | 8 x 8 |" in text


def test_a_limit_that_is_none(monkeypatch, repository, tmp_path, capsys):
    monkeypatch.syspath_prepend(repository / "experiments")
    bench = importlib.import_module("bench_kernels")
    assert cli.run(bench.main, ["--out", str(tmp_path), "--seconds", "0"]) == 2
    assert "--seconds=0" in capsys.readouterr().err
