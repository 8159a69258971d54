"""Runs of two processes with four emulated devices each, as a launcher starts them."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from helpers import REPOSITORY, quick_compiling, until
from meetings import free_port
from programs import shared_programs

from taco_jax.config import CheckpointConfig, CompressionConfig, MeshConfig
from taco_jax.config.cli import load
from taco_jax.train.loop import train
from taco_jax.train.metrics import read_records

CONFIG = """
from taco_jax.config import *
from taco_jax.models.config import ModelConfig

config = TrainConfig(
    model=ModelConfig(d_model={width}, n_layers=1, n_heads=8, n_kv_heads=8, head_dim=8, d_mlp=64),
    mesh=MeshConfig(dp={dp}, tp={tp}, devices_per_host={hosts}),
    compression=CompressionConfig(forward="{codec}", backward="{codec}", min_bytes=0, between_hosts={between!r}),
    data=DataConfig(sequence_length=32),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=2),
    checkpoint=CheckpointConfig(every={every}),
    evaluation=EvalConfig(every={every}, batches=2),
    global_batch=8,
    steps=100_000,
    compute_dtype="float32",
    workdir="run",
    distributed_timeout=300,
    heartbeat_timeout=600,
)
"""


class Processes:
    """Two processes of one run; their output goes to files of the folder."""

    def __init__(self, folder, *flags, only=None, processes=2, devices=4):
        self.folder, self.port = folder, free_port()
        self.running = {}
        for i in range(processes) if only is None else only:
            environment = os.environ | {
                "PYTHONPATH": str(REPOSITORY),
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{self.port}",
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(i),
            }
            environment["XLA_FLAGS"] = " ".join(quick_compiling())
            environment.pop("JAX_PLATFORMS", None)
            command = [sys.executable, "-m", "taco_jax.train", "--config", "config.py", "--devices", f"cpu:{devices}"]
            with self.path(i).open("w") as file:
                self.running[i] = subprocess.Popen(
                    [*command, *flags], env=environment, cwd=folder, stdout=file, stderr=subprocess.STDOUT
                )

    def path(self, process):
        return self.folder / f"{self.port}.{process}"

    def output(self, process):
        return self.path(process).read_text(errors="replace")

    def wait_for(self, text, process=0):
        """Until the process has printed a match of the pattern."""

        def printed():
            found = re.search(text, self.output(process), re.M)
            ended = self.running[process].poll()
            assert found or ended is None, f"{ended}, no {text!r} in {self.output(process)[-3000:]}"
            return found

        until(printed, f"{text!r} of process {process}", pause=0.1)

    def code(self, process):
        """The process's exit code once it has ended."""
        until(lambda: self.running[process].poll() is not None, f"process {process} to end", pause=0.05)
        return self.running[process].returncode

    def codes(self):
        return [self.code(process) for process in self.running]

    def end(self):
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    started = []

    def make(*flags, config=None, **options):
        if config is not None:
            values = {"width": 16, "dp": 2, "tp": 4, "codec": "none", "every": 1000, "between": None, "hosts": None}
            (tmp_path / "config.py").write_text(CONFIG.format(**(values | config)))
        started.append(Processes(tmp_path, *flags, **options))
        return started[-1]

    yield make
    for processes in started:
        processes.end()


@pytest.fixture(scope="module", autouse=True)
def programs():
    with shared_programs():
        yield


def losses(folder):
    return {r["step"]: r["loss"] for r in read_records(folder / "metrics.jsonl")}


def train_here(folder, monkeypatch, *, workdir, **changes):
    """The same run in one process with eight devices."""
    import dataclasses

    monkeypatch.chdir(folder)
    return train(dataclasses.replace(load(folder / "config.py"), workdir=workdir, **changes))


def test_two_processes_train_as_one_and_stop_when_one_is_asked_to(start, tmp_path, monkeypatch):
    run = start(config={})
    run.wait_for(r"^step +4/")
    run.running[1].send_signal(signal.SIGTERM)
    assert run.codes() == [0, 0], run.output(0)[-3000:]
    first, second = run.output(0), run.output(1)
    assert "process 0/2 holds 4 of 8 devices" in first and "process 1/2 holds 4 of 8 devices" in second
    assert not re.search("^step|^compil|validation", second, re.M)
    step = int(re.search(r"^stopped at step (\d+) of 100000 by SIGTERM to process 1, saved; the same", first, re.M)[1])
    assert [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()] == [step]
    # One process of eight devices: the same curve, and it goes on from the two processes' checkpoint.
    train_here(tmp_path, monkeypatch, workdir="here", stop_after=step + 2)
    train_here(tmp_path, monkeypatch, workdir="run", stop_after=step + 2)
    here, resumed = losses(tmp_path / "here"), losses(tmp_path / "run")
    assert list(here) == list(resumed) == list(range(1, step + 3))
    assert resumed == pytest.approx(here, rel=1e-5)
    assert here[step + 2] < here[1] - 0.1


