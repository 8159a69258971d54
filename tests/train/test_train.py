"""The trainer from the command line to the files it leaves: resuming, stopping early, non-finite steps, refusals."""

import dataclasses
import errno
import gzip
import json
import os
import pathlib
import re
import shutil
import signal
import tarfile
import time

import jax
import numpy as np
import pytest
import token_writers
from helpers import REPOSITORY, run_python
from programs import CONFIG, FILE, FLAGS, shared_programs

from taco_jax import data
from taco_jax.compression import recommended
from taco_jax.config import (
    CheckpointConfig,
    CompressionConfig,
    ConfigError,
    DataConfig,
    MeshConfig,
    MetricsConfig,
    TrainConfig,
    cli,
)
from taco_jax.config.checks import check
from taco_jax.train import run_lines
from taco_jax.train.checkpoint import Checkpoints
from taco_jax.train.log_file import log_to, say
from taco_jax.train.loop import Run, TrainingError, main, train
from taco_jax.train.metrics import Recorder, read_records
from taco_jax.train.profile import Profile
from taco_jax.train.workdir import LOCK, locked


def make_config(workdir, **changes) -> TrainConfig:
    return check(dataclasses.replace(CONFIG, workdir=str(workdir), **changes))


@pytest.fixture(scope="module", autouse=True)
def programs():
    with shared_programs():
        yield


def losses(workdir):
    return {r["step"]: r["loss"] for r in read_records(workdir / "metrics.jsonl")}


def saved_steps(workdir):
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir())


