"""`python -m taco_jax.tune`: what it measures, prints and writes, on emulated devices; and what it refuses."""

import json
import sys

import pytest
from helpers import make_mesh

from taco_jax import Compression, tune
from taco_jax.compression import tuned
from taco_jax.config import ConfigError, cli
from taco_jax.tune import Point, TuneConfig, Way, check, crossover, winners

SMALL = ("--codecs", "taco", "--smallest", "4096", "--largest", "20000", "--smallest-chunk", "8192",
         "--repeats", "1", "--ranks", "4")  # fmt: skip


def test_it_measures_prints_and_writes(tmp_path, capsys, monkeypatch):
    file = tmp_path / "new" / "tuned.json"
    assert cli.run(tune.main, [*SMALL, "--exchanges", "ring", "--output", str(file)]) == 0
    out = capsys.readouterr().out
    for text in (
        "cpu, 4 ranks, nvlink or pcie p2p; psum of bfloat16",
        "4 KiB",
        "16 KiB",
        "ratio",
        f"written to {file}",
    ):
        assert text in out
    found = tuned.read(file)["cpu, 4 ranks, nvlink or pcie p2p"]
    assert sorted(found) == ["taco"]
    for value in found.values():
        assert [row[0] for row in value.best] == [4096, 16384]
        assert value.best[0][1] == 1 and value.best[1][1] in (1, 2)  # 4 chunks of 16 KiB would be too small
        assert [row[0] for row in value.sums] == [4096, 16384]
        assert {row[2] for row in value.sums} <= {"one_shot", "two_shot"}
    assert "taco one_shot: " in out and "taco two_shot: " in out and "; sums: " in out
    # Layers read it where the variable names it.
    monkeypatch.setenv("TACO_JAX_TUNED", str(file))
    assert tuned.transport("taco", 4, 16384) == found["taco"].best[1][1:]