def test_a_process_that_never_comes_is_named(start):
    run = start("--distributed-timeout", "2", config={}, only=[0])
    assert run.codes() == [1]
    *before, last = run.output(0).splitlines()
    assert last.startswith("error: process 1 of 2 did not report to 127.0.0.1:") and not before


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("part", ["supervisor", "worker"])
def test_the_others_name_a_killed_process(start, victim, part):
    run = start(config={})
    run.wait_for(r"^step +4/")
    pid = run.running[victim].pid
    if part == "worker":
        pid = int(subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout)
    os.kill(pid, signal.SIGKILL)
    other = 1 - victim
    # Not by the heartbeat's timeout, which is longer: the operating system says that the connection is closed.
    assert run.code(other) == 1
    last = run.output(other).splitlines()[-1]
    how = "was ended by SIGKILL" if part == "worker" else "is gone: it was killed"
    assert last.startswith(f"error: process {victim} of 2 (host ") and how in last
    assert "the same command goes on from the last checkpoint" in last
    assert run.code(victim) == (1 if part == "worker" else -signal.SIGKILL)


@pytest.mark.slow
def test_a_host_that_falls_silent_is_named(start):
    """A stopped supervisor sends nothing, and its connections stay open."""
    run = start("--heartbeat-timeout", "8", config={})
    run.wait_for(r"^step +4/")
    run.running[1].send_signal(signal.SIGSTOP)
    assert run.code(0) == 1
    assert "process 1 of 2 (host " in (last := run.output(0).splitlines()[-1])
    assert "has been silent for 8 s (heartbeat_timeout)" in last


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 4), (1, 8), (8, 1)])
def test_compressed_run_resumed_on_one_and_on_two_processes(start, tmp_path, monkeypatch, mesh):
    """Messages between the processes are compressed where tp spans them (1, 8), and go in levels there: each process
    is taken for a host (to JAX both are on one machine), in one process the same four devices are."""
    dp, tp = mesh
    config = {"width": 32, "dp": dp, "tp": tp, "codec": "taco", "every": 2, "between": "int6h", "hosts": 4}
    run = start("--stop-after", "4", config=config)
    assert run.codes() == [0, 0], run.output(0)[-3000:]
    record = train_here(tmp_path, monkeypatch, workdir="here", stop_after=8)
    assert record["comm_bytes"] == read_records(tmp_path / "run" / "metrics.jsonl")[-1]["comm_bytes"]
    subprocess.run(["cp", "-r", "run", "copy"], cwd=tmp_path, check=True)
    train_here(tmp_path, monkeypatch, workdir="copy", stop_after=8)
    run = start("--stop-after", "8")
    assert run.codes() == [0, 0] and "resumed from step 4" in run.output(0), run.output(0)[-3000:]
    here = losses(tmp_path / "here")
    assert list(here) == list(range(1, 9))
    if tp == 8:  # a flat sum has other bytes, and another curve
        flat = train_here(tmp_path, monkeypatch, workdir="flat", stop_after=8, mesh=MeshConfig(tp=8))
        assert flat["comm_bytes"] > record["comm_bytes"]
        assert losses(tmp_path / "flat") != pytest.approx(here, rel=1e-4)
    assert losses(tmp_path / "run") == pytest.approx(here, rel=1e-4)
    assert losses(tmp_path / "copy") == pytest.approx(here, rel=1e-4)
    validated = [
        [r["validation_loss"] for r in read_records(tmp_path / w / "metrics.jsonl") if "validation_loss" in r]
        for w in ("here", "run", "copy")
    ]
    assert len(validated[0]) == 4
    assert validated[1] == pytest.approx(validated[0], rel=1e-4) and validated[2] == pytest.approx(
        validated[0], rel=1e-4
    )


@pytest.mark.slow
def test_stopped_while_compiling_and_resumed_by_two_processes(start, tmp_path):
    run = start(config={})
    run.wait_for("^compiling")
    run.running[0].send_signal(signal.SIGUSR1)
    assert run.codes() == [0, 0]
    assert "stopped at step 1 of 100000 by SIGUSR1 to process 0, saved" in run.output(0)
    run = start("--stop-after", "3")
    assert run.codes() == [0, 0] and "resumed from step 1" in run.output(0)
    assert list(losses(tmp_path / "run")) == [1, 2, 3]