def saved(workdir, step):
    """All arrays of a checkpoint as stored, by name."""
    import orbax.checkpoint as ocp

    found = {}
    for item in ("state", "scales"):
        tree = ocp.StandardCheckpointer().restore((workdir / "checkpoints" / str(step) / item).absolute())
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            found[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """(workdir, what was printed) of a finished run of six steps, in a fresh process, so that --devices has to work."""
    folder = tmp_path_factory.mktemp("train")
    argv = ["-m", "taco_jax.train", "--config", FILE, *FLAGS, "--workdir", folder / "run"]
    return folder / "run", run_python(argv, devices=None, cwd=folder)


@pytest.fixture(scope="module")
def whole(command):
    return command[0]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three of the six steps."""
    workdir = tmp_path_factory.mktemp("train") / "three"
    train(make_config(workdir, stop_after=3))
    return workdir


def copied(workdir, tmp_path):
    return pathlib.Path(shutil.copytree(workdir, tmp_path / "copy"))


def test_command_line_leaves_everything(command):
    run, out = command
    assert re.search(
        r"^step 1/6  loss 5\.\d+  grad .* tok/s .* ms  comm .* MB .*mfu n/a  mem .* GB  eta", out.stdout, re.M
    )
    assert re.search(r"^validation loss \d\.\d+ nats per token, perplexity", out.stdout, re.M)
    assert re.search(r"^tensor-parallel activation traffic: .* as bf16: ratio \d", out.stdout, re.M)
    assert re.search(r"^codecs: tp taco .*forward, int8h .*backward; dp int8h gradients$", out.stdout, re.M)
    line = re.search(r"^all messages per device and step: (tp .*); (dp .*); (together .*)$", out.stdout, re.M)
    numbers = [re.fullmatch(r"\w+ (.*) MB, (.*) MB as bf16: ratio (.*)", part).groups() for part in line.groups()]
    tp, dp, together = [[float(x) for x in part] for part in numbers]
    assert together[:2] == pytest.approx([tp[0] + dp[0], tp[1] + dp[1]], abs=0.02)
    assert 1.8 < dp[2] <= 1.97  # eight bits, a scale a block, and buckets filled up to whole blocks
    assert re.search(r"^loss curve .*/run/loss.png; metrics .*; checkpoint .*/run/checkpoints/6$", out.stdout, re.M)
    assert "WARNING" not in out.stderr and "Traceback" not in out.stderr
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in run.iterdir()} == {"config.json", "metrics.jsonl", "loss.png", "checkpoints", LOCK}
    assert json.loads((run / "config.json").read_text())["devices"] == "cpu:8"


def traced_steps(session):
    """Numbers of the steps in the trace of a session with one process."""
    (file,) = session.glob("*.trace.json.gz")
    assert next(session.glob("*.xplane.pb")).stat().st_size > 1000
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return sorted({int(e["args"]["step_num"]) for e in events if e.get("name") == "train" and "args" in e})


@pytest.mark.usefixtures("three")  # what a first run imports would be in the trace, which takes seconds
def test_a_traced_run_with_a_log(tmp_path, capsys):
    """A run that ends before the trace's last step closes it; one that is resumed appends to its log."""
    run, log = tmp_path / "run", tmp_path / "run" / "run.log"
    config = make_config(run, profile="3:5", stop_after=3, log_file=str(log))
    train(config)
    sessions = run / "profile" / "plugins" / "profile"
    assert traced_steps(sessions / "steps_3-5") == [3] and [p.name for p in (run / "profile").iterdir()] == ["plugins"]
    first = capsys.readouterr().out
    assert f"\nprofile of steps 3 to 3 in {run / 'profile'}\n" in first
    lines = log.read_text().splitlines(keepends=True)
    assert re.fullmatch(rf"# 20.* process {os.getpid()} on .*\n", lines[0]) and "".join(lines[1:]) == first
    train(dataclasses.replace(config, profile="4:4", stop_after=None))
    assert traced_steps(sessions / "steps_4-4") == [4]
    second = capsys.readouterr().out
    assert "changed since" not in second and second.index("profile of steps 4 to 4") < second.index("step 5/6")
    # What ends a run is its last line.
    with pytest.raises(ConfigError, match="checkpoint.resume_step=9"):
        train(dataclasses.replace(config, profile=None, checkpoint=CheckpointConfig(resume_step=9)))
    *whole, last = re.sub("^# .*\n", "", log.read_text(), flags=re.M).splitlines(keepends=True)
    assert "".join(whole) == first + second + capsys.readouterr().out
    assert last.startswith("error: checkpoint.resume_step=9: no such checkpoint")


def test_a_trace_is_set_aside_and_its_failure_ends_no_run(tmp_path, monkeypatch):
    lines = []

    def trace(text, steps):
        profile = Profile(text, tmp_path, lines.append)
        for number in steps:
            with profile.step(number, None):
                out = jax.numpy.ones(3) + number
            profile.after(number, out)
        profile.close()

    trace("3:4", range(1, 9)), trace("3:4", range(4, 9))
    sessions = tmp_path / "profile" / "plugins" / "profile"
    assert traced_steps(sessions / "steps_3-4.aside-1") == [3, 4] and traced_steps(sessions / "steps_3-4") == [4]
    assert lines == [f"profile of steps {first} to 4 in {tmp_path / 'profile'}" for first in (3, 4)]

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(jax.profiler, "start_trace", full)
    trace("2:3", range(1, 5))
    assert re.fullmatch("profile 2:3: not written .OSError: .*No space left.*; the run goes on", lines.pop())
    Profile("2:3", tmp_path, lines.append).plan(4, 6)
    assert lines.pop() == "profile 2:3: no trace, this run has the steps 4 to 6"


@pytest.mark.parametrize(
    "name, message",
    [
        ("nowhere/run.log", "there is no folder .*nowhere; make it"),
        ("run/metrics.jsonl", "the run keeps something else in this file"),
        (".", "is a folder; give the path of a file"),
    ],
)
def test_a_log_file_that_cannot_be(tmp_path, name, message):
    with pytest.raises(ConfigError, match=f"log_file=.*: {message}"):
        train(make_config(tmp_path / "run", log_file=str(tmp_path / name)))
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_the_log_and_not_the_run(capsys):
    with log_to("/dev/full"):
        say("one"), say("two")
    out, error = capsys.readouterr()
    assert out == "one\ntwo\n" and error == "/dev/full: No space left on device; the run goes on without its log\n"


def test_records(whole):
    records = read_records(whole / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    for r in records:
        assert 3 < r["loss"] < 6 and r["grad_norm"] > 0 and r["skipped"] == 0 and r["samples"] == 8 * r["step"]
        assert r["tokens_per_second"] == pytest.approx(8 * 32 / r["step_seconds"])
        assert r["comm_bytes"] > 0 and r["comm_bytes_bf16"] > r["comm_bytes"] and r["mfu"] is None
        assert ("validation_loss" in r) == (r["step"] in (4, 6))
    assert records[-1]["validation_perplexity"] == pytest.approx(np.exp(records[-1]["validation_loss"]))
    assert records[0]["learning_rate"] == pytest.approx(1.5e-3) and records[1]["learning_rate"] == pytest.approx(3e-3)
    assert records[-1]["learning_rate"] == pytest.approx(3e-5)
    assert saved_steps(whole) == [4, 6]


def test_six_steps_are_three_a_resume_and_three(whole, three, tmp_path):
    """Bit for bit: --stop-after keeps the schedule; parameters, optimiser, scales, data and seed all come back."""
    resumed = copied(three, tmp_path)
    assert saved_steps(resumed) == [3] and len(losses(resumed)) == 3
    train(make_config(resumed))
    assert losses(resumed) == losses(whole)
    a, b = saved(whole, 6), saved(resumed, 6)
    assert a.keys() == b.keys() and any("scales" in name for name in a) and any("mu" in name for name in a)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_a_run_goes_on_in_its_own_codecs(whole, three, tmp_path, capsys):
    """Where the settings say auto, and although another codec is recommended now."""
    resumed = copied(three, tmp_path)
    train(dataclasses.replace(CONFIG, workdir=str(resumed), compression=CompressionConfig()))
    assert losses(resumed) == losses(whole)
    said = capsys.readouterr().out
    assert "changed since" not in said and re.search(r"^codecs: tp taco forward, int8h backward; ", said, re.M)


def test_a_new_run_names_what_is_recommended(tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(
        CONFIG, workdir=str(tmp_path / "run"), compression=CompressionConfig(), mesh=MeshConfig(tp=2), stop_after=1
    )
    train(config)
    written = json.loads((tmp_path / "run" / "config.json").read_text())["compression"]
    assert (written["forward"], written["backward"]) == ("int8h", "int8h")
    content = {use: row | {"forward": "int6h", "backward": "int6h"} for use, row in recommended.load().items()}
    monkeypatch.setattr(recommended, "load", lambda: content)
    # So says a machine with another link, where the run has chains by itself.
    monkeypatch.setattr(run_lines, "chains", lambda config, device=None: (2, "a slow link"))
    train(dataclasses.replace(config, stop_after=2))
    said = capsys.readouterr().out
    assert said.count("\nchains: 2 (a slow link)\n") == 1 == said.count("\nchains: ")
    assert len(re.findall(r"^codecs: tp int8h forward, int8h backward", said, re.M)) == 2 and "changed" not in said
    assert check(config).compression.forward == "int6h"  # in another folder


def test_a_workdir_of_the_version_before_goes_on(whole, tmp_path):
    """tests/support/before.tar.xz: three of the six steps, written before modules moved into folders."""
    with tarfile.open(REPOSITORY / "tests" / "support" / "before.tar.xz") as files:
        files.extractall(tmp_path, filter="data")
    record = train(make_config(tmp_path / "before"))
    assert record["step"] == 6 and saved_steps(tmp_path / "before") == saved_steps(whole)
    # Another release of jax may round otherwise, and a code then differs.
    assert [*losses(tmp_path / "before").values()] == pytest.approx([*losses(whole).values()], abs=0.01)


@pytest.mark.slow
def test_resumed_on_another_mesh_and_batch(whole, three, tmp_path):
    """The next unseen sequences, on a mesh with another padding of the vocabulary."""
    resumed = copied(three, tmp_path)
    train(make_config(resumed, mesh=MeshConfig(dp=1, tp=2), stop_after=5, global_batch=4))
    records = read_records(resumed / "metrics.jsonl")
    assert [r["samples"] for r in records] == [8, 16, 24, 28, 32]
    assert losses(resumed)[4] == pytest.approx(losses(whole)[4], abs=0.1)


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"mesh": MeshConfig(dp=1, tp=2), "global_batch": 4}, marks=pytest.mark.slow)]
)
def test_several_sources_go_on_exactly(tmp_path, monkeypatch, changes):
    """Every window that is trained on: those of the same order taken one by one, before and after the stop."""
    text = np.frombuffer(data.read_text("austen"), np.uint8)
    token_writers.prepared(tmp_path / "mine", [text[:4000], text[4000:5000]], [text[-500:]], end=10)
    token_writers.megatron(tmp_path / "other", np.split(text[6000:9000], 30), "uint16")
    named = lambda *weights: DataConfig(
        train=tuple(f"{tmp_path / name}:{weight}" for name, weight in zip(("mine", "other"), weights, strict=True)),
        sequence_length=32,
    )
    run = {"data": named(0.7, 0.3), "stop_after": 3}
    fed, place = [], data.device_batch

    def device_batch(batch, sharding):
        if "weights" not in batch:
            fed.extend(batch["tokens"])
        return place(batch, sharding)

    monkeypatch.setattr(data, "device_batch", device_batch)
    train(make_config(tmp_path / "run", **run))
    with pytest.raises(ConfigError, match="the weights of .*mine, .*other are 1:1, the checkpoint's were 7:3"):
        train(make_config(tmp_path / "run", **run | {"data": named(0.5, 0.5)}))
    train(make_config(tmp_path / "run", **run | changes | {"stop_after": 6}))
    one = make_config(tmp_path / "run", data=named(7, 3), global_batch=1, mesh=MeshConfig())
    order = data.batches(one, data.open_data(one.data, 256)[0])
    assert len(fed) == read_records(tmp_path / "run" / "metrics.jsonl")[-1]["samples"] >= 36
    for number, window in enumerate(fed):
        assert np.array_equal(window, next(order)[0]), number


