"""The numbers of a step line and of metrics.jsonl, and the file's life across resumed runs."""

import dataclasses
import json
import sys
import types

import pytest

from taco_jax.config import ConfigError, MetricsConfig, ModelConfig, TrainConfig
from taco_jax.models.presets import preset
from taco_jax.train.metrics import (
    Recorder,
    bf16_peak,
    duration,
    finite,
    flops_per_token,
    peak_memory,
    read_records,
    step_line,
)

RECORD = {
    "step": 7, "loss": 2.34567, "grad_norm": 1.2, "learning_rate": 1e-3, "skipped": 0,
    "tokens_per_second": 123456.0, "step_seconds": 0.0664, "comm_bytes": 14.27e6, "comm_bytes_bf16": 28.31e6,
    "comm": {"tp": {"bytes": 14.27e6, "bytes_bf16": 28.31e6}, "dp": {"bytes": 8e6, "bytes_bf16": 4e6},
             "several": {"bytes": 20, "bytes_bf16": 10}},
    "mfu": 0.4123, "peak_memory_bytes": 3.1e9, "samples": 224,
}  # fmt: skip


def config(tmp_path, **metrics):
    tmp_path.mkdir(exist_ok=True)
    return TrainConfig(workdir=str(tmp_path), metrics=MetricsConfig(**metrics))


def write(tmp_path, steps, start, **options):
    recorder = Recorder(config(tmp_path), start, **options)
    for step in steps:
        recorder.write({"step": step, "loss": step + start / 100})
    recorder.close()
    return recorder.remarks


def test_a_folder_where_records_belong_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="metrics.jsonl: is a folder, and records need a file"):
        Recorder(config(tmp_path), 0)


def test_step_line():
    assert step_line(RECORD, 600, 3723.4) == (
        "step   7/600  loss 2.3457  grad 1.200  123,456 tok/s  66 ms  comm tp 14.3 MB (1.98x), dp 8.0 MB (0.50x)  "
        "mfu 41.2%  mem 3.1 GB  "
        "eta 1:02:03"
    )
    unknown = RECORD | {"loss": None, "mfu": None, "peak_memory_bytes": None, "comm": {}, "skipped": 1}
    assert step_line(unknown, 7, None) == (
        "step 7/7  loss n/a  grad 1.200  123,456 tok/s  66 ms  comm none  mfu n/a  mem n/a GB  eta n/a  "
        "SKIPPED: not finite, parameters unchanged"
    )


def test_duration():
    assert [duration(s) for s in (None, 0, 59.6, 3599, 3600)] == ["n/a", "0:00", "1:00", "59:59", "1:00:00"]


def test_bf16_peak():
    assert bf16_peak("NVIDIA H100 80GB HBM3") == bf16_peak("NVIDIA H200") == 989.4e12
    assert bf16_peak("NVIDIA H100 PCIe") == 756e12 and bf16_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert bf16_peak("cpu") is None and bf16_peak("NVIDIA GeForce RTX 4090") is None


def test_flops_per_token():
    """GPT-3 6.7B: 6 per parameter (without positions, with the tied head once), plus attention."""
    model = preset("gpt3_6p7b")
    weights = 32 * 12 * 4096**2 + 50_257 * 4096
    assert flops_per_token(model, 2048) == 6 * weights + 12 * 32 * 2048 * 4096
    small = ModelConfig(d_model=8, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=4, d_mlp=16, vocab_size=10)
    assert flops_per_token(small, 5) == 6 * (8 * 16 * 2 + 8 * 8 * 2 + 3 * 8 * 16 + 80) + 12 * 5 * 16
    # Two of three layers look back at 3 positions.
    of = dict(n_layers=3, sliding_window=3, attention_pattern="sfs")
    windows = dataclasses.replace(small, **of)
    assert flops_per_token(small, 5) * 3 - flops_per_token(windows, 5) == 6 * 2 * 80 + 12 * 16 * 4
    assert flops_per_token(windows, 2) == flops_per_token(dataclasses.replace(small, n_layers=3), 2)


def test_peak_memory():
    import jax

    assert peak_memory(jax.local_devices()) > 50e6

    class Gpu:
        platform = "gpu"

        def __init__(self, peak):
            self.peak = peak

        def memory_stats(self):
            return self.peak and {"peak_bytes_in_use": self.peak}

    assert peak_memory([Gpu(5), Gpu(7)]) == 7 and peak_memory([Gpu(None)]) is None


