"""`python -m taco_jax.tune`: what it measures, prints and writes, on emulated devices; and what it refuses."""

import contextlib
import json
import sys

import pytest
from helpers import make_mesh

from taco_jax import Compression
from taco_jax.compression import tuned
from taco_jax.compression.timings import OPERATIONS, Row, Time, Way
from taco_jax.config import ConfigError, cli
from taco_jax.tuning import command, layer, measure, report
from taco_jax.tuning.result import Point, crossover, rows, winners
from taco_jax.tuning.settings import TuneConfig, check

SMALL = ("--codecs", "taco", "--smallest", "4096", "--largest", "20000", "--smallest-chunk", "8192",
         "--repeats", "2", "--ranks", "4", "--operations", "psum")  # fmt: skip


def test_it_measures_prints_and_writes(tmp_path, capsys, monkeypatch):
    file = tmp_path / "new" / "tuned.json"
    assert cli.run(command.main, [*SMALL, "--exchanges", "ring", "--output", str(file)]) == 0
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
        assert list(value.times) == ["psum"]
        for timed in value.times.values():
            assert [row.bytes for row in timed] == [4096, 16384]
            assert all(row.exact.us > 0 and row.free.us > 0 and row.ways for row in timed)
            assert all(way.link == "nccl" and way.exchange in ("all_to_all", "ring") for way in timed[0].ways)
            assert {way.algorithm for way in timed[0].ways} == {"one_shot", "two_shot"}
    assert "taco psum, nccl one_shot: " in out and "taco psum, nccl two_shot ring: " in out and "; sums: " in out
    # Layers read it where the variable names it.
    monkeypatch.setenv("TACO_JAX_TUNED", str(file))
    assert tuned.transport("taco", 4, 16384) == found["taco"].best[1][1:]


def point(nbytes, seconds, exact, way="two_shot", **fields):
    return Point(nbytes, Way("nccl", way, 1, "ring" if way == "two_shot" else "all_to_all"), seconds, exact, **fields)


@pytest.fixture
def quick(monkeypatch):
    """Nothing is compiled before it is timed, and only sums are."""
    monkeypatch.setattr(measure, "_prepare", lambda *args: None)
    return ["--operations", "psum"]