def test_finished_run_is_left_alone(whole, capsys):
    before, last = (whole / "metrics.jsonl").read_bytes(), read_records(whole / "metrics.jsonl")[-1]
    record = train(make_config(whole))
    out = capsys.readouterr().out
    assert "resumed from step 6" in out and "already at step 6 of 6; nothing to train" in out
    assert record["validation_loss"] == last["validation_loss"]
    assert (whole / "metrics.jsonl").read_bytes() == before and saved_steps(whole) == [4, 6]


def test_a_picture_that_cannot_be_written_fails_no_run(whole, tmp_path, capsys):
    run = copied(whole, tmp_path)
    (run / "loss.png").unlink()
    (run / "loss.png").mkdir()
    assert train(make_config(run))["step"] == 6
    assert re.search(r"^no loss curve \(.*loss.png: must be .*\); metrics", capsys.readouterr().out, re.M)


def test_resume_from_an_earlier_step(whole, tmp_path):
    run = copied(whole, tmp_path)
    config, first = make_config(run), losses(run)
    with pytest.raises(ConfigError, match="checkpoint.resume_step=5: no such checkpoint in .*; present: 4, 6"):
        train(dataclasses.replace(config, checkpoint=CheckpointConfig(every=4, resume_step=5)))
    train(dataclasses.replace(config, checkpoint=CheckpointConfig(every=4, resume_step=4)))
    assert losses(run) == first and saved_steps(run) == [4, 6]
    assert (tmp_path / "copy" / "checkpoints.aside" / "6").is_dir()
    assert (tmp_path / "copy" / "metrics.jsonl.aside-1").is_file()


