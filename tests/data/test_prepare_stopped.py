"""Preparations with workers, and those that were stopped: none leaves anything half, and the same command goes on."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import REPOSITORY
from preparation import DOCUMENTS, command_line, write_lines, write_parquet
from text_corpus import sentences, tree

from taco_jax.config import ConfigError
from taco_jax.data.prepare import command, encoding, output
from taco_jax.data.prepare.command import prepare

pytest.importorskip("tokenizers")


def test_any_number_of_workers_leaves_the_same_bytes(config, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "BATCH_CHARS", 500)
    prepare(config)
    prepare(dataclasses.replace(config, out=str(tmp_path / "three"), workers=3))
    assert tree(tmp_path / "three") == tree(tmp_path / "out")


def test_a_worker_that_ends_is_one_line_and_the_same_command_goes_on(config, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "BATCH_CHARS", 500)
    monkeypatch.setattr(command, "CHECKPOINT_SECONDS", 0)
    prepare(dataclasses.replace(config, out=str(tmp_path / "whole")))
    real = encoding.Pool.submit

    def submit(pool, task):
        if real.count == 9:
            pool._processes[0].kill()
        real.count += 1
        return submit.real(pool, task)

    submit.real, real = real, type("Count", (), {"count": 0})
    monkeypatch.setattr(encoding.Pool, "submit", submit)
    with pytest.raises(ConfigError, match="a worker process ended by signal 9; .* the same command goes on"):
        prepare(dataclasses.replace(config, workers=2))
    assert not (tmp_path / "out/meta.json").exists()
    prepare(config)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "BATCH_CHARS", 500)
    monkeypatch.setattr(command, "CHECKPOINT_SECONDS", 0)
    prepare(dataclasses.replace(config, out=str(tmp_path / "whole")))
    with monkeypatch.context() as full:
        real, space = output._Shard.write, iter(range(30))

        def write(shard, ids):
            if next(space, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(shard, ids)

        full.setattr(output._Shard, "write", write)
        assert command_line(config, validation=0.1) == 2
    said = f"error: --out {config.out}: cannot be written (No space left on device); the same command goes on\n"
    assert capsys.readouterr().err == said
    prepare(config)
    assert "goes on behind" in capsys.readouterr().out and tree(tmp_path / "out") == tree(tmp_path / "whole")


def killed(folder, tokenizer, places):
    source = folder / "in"
    source.mkdir()
    shutil.copytree(tokenizer, folder / "tokenizer")
    write_lines(source / "a.jsonl", [*DOCUMENTS, *DOCUMENTS[:9]])
    (source / "b.txt").write_text(sentences(900, seed=99))
    write_lines(source / "c.jsonl.gz", [sentences(5, seed=i) for i in range(50, 90)])
    with (source / "a.jsonl").open("a") as file:
        file.write('{"text": broken\n')
    command = [sys.executable, REPOSITORY / "tests/support/killed_prepare.py", folder, str(places)]
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests/support")])
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=540
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_killed_at_ten_places_nothing_half_written_is_taken_for_whole(tmp_path, tokenizer):
    said = killed(tmp_path, tokenizer, 10)
    went_on = [int(part.split()[0]) for part in said.split("; ")[1:]]
    assert "11 places of" in said and len(went_on) == 2 and min(went_on) >= 1, said


@pytest.mark.slow
def test_killed_at_every_place(tmp_path, tokenizer):
    print(killed(tmp_path, tokenizer, 0))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_the_command_killed_ten_times_while_it_works(workers, tmp_path, tokenizer, run_python):
    """With no hook in it: SIGKILL to the program alone, whose workers end by themselves."""
    write_lines(tmp_path / "a.jsonl", [sentences(40, seed=i) for i in range(2000)])
    arguments = ["-m", "taco_jax.prepare", "a.jsonl", "--tokenizer", tokenizer, "--workers", str(workers)]
    run_python([*arguments, "--out", "whole"], devices=None)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    fast = "import runpy, sys; from taco_jax.data.prepare import command; command.CHECKPOINT_SECONDS = 0.05; " \
        "sys.argv = sys.argv[1:]; runpy.run_module('taco_jax.prepare', run_name='__main__')"  # fmt: skip
    goes_on = 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", fast, "prepare", *map(str, arguments[2:]), "--out", "killed"],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        state = tmp_path / "killed/.progress/state.json"
        before = state.read_bytes() if state.exists() else b""
        while process.poll() is None and (not state.exists() or state.read_bytes() == before):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        said = process.communicate(timeout=60)[0]
        goes_on += "goes on behind" in said
        assert (tmp_path / "killed/meta.json").exists() == (process.returncode == 0)
    assert goes_on >= 5
    run_python([*arguments, "--out", "killed"], devices=None)
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path, tokenizer, run_python):
    program = (
        "import sys; from taco_jax.config import cli; from taco_jax.data.prepare.command import main\n"
        "assert cli.run(main) == 0\n"
        "print([int(line.split()[1]) >> 10 for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )
    text, peaks = sentences(2000), {}
    for kind in ("txt", "jsonl", "parquet"):
        for times in (30, 300):
            path = tmp_path / f"{times}.{kind}"
            documents = [text[i * 97 % 50_000 :][:2000] for i in range(times * 60)]
            if kind == "txt":
                path.write_text(text * times)
            elif kind == "jsonl":
                write_lines(path, documents)
            else:
                write_parquet(path, documents, group=1 << 30)
            flags = ["--out", f"{kind}{times}", "--tokenizer", tokenizer, "--workers", "1", "--drop-duplicates"]
            said = run_python(["-c", program, path, *flags], devices=None).stdout
            peaks[kind, times] = json.loads(said.splitlines()[-1])[0]
            path.unlink()
    print(peaks, "MiB")
    assert all(peaks[kind, 300] < peaks[kind, 30] + 100 for kind in ("txt", "jsonl", "parquet")), peaks


def test_a_whole_folder_stays_as_it_is(config, tmp_path, capsys):
    prepare(config)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert command_line(config, validation=0.1) == 0
    assert "is whole already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
