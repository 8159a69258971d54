"""Training runs that follow each other in one process: what one of them compiles serves the others.

A run of some minutes spends a third of its time on starting and compiling when it has a process of its own. Here the
runs of all seeds share the programs of their row, and threads compile the next row's beside the run that is under way.
The runs themselves are those of `python -m taco_jax.train`: the same class takes the same steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taco_jax import data
from taco_jax.config import TrainConfig
from taco_jax.launch.preemption import StopRequests
from taco_jax.train import dry_run
from taco_jax.train.checkpoint import Checkpoints
from taco_jax.train.loop import Run
from taco_jax.train.metrics import read_records
from taco_jax.train.step import Program, build
from taco_jax.train.workdir import CHECKPOINTS, METRICS, open_workdir


class Programs:
    """The compiled programs of named configurations, each made once, in threads, in the order of the first request.

    Tracing is done by one thread at a time, inside `tracing(name)`: it may change what is traced. Compiling is not.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        config_of: Callable[[str], TrainConfig],
        tracing: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext(),
        threads: int = 4,
    ):
        self.mesh, self._config_of, self._tracing = mesh, config_of, tracing
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads)
        self._built: dict[str, Program] = {}
        self._choices: dict[str, dict] = {}
        self._futures: dict[tuple[str, str], Future] = {}

    def prepare(self, name: str, *, to_train: bool) -> None:
        """Starts compiling what a run of `name` needs, or only what evaluates with it."""
        for part in ("step", "step_with_stats", "eval_step") if to_train else ("eval_step",):
            if (name, part) not in self._futures:
                self._futures[name, part] = self._threads.submit(self._compile, name, part)

    def get(self, name: str, *, to_train: bool) -> Program:
        """The program, when those parts are compiled. Raises what compiling them raised."""
        self.prepare(name, to_train=to_train)
        for (other, part), future in list(self._futures.items()):
            if other == name and (to_train or part == "eval_step"):
                future.result()
        return self._built[name]

    def choices(self, name: str) -> dict[str, list[str]]:
        """Returns what runs the codecs of a program that can train: {"taco encode": ["nvlink"], ...}."""
        return self._choices.get(name, {})

    def wait(self) -> None:
        """Waits until nothing is being compiled."""
        wait(self._futures.values())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, name: str, part: str) -> None:
        with self._lock, self._tracing(name):
            if name not in self._built:
                self._built[name] = build(self._config_of(name), self.mesh)
            program = self._built[name]
            if part == "step":
                found = dry_run.trace(program)
                self._choices[name] = {f"{codec} {what}": [n for n, _ in ways] for (codec, what), ways in found.items()}
            elif part == "step_with_stats" and _measures(program):
                program.lowered_with_stats  # noqa: B018 (the property traces)
            elif part == "eval_step":
                lowered = program.eval_step.lower(program.state_shapes, _evaluation_shapes(program))
        if part == "eval_step":
            program.eval_step = lowered.compile()
        elif part == "step":
            compiled = program.step
            if not program.state_shapes.scales:  # no site is compressed, so there is nothing to measure
                program.step_with_stats = compiled
        elif _measures(program):
            program.step_with_stats  # noqa: B018 (the property compiles)


def _measures(program: Program) -> bool:
    return bool(program.config.metrics.snr_every and program.state_shapes.scales)


def _evaluation_shapes(program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    tokens = program.batch_shapes["tokens"]
    weights = jax.ShapeDtypeStruct(
        (tokens.shape[0], tokens.shape[1] - 1), jnp.float32, sharding=program.batch_sharding
    )  # fmt: skip
    return {"tokens": tokens, "weights": weights}


def train(
    seed: int,
    parts: Sequence[tuple[Program, int]],
    evaluate_with: Mapping[str, Callable[[], Program]] | None = None,
) -> list[dict[str, Any]]:
    """One run from its first step to its last: its records, as `metrics.jsonl` has them.

    Args:
      seed: of the parameters and of the order of the data. Everything else is as the programs' configurations say,
        but the workdir, a folder that is gone afterwards.
      parts: programs, each with the last of the steps that it takes; the last one's is the configured steps.
      evaluate_with: {name: function that returns a program}; the last record gets "evaluated", {name: the validation
        loss of the run's last parameters in that program, its site scales uncalibrated}, without those that fail.

    Raises RuntimeError where the run was stopped or came to no validation loss, and as the trainer does.
    """
    with tempfile.TemporaryDirectory() as folder, StopRequests() as requests:
        own = {"seed": seed, "workdir": str(Path(folder) / "run")}
        config = dataclasses.replace(parts[0][0].config, **own)
        open_workdir(config)
        training, validation = data.open_data(config.data, config.model.vocab_size)
        with Checkpoints(Path(config.workdir) / CHECKPOINTS, config.checkpoint) as checkpoints:
            batches = data.batches(config, training)
            run = Run(config, parts[0][0], checkpoints, batches, validation, requests)
            try:
                run.begin()
                for program, last in parts:
                    _hand_over(run, program)
                    run.config = dataclasses.replace(program.config, **own)
                    run.announce(program.mesh, len(training), len(validation))
                    run.stop = last
                    run.loop()
                    if run.stopped_by:
                        raise RuntimeError(f"stopped at step {run.step} by {run.stopped_by}: not kept")
                records = read_records(Path(config.workdir) / METRICS)
                if "validation_loss" not in records[-1] or not np.isfinite(records[-1]["validation_loss"] or np.nan):
                    raise RuntimeError(f"no validation loss at its last step, {records[-1]['step']}: not kept")
                if evaluate_with:
                    records[-1]["evaluated"] = _evaluate(run, evaluate_with)
            finally:
                run.close()
    return records


def _hand_over(run: Run, program: Program) -> None:
    """The run goes on with another program: site scales are those of a new one, everything else stays."""
    if program is not run.program:
        run.program = program
        run.state = dataclasses.replace(run.state, scales=program.init_scales())


def _evaluate(run: Run, programs: Mapping[str, Callable[[], Program]]) -> dict[str, float]:
    losses = {}
    for name, program in programs.items():
        try:
            _hand_over(run, program())
            losses[name] = run.validate()["validation_loss"]
        except Exception as error:  # the run itself is good
            print(f"not evaluated in {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return losses