@pytest.mark.slow
def test_statistics(tmp_path):
    metrics = MetricsConfig(every=100, snr_every=2)
    train(make_config(tmp_path / "a", mesh=MeshConfig(dp=1, tp=2), global_batch=4, stop_after=3, metrics=metrics))
    records = read_records(tmp_path / "a" / "metrics.jsonl")
    # The first step, those with statistics, and the last.
    assert [r["step"] for r in records] == [1, 2, 3] and [("sites" in r) for r in records] == [False, True, False]
    sites = records[1]["sites"]
    assert {"layers/attn/out/forward", "layers/mlp/down/forward", "layers/mlp/up/backward"} <= set(sites)
    for values in sites.values():
        assert values["snr_db"] > 20 and 0 <= values["clipped"] <= 1 and 0 <= values["flushed"] <= 1


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.slow)])
def test_a_signal_stops_the_run_with_a_checkpoint(tmp_path, monkeypatch, capsys, name):
    """One that comes during a validation waits for its end and for the step after it."""
    config = make_config(tmp_path / "run")
    validate, number = Run.validate, getattr(signal, name)

    def interrupted(run):
        os.kill(os.getpid(), number)
        return validate(run)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "validate", interrupted)
        record = train(config)
    assert signal.getsignal(number) == before
    assert record["step"] == 5 and saved_steps(tmp_path / "run") == [4, 5]
    assert f"stopped at step 5 of 6 by {name}, saved; the same command goes on" in capsys.readouterr().out
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5] and "validation_loss" in records[3]
    if name == "SIGTERM":
        train(config)
        assert list(losses(tmp_path / "run")) == list(range(1, 7))