@pytest.mark.parametrize("error", [RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile\n"), KeyboardInterrupt()])
def test_what_was_measured_before_an_error_is_written(error, tmp_path, capsys, monkeypatch, quick):
    def points(config, mesh, operation, codec, nbytes, algorithms):
        if nbytes == 16 << 10 and codec == "mxfp4":
            raise error
        return [point(nbytes, 1.0 if codec == "mxfp4" or nbytes > 4096 else 3.0, 2.0)]

    monkeypatch.setattr(measure, "_points", points)
    file = tmp_path / "tuned.json"
    arguments = ["--smallest", "4096", "--largest", "65536", "--output", str(file), *quick]
    assert cli.run(command.main, [*arguments, "--codecs", "taco", "mxfp4"]) == 1
    out, err = capsys.readouterr()
    reason = "interrupted at 16 KiB, mxfp4"
    if not isinstance(error, KeyboardInterrupt):
        reason = (
            "stopped at 16 KiB, mxfp4 (RuntimeError: RESOURCE_EXHAUSTED: Out of memory while); try a smaller --largest"
        )
    assert err == f"error: {reason}; the sizes before it are written for taco, mxfp4\n"
    assert f"written to {file}" in out and "16 KiB" in out
    (found,) = tuned.read(file).values()
    way = Way("nccl", "two_shot", 1, "ring")
    row = lambda nbytes, seconds: Row(nbytes, Time(0.0), Time(2e6), {way: Time(1e6 * seconds)})
    sums = (4096, 1, "two_shot"), (16384, 1, "two_shot")
    assert found["mxfp4"] == tuned.Tuned(4096, ((4096, 1, "ring"),), sums[:1], {"psum": (row(4096, 1.0),)})
    times = {"psum": (row(4096, 3.0), row(16384, 1.0))}
    assert found["taco"] == tuned.Tuned(16384, ((4096, 1, "ring"), (16384, 1, "ring")), sums, times)
    # At 4 KiB taco does not pay. That says nothing of larger messages: what the file has of it stays.
    assert cli.run(command.main, [*arguments, "--codecs", "mxfp4", "taco"]) == 1
    assert capsys.readouterr().err == f"error: {reason}; the sizes before it are written for mxfp4\n"
    assert list(tuned.read(file).values()) == [found]
    assert cli.run(command.main, [*arguments, "--codecs", "mxfp4", "--smallest", "16384"]) == 1
    assert capsys.readouterr().err == f"error: {reason}; nothing is written\n"
    assert list(tuned.read(file).values()) == [found]


def test_other_operations_join_what_the_file_has(tmp_path, capsys, monkeypatch, quick):
    points = lambda config, mesh, operation, codec, nbytes, algorithms: [
        point(nbytes, 1.0, 2.0, "two_shot" if operation == "psum" else "auto", operation=operation)
    ]
    monkeypatch.setattr(measure, "_points", points)
    arguments = ["--smallest", "4096", "--largest", "4096", "--codecs", "taco", "--output", str(tmp_path / "t.json")]
    assert cli.run(command.main, [*arguments, "--operations", "ppermute"]) == 2
    assert "has no sums of taco that they could join; name psum too" in capsys.readouterr().err
    assert cli.run(command.main, [*arguments, *quick]) == 0
    (before,) = tuned.read(tmp_path / "t.json").values()
    assert cli.run(command.main, [*arguments, "--operations", "ppermute", "all_gather"]) == 0
    (found,) = tuned.read(tmp_path / "t.json").values()
    assert list(found["taco"].times) == ["psum", "ppermute", "all_gather"]
    assert found["taco"].times["psum"] == before["taco"].times["psum"] and found["taco"].best == before["taco"].best


def test_what_was_measured_is_written_though_nobody_reads_it(tmp_path, capsys, monkeypatch, quick):
    monkeypatch.setattr(measure, "_points", lambda *args, algorithms: [point(4096, 1.0, 2.0)])
    file = tmp_path / "tuned.json"
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        arguments = ["--smallest", "4096", "--largest", "4096", "--codecs", "taco", "--output", str(file)]
        assert cli.run(command.main, [*arguments, *quick]) == 0
    assert capsys.readouterr().err == "standard output: No space left on device; it goes on without\n"
    assert len(tuned.read(file)) == 1


def test_the_ways_that_are_tried(monkeypatch):
    tried, mesh = [], make_mesh(tp=4)

    def time(config, mesh, operation, codec, nbytes, ways):
        tried.append(list(ways))
        seconds = {two(1, "ring"): 2.0, two(2, "ring"): 1.0, one(4): 0.5}
        return [Point(nbytes, w, seconds.get(w, 3.0), 2.5, operation=operation) for w in ways]

    two, one = lambda *way: Way("nccl", "two_shot", *way), lambda chunks: Way("nccl", "one_shot", chunks)
    monkeypatch.setattr(measure, "_time", time)
    points = lambda operation="psum", algorithms=("one_shot", "two_shot"), **fields: measure._points(
        TuneConfig(**{"smallest_chunk": 1024} | fields), mesh, operation, "taco", 4096, algorithms=algorithms
    )
    found = points()
    first = [two(1, "all_to_all"), two(1, "ring"), one(1)]
    assert tried == [first, [two(2, "ring"), two(4, "ring"), one(2), one(4)]]
    assert [p.way for p in winners(found)] == [one(4)] and len(found) == 7
    tried.clear()
    points(smallest_chunk=4096)
    assert tried == [first]
    tried.clear()
    points(algorithms=("two_shot",))
    assert tried == [first[:2], [two(2, "ring"), two(4, "ring")]]
    for operation, ways in {
        "psum_scatter": [[Way(exchange="all_to_all"), Way(exchange="ring")], [Way(chunks=2), Way(chunks=4)]],
        "all_gather": [[Way()], [Way(chunks=2), Way(chunks=4)]],
        "ppermute": [[Way()], [Way(chunks=2), Way(chunks=4)]],
    }.items():
        tried.clear()
        points(operation)
        assert tried == ways
    # One kernel over NVLink has neither chunks nor an exchange.
    monkeypatch.setattr(measure, "_in_one_kernel", lambda *args: True)
    tried.clear()
    points(smallest_chunk=4096)
    assert tried == [[Way("nvlink", "one_shot"), Way("nvlink", "two_shot"), *first]]
    tried.clear()
    points("all_gather", smallest_chunk=4096)
    assert tried == [[Way("nvlink"), Way()]]


def test_whether_it_is_one_kernel_is_asked_more_than_once(monkeypatch):
    """JAX traces a program once; what was recorded then holds."""
    from taco_jax.compression import dispatch

    records = iter([{("taco", "all_reduce"): [("nvlink", "a test")]}])
    monkeypatch.setattr(dispatch, "record", lambda: contextlib.nullcontext(next(records, {})))
    config, mesh = TuneConfig(smallest=4096), make_mesh(tp=4)
    ways = lambda: measure._first_ways(config, mesh, "psum", "taco", 4096, algorithms=("one_shot",))
    first = ways()
    assert first == ways() and Way("nvlink", "one_shot") in first


def test_one_shot_beside_two_shot(monkeypatch, tmp_path, capsys, quick):
    """What wins goes into the file; one-shot is no more tried once it is hopeless."""
    asked = []

    def points(config, mesh, operation, codec, nbytes, algorithms):
        asked.append((nbytes >> 10, algorithms))
        found = {"one_shot": point(nbytes, nbytes / 4096, 5.0, "one_shot"), "two_shot": point(nbytes, 3.0, 5.0)}
        return [found[algorithm] for algorithm in algorithms]

    monkeypatch.setattr(measure, "_points", points)
    file = tmp_path / "tuned.json"
    arguments = ["--codecs", "taco", "--smallest", "4096", "--largest", str(1 << 20), "--output", str(file), *quick]
    assert cli.run(command.main, arguments) == 0
    both, two = ("one_shot", "two_shot"), ("two_shot",)
    assert asked == [(4, both), (16, both), (64, both), (256, two), (1024, two)]
    (found,) = tuned.read(file).values()
    sizes = [4**i << 12 for i in range(5)]
    sums = [(sizes[0], 1, "one_shot"), *((size, 1, "two_shot") for size in sizes[1:])]
    assert found["taco"].min_bytes == 4096 and found["taco"].sums == tuple(sums)
    assert found["taco"].best == tuple((size, 1, "ring") for size in sizes)
    assert "taco pays from 4 KiB; sums: one_shot, two_shot from 16,384 bytes" in capsys.readouterr().out
    points = [point(1, 2.0, 3.0), point(1, 1.0, 1.0, "one_shot")]
    assert winners(points) == points[:1]  # by the ratio to the exact layer of the same call


def test_times_of_two_calls_are_brought_to_one_exact_layer():
    spreads = (0.1, 0.2, 0.3)
    (row,) = rows([point(8, 3.0, 4.0, free_seconds=1.0, spreads=spreads), point(8, 3.0, 6.0, "one_shot")])
    assert (row.free, row.exact) == (Time(1e6, 3e5), Time(4e6, 2e5))
    assert row.ways == {Way("nccl", "two_shot", 1, "ring"): Time(3e6, 1e5), Way("nccl", "one_shot"): Time(2e6, 0.0)}


@pytest.mark.parametrize(
    "faster,expected",
    [("yyyy", 1), ("nyyy", 4), ("ynyy", 16), ("nnny", 64), ("nnnn", None), ("yyyn", None)],
)
def test_the_crossover(faster, expected):
    points = [point(4**i, 1.0 if f == "y" else 3.0, 2.0) for i, f in enumerate(faster)]
    assert crossover(rows(points)) == expected


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_layer_keeps_its_values_and_the_codec_comes_near(operation):
    """Every layer is of the one before it, in the least exact dtype."""
    import numpy as np

    mesh = make_mesh(tp=2)
    config, nbytes = TuneConfig(dtype="float16"), 4096
    arguments = layer.tensors(config, mesh, nbytes)
    run = lambda how: np.float64(layer.program(mesh, 2, operation, how)(*arguments))
    exact = run(None)
    assert np.isfinite(exact).all() and np.abs(exact).max() > 0.1
    assert np.linalg.norm(run(Compression("int8h", min_bytes=0)) - exact) < 0.05 * np.linalg.norm(exact)
    if operation == "psum":
        assert np.linalg.norm(run(layer.FREE) - exact) > 0.1 * np.linalg.norm(exact)


def test_the_layer_of_a_message():
    assert layer.shape_of(1 << 21, 2) == (512, 1024, 4096)
    assert layer.shape_of(1 << 15, 4) == (8, 1024, 4096)
    for elements, ranks in ((6144, 4), (2048, 8), (8, 8), (7, 2), (1, 2), (3 << 20, 3)):
        tokens, inner, width = layer.shape_of(elements, ranks)
        assert tokens % ranks == 0 < tokens and width % inner == 0
        assert tokens * width == max(ranks, elements // ranks * ranks)
    # Three ranks divide no power of two: the layer is as wide all the same, and a little smaller.
    assert layer.shape_of(1 << 21, 3) == (510, 1024, 4096)
    for size in range(15, 28):
        tokens, _, width = layer.shape_of(1 << size, 6)
        assert tokens % 6 == 0 and width >= 64 and 31 / 32 <= tokens * width / (1 << size) <= 1


def test_what_is_named_twice_is_measured_once_and_sums_first(monkeypatch, tmp_path):
    """Other operations join sums, also where a measurement stops between them."""
    asked = []

    def points(config, mesh, operation, codec, nbytes, algorithms):
        asked.append((operation, codec))
        if operation == "all_gather":
            raise MemoryError
        return [point(nbytes, 2.0, 3.0)]

    monkeypatch.setattr(measure, "_points", points)
    monkeypatch.setattr(measure, "_prepare", lambda *args: None)
    file = tmp_path / "tuned.json"
    arguments = ["--codecs", "taco", "taco", "--smallest", "4096", "--largest", "4096", "--output", str(file)]
    assert cli.run(command.main, [*arguments, "--operations", "all_gather", "psum", "psum"]) == 1
    assert asked == [("psum", "taco"), ("all_gather", "taco")]
    (found,) = tuned.read(file).values()
    assert list(found["taco"].times) == ["psum"] and found["taco"].min_bytes == 4096


@pytest.mark.parametrize(
    "faster, text",
    [("nnn", "at no measured size"), ("yyy", "from 4 KiB"), ("ynn", "at 4 KiB alone"),
     ("yny", "from 64 KiB, and at 4 KiB"),
     ("yyn", "at 4 KiB, 16 KiB alone")],
)  # fmt: skip
def test_the_last_lines_say_where_it_pays(faster, text):
    points = [point(4096 * 4**i, 1.0 if f == "y" else 3.0, 2.0) for i, f in enumerate(faster)]
    assert report.pays(rows(points)) == text


def test_sizes():
    assert TuneConfig().sizes == [4**i << 16 for i in range(7)]  # 64 KiB to 256 MiB
    assert TuneConfig(factor=2, largest=1 << 18).sizes == [1 << 16, 1 << 17, 1 << 18]
    assert [report.size_name(n) for n in (1 << 16, 1 << 28, 100)] == ["64 KiB", "256 MiB", "100 bytes"]
    assert check(TuneConfig()) == TuneConfig()


@pytest.mark.parametrize(
    "args,message",
    [
        (["--codecs", "tacoo"], "codecs='tacoo': no such codec preset; did you mean 'taco'?"),
        (["--codecs", "none"], "codecs='none': no such codec preset"),
        (["--codec", "taco"], "unknown option --codec; did you mean --codecs?"),
        (["--exchanges", "rings"], "exchanges='rings': did you mean 'ring'?"),
        (["--operations", "psums"], "operations='psums': did you mean 'psum'?"),
        (["--algorithms", "ring"], "algorithms='ring': known: one_shot, two_shot"),
        (["--factor", "1"], "factor=1: must be at least 2"),
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
    assert cli.run(command.main, [*args, "--output", str(tmp_path / "tuned.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.iterdir())


def test_one_device_is_too_few(monkeypatch, capsys, tmp_path):
    devices = cli.devices
    monkeypatch.setattr(cli, "devices", lambda name: devices(name)[:1])
    assert cli.run(command.main, ["--output", str(tmp_path / "tuned.json")]) == 2
    assert "error: tune needs at least 2 devices, there is 1 (cpu); to try it" in capsys.readouterr().err


def test_a_bad_file_is_found_before_anything_is_measured(tmp_path, capsys):
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"a": {"taco": {}}}))
    assert cli.run(command.main, ["--output", str(file)]) == 2
    assert f"{file}: 'a': taco.best=null: must have exactly the keys" in capsys.readouterr().err


@pytest.mark.parametrize("output,message", [(".", "is a folder; name a file in it"), ("file/tuned.json", "cannot be ")])
def test_the_output_is_checked_before_anything_is_measured(output, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "_points", lambda *_, **options: pytest.fail("it measured"))
    (tmp_path / "file").write_text("kept")
    assert cli.run(command.main, ["--output", str(tmp_path / output)]) == 2
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
    few = ("--codecs", "taco", "--smallest", "4096", "--largest", "4096", "--repeats", "1", "--devices", "cpu:4",
           "--operations", "psum")  # fmt: skip
    run = run_python(["-m", "taco_jax.tune", *few, "--output", "t.json"], devices=None)
    assert "taco pays" in run.stdout and "TACO_JAX_TUNED" in run.stdout and run.stderr == ""
    ((_, found),) = tuned.read(tmp_path / "t.json").items()
    assert found["taco"].best[0][2] in ("all_to_all", "ring")
    assert "Codecs to measure" in run_python(["-m", "taco_jax.tune", "--help"], devices=None).stdout


def test_several_processes_are_refused(monkeypatch):
    import jax

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="in one process"):
        command.tune(TuneConfig())
