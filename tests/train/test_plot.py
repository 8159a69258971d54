"""The picture of several runs: it is drawn, names the runs apart, and says what is wrong in one line."""

import json

import pytest

from taco_jax.config import ConfigError
from taco_jax.train import plot


def run(folder, losses, **more):
    folder.mkdir(parents=True)
    records = [{"step": i + 1, "loss": loss, "tokens_per_second": 100.0 + i} for i, loss in enumerate(losses)]
    records[-1] |= more
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_draws_runs(tmp_path, run_python):
    a = run(tmp_path / "a", [5 - i / 100 for i in range(300)], validation_loss=2.1)
    b = run(tmp_path / "b", [5, None, 4])
    out = tmp_path / "new" / "both.png"
    result = run_python(["-m", "taco_jax.plot", a, b / "metrics.jsonl", "--out", out])
    assert result.stdout == f"{out}\n" and not result.stderr
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000


def test_the_loss_alone_is_a_narrower_picture(tmp_path):
    folder = run(tmp_path / "a", [5.0, 4.0])
    width = lambda path: int.from_bytes(path.read_bytes()[16:20], "big")  # of PNG's IHDR
    both = plot.draw([folder], tmp_path / "both.png")
    alone = plot.draw([folder], tmp_path / "alone.png", throughput=False)
    assert (width(both), width(alone)) == (12 * 120, 7 * 120)


def test_series_leave_gaps_out(tmp_path):
    records = plot.load(run(tmp_path / "a", [5, None, 4], validation_loss=3))
    assert plot._series(records, "loss") == ([1, 3], [5, 4])
    assert plot._series(records, "validation_loss") == ([3], [3])
    assert plot._smooth([0, 3, 9, 6, 9], 2) == [0, 4, 5.4, 8, 9]


def test_labels_tell_runs_apart():
    assert plot.labels(["x/a", "x/b"]) == ["a", "b"]
    assert plot.labels(["x/a", "y/a/metrics.jsonl"]) == ["x/a", "y/a"]
    assert plot.labels(["x/a", "x/a"]) == ["a", "a"]


def test_errors(tmp_path, run_python):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="holds no records yet"):
        plot.draw([tmp_path / "empty"], tmp_path / "a.png")
    good = run(tmp_path / "a", [1, 2])
    with pytest.raises(ConfigError, match="--out .*a.xyz: cannot be written"):
        plot.draw([good], tmp_path / "a.xyz")
    (tmp_path / "b.png").mkdir()
    for name in ("a", "b.png"):
        with pytest.raises(
            ConfigError, match=f"--out .*/{name}: must be a picture's name, whose suffix says the format"
        ):
            plot.draw([good], tmp_path / name)
    assert not (tmp_path / "a.png").exists()
    (good / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config.json: is a file of settings; give a workdir that holds metrics"):
        plot.draw([good / "config.json"], tmp_path / "a.png")
    for arguments, message in (([], "the following arguments are required: RUN"), (["--ou", "a.png", "b"], "--ou")):
        with pytest.raises(ConfigError, match=f"{message}.*; --help describes every option$"):
            plot.main(arguments)
    result = run_python(["-m", "taco_jax.plot", tmp_path / "missing"], check=2)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and "no such run" in result.stderr