def test_a_checkpoint_is_under_way_before_a_validation(tmp_path, monkeypatch):
    """A scheduler that does not wait for the end of the validation costs nothing but it."""
    order, save, validate = [], Run.save, Run.validate
    monkeypatch.setattr(Run, "save", lambda run, **how: (order.append("save"), save(run, **how))[1])
    monkeypatch.setattr(Run, "validate", lambda run: (order.append("validate"), validate(run))[1])
    train(make_config(tmp_path / "run"))
    assert order == ["save", "validate", "save", "validate"]


def test_non_finite_steps_stop_the_run(three, tmp_path, monkeypatch, capsys):
    """Parameters that have become infinite make everything after them non-finite; nothing of that is saved."""
    run, begin = copied(three, tmp_path), Run.begin

    def broken(run):
        begin(run)
        norm = jax.tree.map(lambda a: a * np.inf, run.state.params["final_norm"])
        run.state = dataclasses.replace(run.state, params=run.state.params | {"final_norm": norm})

    monkeypatch.setattr(Run, "begin", broken)
    message = "step 5: loss or gradient not finite for 2 steps in a row .* --checkpoint.resume-step; present: 3. Try"
    with pytest.raises(TrainingError, match=message):
        train(make_config(run, checkpoint=CheckpointConfig(every=1, keep=1), max_skipped_in_a_row=2))
    records = read_records(run / "metrics.jsonl")
    assert [r["skipped"] for r in records] == [0, 0, 0, 1, 1] and records[3]["grad_norm"] is None
    assert saved_steps(run) == [3]
    assert "SKIPPED" in capsys.readouterr().out


def after_steps(monkeypatch, change):
    """Has every step's metrics pass through change(step, metrics) before the run gets them."""

    class Changed:
        def __init__(self, program):
            self._program = program

        def __getattr__(self, name):
            return getattr(self._program, name)

        def step(self, state, batch):
            state, out = self._program.step(state, batch)
            return state, change(int(state.step), out)

    begin = Run.begin
    monkeypatch.setattr(Run, "begin", lambda run: (begin(run), setattr(run, "program", Changed(run.program))))


def test_a_step_takes_its_own_time_where_the_host_is_late(tmp_path, monkeypatch):
    """The second step is done when the first one's metrics are read: it did not take the microseconds in between."""

    def late(step, out):
        if step == 2:
            time.sleep(0.5)
        return out

    after_steps(monkeypatch, late)
    monkeypatch.setattr(Run, "validate", lambda run: {})
    train(make_config(tmp_path / "run", stop_after=3, checkpoint=CheckpointConfig(enabled=False)))
    seconds = [r["step_seconds"] for r in read_records(tmp_path / "run" / "metrics.jsonl")]
    assert min(seconds) > 0.01 and sum(seconds) > 0.5


def test_what_is_saved_beside_skipped_steps(tmp_path, monkeypatch):
    """The next finite step in place of a skipped one; a last one that was skipped, but nothing goes for it."""

    after_steps(monkeypatch, lambda step, out: out | {"skipped_in_a_row": 1.0 if step in (4, 6) else 0.0})
    train(make_config(tmp_path / "run", checkpoint=CheckpointConfig(every=2, keep=1)))
    assert saved_steps(tmp_path / "run") == [5, 6]


def test_records_that_cannot_be_written_end_the_run(whole, tmp_path, monkeypatch):
    """In one line, with the latest step saved: the run goes on as if nothing had been."""
    write = Recorder.write

    def full(recorder, record):
        if record["step"] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(recorder, record)

    config = make_config(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "write", full)
        with pytest.raises(
            TrainingError, match=r"metrics.jsonl: cannot be written \(No space left on device\); stopped"
        ):
            train(config)
    (step,) = saved_steps(tmp_path / "run")
    assert step in (3, 4)
    train(config)
    found, expected = losses(tmp_path / "run"), losses(whole)
    assert found == {number: expected[number] for number in found} and found.keys() >= {1, 2, 5, 6}