def test_records_are_strict_json(tmp_path):
    recorder = Recorder(config(tmp_path), 0)
    recorder.write({"step": 1, "loss": float("nan"), "sites": {"embed": {"snr_db": float("inf"), "clipped": 0.5}}})
    recorder.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "loss": null, "sites": {"embed": {"snr_db": null, "clipped": 0.5}}}\n'
    assert finite({"a": None, "b": True, "c": 3, "d": "x"}) == {"a": None, "b": True, "c": 3, "d": "x"}


def test_resumed_file_has_every_step_once(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5], 0)
    assert write(tmp_path, [4, 5, 6], 3) == []
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in records] == [1, 2, 3, 4.03, 5.03, 6.03]


def test_earlier_records_are_kept(tmp_path):
    write(tmp_path, [1, 2, 3], 0)
    assert "metrics.jsonl.aside-1" in write(tmp_path, [1], 0)[0]
    assert "metrics.jsonl.aside-2" in write(tmp_path, [2], 1, keep_later=True)[0]
    write(tmp_path, [], None)
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl.aside-1")] == [1, 2, 3]


def test_other_processes_write_nothing(tmp_path):
    assert write(tmp_path, [1, 2], 0, active=False) == [] and list(tmp_path.iterdir()) == []


def test_read_records(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "loss": 1}\n\n{"step": 1}\n{"step": 2, "loss": 3}\n{"step": 3, "lo')
    assert read_records(path) == [{"step": 1}, {"step": 2, "loss": 3}]
    path.write_text('{"step": 2}\n[]\n{"step": 3}\n')
    with pytest.raises(ConfigError, match="metrics.jsonl line 2: not a record of a step"):
        read_records(path)
    path.write_bytes(b'{"step": 2}\n{"step": "3"}\n\xff\n')
    with pytest.raises(ConfigError, match="line 2: not a record of a step .step '3'"):
        read_records(path)
    path.write_bytes(b'{"step": 2}\n\xff\n{"step": 3}\n')
    with pytest.raises(ConfigError, match="line 2: not a record of a step"):
        read_records(path)


@pytest.mark.parametrize("name, package", [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_missing_trackers(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"metrics.{name}=True: the package {package} is missing; pip install 'taco-jax"
    ):
        Recorder(config(tmp_path, **{name: True}), 0)


class Board:
    """The part of tensorboardX and of wandb that is used. seen: what they were told."""

    def __init__(self):
        self.seen, self.ids = [], iter("abc")

    def SummaryWriter(self, folder):
        self.seen.append(folder)
        add = lambda key, value, step: self.seen.append((key, value, step))
        return types.SimpleNamespace(add_scalar=add, close=lambda: self.seen.append("closed"))

    def init(self, *, name, id=None, resume=None, **_):
        run = id or next(self.ids)
        self.seen.append((name, run, resume))
        log = lambda values, step: self.seen.append((values, step))
        return types.SimpleNamespace(id=run, log=log, finish=lambda: self.seen.append("finished"))


@pytest.fixture
def board(monkeypatch):
    board = Board()
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    monkeypatch.setitem(sys.modules, "wandb", board)
    return board


def test_trackers_get_every_number(tmp_path, board):
    recorder = Recorder(config(tmp_path / "run", tensorboard=True, wandb=True), 0)
    recorder.write({"step": 3, "loss": 1.5, "mfu": None, "sites": {"embed/forward": {"snr_db": 30.0}}})
    recorder.close()
    numbers = {"step": 3, "loss": 1.5, "sites/embed/forward/snr_db": 30.0}
    scalars = [(k, v, 3) for k, v in numbers.items()]
    # Named as the workdir is.
    names = [str(tmp_path / "run" / "tensorboard" / "run"), ("run", "a", None)]
    assert board.seen == [*names, *scalars, (numbers, 3), "closed", "finished"]


def test_a_resumed_run_is_the_same_one_to_wandb(tmp_path, board):
    def start(step, **options):
        recorder = Recorder(config(tmp_path, wandb=True, tensorboard=True, run_name="mine"), step, **options)
        recorder.write({"step": (step or 0) + 1, "loss": 1.0})
        recorder.close()
        return next(entry for entry in board.seen[::-1] if len(entry) == 3 and entry[0] == "mine")

    assert start(0) == ("mine", "a", None) and board.seen[0] == str(tmp_path / "tensorboard" / "mine")
    assert start(1) == ("mine", "a", "allow") == start(None)
    # It takes no step twice, so a run that goes back is another one there, and the id of the first is kept.
    assert start(1, keep_later=True) == ("mine", "b", None)
    assert start(2) == ("mine", "b", "allow") and start(0) == ("mine", "c", None)
    assert (tmp_path / "wandb_run").read_text() == "c\n" and (tmp_path / "wandb_run.aside-2").read_text() == "b\n"