@pytest.mark.slow
def test_a_setting_that_one_process_cannot_use_stops_all(start, tmp_path):
    run = start("--mesh.tp", "2", config={})
    assert run.codes() == [2, 2]
    message = "error: mesh: dp 2 x pp 1 x tp 2 is 4 devices, the 2 processes hold 8, and with several processes all of"
    assert run.output(0).splitlines()[-1].startswith(message) and run.output(1).splitlines()[-1].startswith(message)
    assert not (tmp_path / "run").exists()


def test_settings_reach_the_config_file(start, tmp_path):
    """What only says how a run is started may change from one resume to the next without a remark."""
    from taco_jax.train.workdir import open_workdir

    (tmp_path / "config.py").write_text(
        CONFIG.format(width=16, dp=2, tp=4, codec="none", every=9, between=None, hosts=None)
    )
    import dataclasses

    config = dataclasses.replace(load(tmp_path / "config.py"), workdir=str(tmp_path / "run"))
    assert open_workdir(config) == []
    assert json.loads((tmp_path / "run" / "config.json").read_text())["distributed"] == "auto"
    changed = dataclasses.replace(config, distributed="off", distributed_timeout=5, heartbeat_timeout=5)
    assert open_workdir(changed) == []


GUARDED = """
import json
import sys

sys.path.insert(0, {support!r})
from outliers import outliers


def see(run, step):
    import jax

    with open(f"seen.{{jax.process_index()}}", "a") as file:
        spent, codecs = run.guard.budget.state()["spent"], run.program.table.codecs()
        print(json.dumps([step, codecs, spent, run.guard.guard.state()]), file=file)


growing = outliers({{8: 20.0, 16: 1 / 20}}, see)
growing.__enter__()
"""


@pytest.mark.slow
def test_the_guards_of_two_processes_move_a_site_and_go_back_after_the_same_steps(start, tmp_path, monkeypatch, capsys):
    """Messages go between the processes. What each of them measures of time differs; what they decide by does not."""
    codec = "int4h,block=64,rotation=none"
    start(config={"tp": 8, "dp": 1, "codec": codec, "width": 64, "hosts": 8, "every": 14}, only=[])
    text = (tmp_path / "config.py").read_text()
    (tmp_path / "config.py").write_text(text + GUARDED.format(support=str(REPOSITORY / "tests" / "support")))
    flags = ["--compression.guard", "act", "--compression.guard-patience", "2", "--metrics.snr-every", "2"]
    flags += ["--optimizer.learning-rate", "1e-5", "--optimizer.min-learning-rate", "1e-6", "--stop-after", "34"]
    run = start(*flags)
    assert run.codes() == [0, 0], run.output(0)[-3000:] + run.output(1)[-3000:]
    assert re.search(
        r"^guard: step 12: layers/attn/out forward int4h,\S+ -> int6h,.* from step 13 on", run.output(0), re.M
    )
    assert "guard: step" not in run.output(1)
    seen = [[json.loads(line) for line in (tmp_path / f"seen.{i}").read_text().splitlines()] for i in range(2)]
    assert seen[0] == seen[1] and [row[0] for row in seen[0]] == list(range(1, 35))
    # The codec before is measured at every fourth measurement, that is, after steps 16, 24 and 32.
    (before,), (moved,), (again,) = ({row[1] for row in part} for part in (seen[0][:11], seen[0][11:31], seen[0][31:]))
    assert "int6" in moved and "int6" not in before and again == before
    assert re.search(r"^guard: step 32: layers/attn/out forward int6h,\S+ -> int4h,\S+ again", run.output(0), re.M)
    assert seen[0][-1][2] > 0
    # In one process, on another mesh.
    (tmp_path / "config.py").write_text(text)
    compression = CompressionConfig(codec, codec, min_bytes=0, guard="act")
    changes = {"mesh": MeshConfig(dp=2, tp=4), "compression": compression}
    checkpoint = CheckpointConfig(resume_step=14)
    train_here(tmp_path, monkeypatch, workdir="run", stop_after=16, checkpoint=checkpoint, **changes)
    out = capsys.readouterr().out
    assert re.search(r"^guard: .*; moved: layers/attn/out/forward int6h,\S+ instead of int4h,\S+$", out, re.M)