def test_one_run_at_a_time_in_a_workdir(whole):
    with locked(whole) as remarks:
        assert remarks == []
        message = f"workdir={whole}: another run is working in it \\(process {os.getpid()} on .*--workdir"
        with pytest.raises(ConfigError, match=message):
            train(make_config(whole))


def test_dry_run_writes_nothing(tmp_path, capsys):
    config = make_config(tmp_path / "run", dry_run=True)
    assert train(config) is None
    out = capsys.readouterr().out
    assert '"dry_run": true' in out and "layers/mlp/down" in out and "fits" in out
    assert not (tmp_path / "run").exists()


def test_a_forced_backend_that_cannot_run_is_an_error_of_one_line(tmp_path, capsys):
    flags = ["--workdir", str(tmp_path / "run"), "--mesh.tp", "2", "--compression.backend", "mosaic"]
    for more in ([], ["--dry-run"]):
        assert cli.run(main, [*flags, *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: compression: backend 'mosaic' cannot encode codec 'int8h' on cpu: CPU has no")
    assert not (tmp_path / "run").exists()


def test_exit_codes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("taco_jax.train.loop.train", lambda config: (_ for _ in ()).throw(TrainingError("not finite")))
    assert cli.run(main, []) == 1 and capsys.readouterr().err == "error: not finite\n"
    monkeypatch.setattr("taco_jax.train.loop.train", lambda config: None)
    assert cli.run(main, []) == 0
    assert cli.run(main, ["--steps", "0"]) == 2 and "steps=0" in capsys.readouterr().err

    def quoting(args):
        raise ConfigError(f"key={'a' * 10_000}\n\x1b[2J\r\u2028é: must be b")

    assert cli.run(quoting, []) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: key=aaa") and line.endswith(r"aaa\n\x1b[2J\r\u2028é: must be b" + "\n")
    assert line.count("\n") == 1 and len(line) < 2100 and "a [80" in line  # whose middle is left out


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mesh": MeshConfig(dp=8, tp=2)}, "mesh: dp 8 x pp 1 x tp 2 needs 16 devices, there are 8"),
        ({"data": DataConfig(train="missing.bin")}, "missing.bin: no such data file"),
        ({"data": DataConfig(sequence_length=4_000_000)}, "too short: 3797976 tokens"),
        ({"compression": CompressionConfig(plan={"layers/mpl/*": "taco"})}, "layers/mpl/*"),
        ({"attention_implementation": "cudnn"}, "attention_implementation='cudnn': needs a GPU"),
        ({"compute_dtype": "float16"}, "compute_dtype='float16': JAX has no float16 attention on CPU"),
    ],
)
def test_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        train(make_config(tmp_path / "run", **changes))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_workdir_that_cannot_be_made_or_read(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/run: cannot be used \\(Not a directory"):
        train(make_config(tmp_path / "file" / "run"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="config.json: corrupt"):
        train(make_config(tmp_path))


def test_workdir_of_another_model(whole):
    other = dataclasses.replace(CONFIG.model, n_layers=1)
    with pytest.raises(ConfigError, match="holds another model \\(model.n_layers 2 -> 1\\)"):
        train(make_config(whole, model=other))


def test_other_seed_in_the_same_workdir(whole):
    with pytest.raises(ConfigError, match="seed=1: the checkpoint's data order was drawn with seed 0"):
        train(make_config(whole, seed=1))


def test_without_checkpoints(tmp_path):
    """Nothing to resume: the run starts again, and the earlier metrics are kept."""
    config = make_config(tmp_path / "run", stop_after=2, checkpoint=CheckpointConfig(enabled=False))
    train(config)
    train(config)
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "metrics.jsonl", "metrics.jsonl.aside-1", "loss.png", LOCK}


def test_checkpoint_folder_is_orbax(whole):
    with Checkpoints(whole / "checkpoints", CheckpointConfig()) as checkpoints:
        assert checkpoints.steps() == [4, 6]