@pytest.mark.parametrize("error", [RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile\n"), KeyboardInterrupt()])
def test_what_was_measured_before_an_error_is_written(error, tmp_path, capsys, monkeypatch):
    def best(config, mesh, codec, nbytes, algorithms):
        if nbytes == 16 << 10 and codec == "mxfp4":
            raise error
        return [Point(nbytes, 1, "ring", 1.0 if codec == "mxfp4" or nbytes > 4096 else 3.0, 2.0)]

    monkeypatch.setattr(tune, "_best", best)
    file = tmp_path / "tuned.json"
    arguments = ["--smallest", "4096", "--largest", "65536", "--output", str(file)]
    assert cli.run(tune.main, [*arguments, "--codecs", "taco", "mxfp4"]) == 1
    out, err = capsys.readouterr()
    reason = "interrupted at 16 KiB, mxfp4"
    if not isinstance(error, KeyboardInterrupt):
        reason = (
            "stopped at 16 KiB, mxfp4 (RuntimeError: RESOURCE_EXHAUSTED: Out of memory while); try a smaller --largest"
        )
    assert err == f"error: {reason}; the sizes before it are written for taco, mxfp4\n"
    assert f"written to {file}" in out and "16 KiB" in out
    (found,) = tuned.read(file).values()
    two_shot = (4096, 1, "two_shot"), (16384, 1, "two_shot")
    assert found["mxfp4"] == tuned.Tuned(4096, ((4096, 1, "ring"),), two_shot[:1])
    assert found["taco"] == tuned.Tuned(16384, ((4096, 1, "ring"), (16384, 1, "ring")), two_shot)
    # At 4 KiB taco does not pay. That says nothing of larger messages: what the file has of it stays.
    assert cli.run(tune.main, [*arguments, "--codecs", "mxfp4", "taco"]) == 1
    assert capsys.readouterr().err == f"error: {reason}; the sizes before it are written for mxfp4\n"
    assert list(tuned.read(file).values()) == [found]
    assert cli.run(tune.main, [*arguments, "--codecs", "mxfp4", "--smallest", "16384"]) == 1
    assert capsys.readouterr().err == f"error: {reason}; nothing is written\n"
    assert list(tuned.read(file).values()) == [found]


def test_what_was_measured_is_written_though_nobody_reads_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune, "_best", lambda *args: [Point(4096, 1, "ring", 1.0, 2.0)])
    file = tmp_path / "tuned.json"
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        arguments = ["--smallest", "4096", "--largest", "4096", "--codecs", "taco", "--output", str(file)]
        assert cli.run(tune.main, arguments) == 0
    assert capsys.readouterr().err == "standard output: No space left on device; it goes on without\n"
    assert len(tuned.read(file)) == 1


def test_the_ways_that_are_tried(monkeypatch):
    tried = []

    def time(config, mesh, codec, x, ways):
        tried.append(list(ways))
        seconds = {two(1, "ring"): 2.0, two(2, "ring"): 1.0, one(4): 0.5}
        return [Point(x.nbytes // 4, w.chunks, w.exchange, seconds.get(w, 3.0), 2.5, w.algorithm) for w in ways]

    two, one = lambda *way: Way("two_shot", *way), lambda chunks: Way("one_shot", chunks)
    monkeypatch.setattr(tune, "_time", time)
    config, both = TuneConfig(smallest_chunk=1024), ("one_shot", "two_shot")
    best = tune._best(config, make_mesh(tp=4), "taco", 4096, both)
    first = [two(1, "all_to_all"), two(1, "ring"), one(1)]
    assert tried == [first, [two(2, "ring"), two(4, "ring"), one(2), one(4)]]
    assert best == [Point(4096, 4, "all_to_all", 0.5, 2.5, "one_shot"), Point(4096, 2, "ring", 1.0, 2.5)]
    tried.clear()
    tune._best(TuneConfig(smallest_chunk=4096), make_mesh(tp=4), "taco", 4096, both)
    assert tried == [first]
    tried.clear()
    (best,) = tune._best(config, make_mesh(tp=4), "taco", 4096, ("two_shot",))
    assert tried == [first[:2], [two(2, "ring"), two(4, "ring")]] and best.algorithm == "two_shot"


def test_one_shot_beside_two_shot(monkeypatch, tmp_path, capsys):
    """What wins goes into the file; one-shot is no more tried once it is hopeless."""
    asked = []

    def best(config, mesh, codec, nbytes, algorithms):
        asked.append((nbytes >> 10, algorithms))
        found = {"one_shot": Point(nbytes, 1, "all_to_all", nbytes / 4096, 5.0, "one_shot")}
        found["two_shot"] = Point(nbytes, 2, "ring", 3.0, 5.0)
        return [found[algorithm] for algorithm in algorithms]

    monkeypatch.setattr(tune, "_best", best)
    file = tmp_path / "tuned.json"
    arguments = ["--codecs", "taco", "--smallest", "4096", "--largest", str(1 << 20), "--output", str(file)]
    assert cli.run(tune.main, arguments) == 0
    both, two = ("one_shot", "two_shot"), ("two_shot",)
    assert asked == [(4, both), (16, both), (64, both), (256, two), (1024, two)]
    (found,) = tuned.read(file).values()
    sizes = [4**i << 12 for i in range(5)]
    sums = [(sizes[0], 1, "one_shot"), *((size, 2, "two_shot") for size in sizes[1:])]
    assert found["taco"] == tuned.Tuned(4096, tuple((size, 2, "ring") for size in sizes), tuple(sums))
    assert "taco pays from 4 KiB; sums: one_shot, two_shot from 16,384 bytes" in capsys.readouterr().out
    points = [Point(1, 1, "ring", 2.0, 3.0), Point(1, 1, "ring", 1.0, 1.0, "one_shot")]
    assert winners(points) == points[:1]  # by the ratio to the exact sum of the same call


@pytest.mark.parametrize(
    "faster,expected",
    [("yyyy", 1), ("nyyy", 4), ("ynyy", 16), ("nnny", 64), ("nnnn", None), ("yyyn", None)],
)
def test_the_crossover(faster, expected):
    points = [Point(4**i, 1, "ring", 1.0 if f == "y" else 3.0, 2.0) for i, f in enumerate(faster)]
    assert crossover(points) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_stay_finite(dtype):
    """In a timed program every psum is of the one before it."""
    import numpy as np

    mesh = make_mesh(tp=8)
    rounds = int(tune.RANGE_BITS[dtype] / 3)
    y = np.float64(tune._program(mesh, rounds, None)(tune._tensor(mesh, 64, dtype)))
    assert np.isfinite(y).all() and np.abs(y).max() > 1
    ours = np.float64(tune._program(mesh, rounds, Compression("int8h", min_bytes=0))(tune._tensor(mesh, 64, dtype)))
    assert np.abs(ours - y).max() < 0.2 * np.abs(y).max()


def test_sizes():
    assert TuneConfig().sizes == [4**i << 16 for i in range(7)]  # 64 KiB to 256 MiB
    assert [tune.size_name(n) for n in (1 << 16, 1 << 28, 100)] == ["64 KiB", "256 MiB", "100 bytes"]
    assert check(TuneConfig()) == TuneConfig()


@pytest.mark.parametrize(
    "args,message",
    [
        (["--codecs", "tacoo"], "codecs='tacoo': no such codec preset; did you mean 'taco'?"),
        (["--codecs", "none"], "codecs='none': no such codec preset"),
        (["--codec", "taco"], "unknown option --codec; did you mean --codecs?"),
        (["--exchanges", "rings"], "exchanges='rings': did you mean 'ring'?"),
        (["--chunks", "0"], "chunks=(0,): must be numbers from 1 to 1024"),
        (["--chunks", "1", "2000"], "chunks=(1, 2000): must be numbers from 1 to 1024"),
        (["--backend", "jax"], "backend='jax'"),
        (["--dtype", "int8"], "dtype='int8'"),
        (
            ["--smallest", "abc"],
            "error: --smallest: 'abc' is no whole number, such as 2; --help describes every option",
        ),
        (["--largest", "1"], "largest=1: must be at least 65536"),
        (["--ranks", "1"], "ranks=1: must be at least 2"),
        (["--ranks", "99"], "ranks=99: must be at least 2 and at most the 8 devices there are"),
        (["--backend", "mosaic"], "backend 'mosaic' cannot encode codec 'int8h' on cpu"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message, capsys, tmp_path):
    assert cli.run(tune.main, [*args, "--output", str(tmp_path / "tuned.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.iterdir())


def test_one_device_is_too_few(monkeypatch, capsys, tmp_path):
    devices = cli.devices
    monkeypatch.setattr(cli, "devices", lambda name: devices(name)[:1])
    assert cli.run(tune.main, ["--output", str(tmp_path / "tuned.json")]) == 2
    assert "error: tune needs at least 2 devices, there are 1 (cpu); to try it" in capsys.readouterr().err


def test_a_bad_file_is_found_before_anything_is_measured(tmp_path, capsys):
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"a": {"taco": {}}}))
    assert cli.run(tune.main, ["--output", str(file)]) == 2
    assert f"{file}: 'a': taco.best=null: must have exactly the keys" in capsys.readouterr().err


@pytest.mark.parametrize("output,message", [(".", "is a folder; name a file in it"), ("file/tuned.json", "cannot be ")])
def test_the_output_is_checked_before_anything_is_measured(output, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune, "_best", lambda *_: pytest.fail("it measured"))
    (tmp_path / "file").write_text("kept")
    assert cli.run(tune.main, ["--output", str(tmp_path / output)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("program", ["taco_jax.tune", "taco_jax.train"])
def test_devices_that_are_not_there_are_one_line(program, run_python):
    run = run_python(["-m", program, "--devices", "gpu"], devices=None, env={"CUDA_VISIBLE_DEVICES": ""}, check=2)
    # JAX logs why a GPU's plugin finds none, with a traceback of its own.
    assert "Traceback" not in run.stderr or "Jax plugin configuration error" in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: devices='gpu': cannot be used here (")


@pytest.mark.slow  # its parts are above
def test_the_command(run_python, tmp_path):
    # One size of one codec, with both exchanges.
    few = ("--codecs", "taco", "--smallest", "4096", "--largest", "4096", "--repeats", "1", "--devices", "cpu:4")
    run = run_python(["-m", "taco_jax.tune", *few, "--output", "t.json"], devices=None)
    assert "taco pays" in run.stdout and "TACO_JAX_TUNED" in run.stdout and run.stderr == ""
    ((_, found),) = tuned.read(tmp_path / "t.json").items()
    assert found["taco"].best[0][2] in ("all_to_all", "ring")
    assert "Codecs to measure" in run_python(["-m", "taco_jax.tune", "--help"], devices=None).stdout


def test_several_processes_are_refused(monkeypatch):
    import jax

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="in one process"):
        tune.tune(TuneConfig())
