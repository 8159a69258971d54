"""Ends `prepare` by SIGKILL at places of its work, and looks at what it leaves: `killed_prepare.py FOLDER PLACES`.

A place is one before an act on the output folder: a file that is opened, renamed or removed there, a write, or a file
that is brought to the disk. PLACES of them are tried, spread over the run, or all with 0. In each the folder must not
look whole, unless it is, and no file in it may look like a token file that is not; the same command must then leave
the bytes of a run that was not killed. Every third rerun is killed once more.

Processes are forked, not started, so that a hundred of them take seconds.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import text_corpus

from taco_jax.config import cli
from taco_jax.data.prepare import command, output, text_files
from taco_jax.data.prepare.command import PrepareConfig, prepare


def set_up(folder: Path) -> PrepareConfig:
    """Several files, shards, windows, duplicates and a broken line, in some hundred acts."""
    command.BATCH_CHARS, command.WINDOW_CHARS = 3000, 4000
    command.OVERLAP_CHARS, text_files.WHOLE_TEXT_BYTES = 400, 12_000
    # A clock that goes with the work: a checkpoint every few batches.
    command.time.monotonic = itertools.count().__next__
    command.CHECKPOINT_SECONDS = 6
    cli.say = lambda *_: None
    return PrepareConfig(
        sources=(str(folder / "in"),), out="", tokenizer=str(folder / "tokenizer"), validation=0.2, workers=1,
        drop_duplicates=True, skip_bad=1, shard_tokens=6000,
    )  # fmt: skip


def act(out: Path, kill_at: int | None) -> dict[str, int]:
    """Counts the acts of this process on `out`, which is killed before act number `kill_at`. Returns the count."""
    state = {"acts": 0}

    def count() -> None:
        if state["acts"] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        state["acts"] += 1

    def hook(event: str, args: tuple) -> None:
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            path = args[0]
            # Files of an open folder, as rmtree removes them, come by their names alone.
            if isinstance(path, str | bytes | os.PathLike):
                path = os.fspath(path) if isinstance(path, str | os.PathLike) else os.fsdecode(path)
                if path.startswith(str(out)) or event in ("os.remove", "os.rmdir"):
                    count()

    sys.addaudithook(hook)
    for place, name in ((os, "fsync"), (output._Shard, "write")):
        real = getattr(place, name)
        setattr(place, name, lambda *args, real=real: (count(), real(*args))[1])
    return state


def run(config: PrepareConfig, out: Path, kill_at: int | None = None) -> tuple[int, int]:
    """Runs in a process of its own. Returns (its signal or exit code, acts)."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.close(reader)
            state = act(out, kill_at)
            prepare(command.dataclasses.replace(config, out=str(out)))
            os.write(writer, str(state["acts"]).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        acts = int(file.read() or -1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return status, acts


def main(folder: Path, places: int) -> None:
    config = set_up(folder)
    whole = folder / "whole"
    code, acts = run(config, whole)
    assert code == 0, code
    reference = text_corpus.tree(whole)
    numbers = range(acts) if not places else sorted({acts * i // places for i in range(places)} | {acts - 1})
    went_on = inside = 0
    for i, number in enumerate(numbers):
        out = folder / f"killed_at_{number}"
        assert run(config, out, number)[0] == -signal.SIGKILL, number
        if i % 3 == 0:
            run(config, out, max(number // 2, 3))
        left = text_corpus.tree(out) if out.exists() else {}
        if "meta.json" in left:
            assert {name: left[name] for name in reference} == reference, f"whole too early: {number}"
        for name, data in left.items():
            assert "/" in name or not name.endswith(".bin") or data == reference[name], f"{number}: {name} is half"
        if state := left.get(".progress/state.json"):
            position = json.loads(state)["position"]
            went_on += position["file"] > 0
            inside += position["window"] >= 0
        code, again = run(config, out)
        assert code == 0, f"{number}: the rerun ended with {code}"
        assert text_corpus.tree(out) == reference, f"{number}: other bytes"
    print(f"{len(numbers)} places of {acts}; {went_on} reruns went on behind the first file; {inside} within a text")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
