"""The trainer: `python -m taco_jax.train --config experiments/quickstart.py [--mesh.tp 4 ...]`.

One optimiser step is one call of a jitted program (`taco_jax.train.step`); this file brings it data and takes away its
metrics. It reads the metrics of a step while the next one runs, so the devices never wait for the host.
`taco_jax.train.resume` has where a run begins, `step_record` what is kept of a step, `run_lines` what is printed around
the loop.

With several processes (`taco_jax.launch.distributed`) each does all of this in step with the others: it feeds its
own rows of every batch and writes its own part of every checkpoint; the first one alone prints, and writes the other
files.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from taco_jax import data
from taco_jax.config import ConfigError, TrainConfig, chains, cli, overlap
from taco_jax.config.checks import check
from taco_jax.config.derived import with_codecs
from taco_jax.config.stored import own_codecs
from taco_jax.launch import distributed
from taco_jax.launch.preemption import StopRequests
from taco_jax.nn.vocab_parallel import pad_vocab
from taco_jax.train import base, init_from, model_files, resume
from taco_jax.train.checkpoint import Checkpoints, SaveError
from taco_jax.train.log_file import check_log_file, log_to, say
from taco_jax.train.metrics import Recorder, step_line
from taco_jax.train.profile import Profile
from taco_jax.train.run_lines import first_lines, last_lines
from taco_jax.train.step_record import StepRecords
from taco_jax.train.workdir import CHECKPOINTS, locked, open_workdir


class TrainingError(RuntimeError):
    """The run cannot go on; what was saved is good. Exit code 1."""


def main(args: Sequence[str]) -> int:
    config = check(_keeping_codecs(init_from.with_model(cli.parse(args), cli.given(args))))
    in_order = chains(config)[0] > 1 or overlap(config)[0]
    cli.select_devices(config.devices, deterministic=config.deterministic, in_order=in_order)
    return distributed.run(config, _work)


def _keeping_codecs(config: TrainConfig) -> TrainConfig:
    """The config with its codecs named: where it says auto, a run that goes on keeps those that it has."""
    return with_codecs(config, own_codecs(config.workdir))


def _work(config: TrainConfig) -> int:
    try:
        train(config)
    except (TrainingError, SaveError) as error:
        cli.say(f"error: {error}", sys.stderr)
        return 1
    return 0


def train(config: TrainConfig) -> dict[str, Any] | None:
    """Runs or resumes the training that `config` describes, up to `steps` or `stop_after`.

    SIGTERM and SIGUSR1 stop it after the step that is under way, with a checkpoint, as `stop_after` would.

    Returns the last record (its keys: `taco_jax.train.metrics`); None for a dry run.

    Raises:
      ConfigError: the settings, the data or the workdir cannot be used.
      TrainingError: too many steps in a row were not finite, or the records cannot be written.
      SaveError: a checkpoint cannot be written.
    """
    # Imported here: errors in the settings then come before the seconds that these imports take.
    from taco_jax.mesh import make_mesh
    from taco_jax.train import dry_run

    config = config if config.init_from is None else init_from.with_model(config)
    config = check(_keeping_codecs(config))
    cli.devices(config.devices)
    try:
        mesh = make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.dry_run:
        say(dry_run.report(config, mesh))
        return None
    with StopRequests() as requests:
        return _train(config, mesh, requests)


def _train(config: TrainConfig, mesh, requests: StopRequests) -> dict[str, Any]:
    from taco_jax.train import dry_run
    from taco_jax.train.step import build

    train_tokens, validation_tokens = data.open_data(config.data, config.model.vocab_size)
    batches = data.batches(config, train_tokens)
    data.evaluation_batches(config, validation_tokens)  # raises now what it would raise after hours
    program = build(config, mesh)
    dry_run.trace(program)  # raises what compiling it would, and is not done again
    check_log_file(config.log_file, config.workdir)
    with ExitStack() as stack:

        def enter() -> list[str]:
            remarks = [f"changed since this workdir's first run: {remark}" for remark in open_workdir(config)]
            # The first process holds it for all: where that one dies, all end.
            return remarks + (stack.enter_context(locked(config.workdir)) if jax.process_index() == 0 else [])

        # Nothing is written before this line: settings that cannot work leave no folder behind.
        remarks = distributed.first_alone(enter, config.workdir)
        if jax.process_index() == 0:
            stack.enter_context(log_to(config.log_file))
        for remark in remarks:
            say(remark)
        with Checkpoints(Path(config.workdir) / CHECKPOINTS, config.checkpoint) as checkpoints:
            run = Run(config, program, checkpoints, batches, validation_tokens=validation_tokens, requests=requests)
            try:
                run.begin()
                run.announce(mesh, len(train_tokens), len(validation_tokens))
                run.loop()
                record = run.summary()
            finally:
                run.close()
        if jax.process_index() == 0:
            for line in last_lines(config, record, first_step=run.first - 1, stopped_by=run.stopped_by):
                say(line)
    return record


class Run:
    """The state of a run between its steps: the program's state, the position of the data, and the clock."""

    def __init__(
        self,
        config,
        program,
        checkpoints: Checkpoints,
        batches: data.Batches,
        validation_tokens,
        requests: StopRequests,
    ):
        self.config, self.program, self.checkpoints, self.batches = config, program, checkpoints, batches
        self.requests, self.stopped_by = requests, None
        self.validation_tokens = validation_tokens
        self.stop = min(config.steps, config.stop_after or config.steps)
        self.step, self.first = 0, 1
        self.state: Any = None
        self.start: init_from.Start | None = None
        self.lineage: dict[str, Any] | None = None  # where the first weights are from, as checkpoints' records have it
        self.base_digest: int | None = None  # of the weights to which adapters belong
        self.guard: Any = None  # a `guarded.GuardedPrograms`
        self.recorder: Recorder | None = None
        self.record: dict[str, Any] = {}
        self.owed = False
        self.profile = Profile(config.profile, config.workdir, say)
        self.records = StepRecords(config, program)
        # Notes when a step's metrics are there: this thread may come later, when the next step is done too.
        self.watch = ThreadPoolExecutor(1)

    def begin(self) -> None:
        """Restores the checkpoint that the config asks for, else makes the first state."""
        config = self.config
        beginning = resume.begin(config, self.program, self.checkpoints, self.batches, stop=self.stop)
        self.state, self.step, self.start = beginning.state, beginning.step, beginning.start
        self.lineage, self.base_digest = beginning.lineage, beginning.base_digest
        remarks = beginning.remarks + self._begin_guard(beginning.guard)
        if jax.process_index() == 0:
            remarks += model_files.keep(config, self.start)
        # A finished run keeps its records: nothing is going to make them again.
        self.recorder = Recorder(
            config,
            self.step if self.step < self.stop else None,
            keep_later=beginning.keeps_later,
            active=jax.process_index() == 0,
        )
        for remark in remarks + self.recorder.remarks:
            say(remark)

    def _begin_guard(self, state: dict[str, Any] | None) -> list[str]:
        """Puts a guard in place, and the codecs that a checkpoint's guard had moved sites to. Returns remarks."""
        from taco_jax.train.guarded import GuardedPrograms, mode_and_bounds

        if state is None and mode_and_bounds(self.config)[0] == "off":
            return []
        guard = GuardedPrograms(self.config, self.program, self.step, state)
        remarks = guard.guard.remarks
        if guard.guard.mode == "off":
            return remarks
        if not guard.guard.ways:
            return [*remarks, f"compression.guard={guard.guard.mode}: nothing is compressed, so nothing is watched"]
        self.guard, self.program = guard, guard.program
        return remarks

    def announce(self, mesh, train_tokens: int, validation_tokens: int) -> None:
        read = f"{self.batches.describe()}: {train_tokens:,} training and {validation_tokens:,} validation tokens"
        for line in first_lines(self.config, self.program, self.guard, mesh=mesh, data=read):
            say(line)
        if self.step >= self.stop:
            say(f"already at step {self.step} of {self.stop}; nothing to train")
        else:
            self.profile.plan(self.step + 1, self.stop)
            say("compiling")
        self.records.count(self.program.table)

    def loop(self) -> None:
        config = self.config
        if self.step < self.stop:
            start = time.perf_counter()
            self.program.step  # noqa: B018 (the property compiles)
            if config.metrics.snr_every or self.guard is not None:
                self.program.step_with_stats  # noqa: B018
            self.requests.prepare(self.program.mesh)
            say(f"compiled in {time.perf_counter() - start:.0f} s")
            if self.start is not None and (reached := self.validate()):
                say(
                    f"step 0: validation loss {reached['validation_loss']:.4f}, perplexity "
                    f"{reached['validation_perplexity']:.2f}, before the first step"
                )
        self.first = self.step + 1
        pending: tuple[int, int, Any, Future] | None = None
        while self.step < self.stop and not self.stopped_by:
            self.step += 1
            batch = data.device_batch({"tokens": next(self.batches)}, self.program.batch_sharding)
            measured = bool(config.metrics.snr_every) and self.step % config.metrics.snr_every == 0
            if self.guard is not None:
                measured = self.guard.due(self.step)
            advance = self.program.step_with_stats if measured else self.program.step
            if not self.records.running:
                self._restart_clock(self.step - 1)
            stop_request = self.requests.ask()
            with self.profile.step(self.step, pending and pending[2]):
                self.state, out = advance(self.state, batch)
            if pending:
                self.finish(*pending)
            pending = (self.step, self.batches.samples, out, self.watch.submit(_when_done, out))
            traced = self.profile.after(self.step, out)
            last = self.step == self.stop
            self.stopped_by = None if last else stop_request()
            # Who asks to stop may not wait for a validation.
            validate = last or (self.step % config.evaluation.every == 0 and not self.stopped_by)
            save = last or self.step % config.checkpoint.every == 0 or self.stopped_by or self.owed
            if validate or save or traced or (measured and self.guard is not None):
                self.finish(*pending, validate=validate, save=save, batch=batch)
                pending = None
                self._restart_clock(self.step)

    def _restart_clock(self, step: int) -> None:
        """The next step begins now, after `step`."""
        now = self.records.restart(step)
        if self.guard is not None:
            self.guard.restart(step, now)

    def finish(
        self,
        step: int,
        samples: int,
        out: Any,
        done: Future,
        *,
        validate: bool = False,
        save: bool = False,
        batch: Any = None,
    ) -> None:
        """Waits for the metrics of `step`, and prints and records them if it is their turn.

        done: the time at which they were there.
        save: before validating, which may take longer than a scheduler waits. A run that has to stop does neither. A
          step that was skipped is not saved, but where the run ends with it: the next finite one is in its place.
        batch: what the step was given, where it is the latest one; the guard may then change what the next one sends.
        """
        values = dict(jax.device_get(out))
        in_a_row = int(values.pop("skipped_in_a_row"))
        hopeless = in_a_row >= self.config.max_skipped_in_a_row
        turn = step == self.first or step % self.config.metrics.every == 0
        write = turn or validate or self.stopped_by or values["skipped"] or "stats" in values
        if write:
            self.record = self.records.record(self.config, step, values, samples=samples, now=done.result())
        said = self._guard(step, values, done.result(), batch)
        if save and not hopeless:
            ends = step == self.stop or self.stopped_by
            self.owed = bool(in_a_row and not ends)
            if not self.owed:
                self.save(in_place_of_older=not in_a_row)
        if write:
            if validate and not hopeless:
                self.record |= self.validate()
            self._write_record()
            seconds = self.records.seconds_per_step
            left = seconds and seconds * (self.stop - step)
            say(step_line(self.record, self.config.steps, left))
        if said:
            say(said)
        # The run's last validation is among its last lines.
        if validate and step < self.stop and "validation_loss" in self.record:
            say(
                f"step {step}: validation loss {self.record['validation_loss']:.4f}, "
                f"perplexity {self.record['validation_perplexity']:.2f}"
            )
        if hopeless:
            raise TrainingError(
                f"step {step}: loss or gradient not finite for {in_a_row} steps in a row (max_skipped_in_a_row="
                f"{self.config.max_skipped_in_a_row}), and nothing was saved in them. {self._way_back()} Try a lower "
                f"optimizer.learning_rate or compression.backward none"
            )

    def _guard(self, step: int, values: dict[str, Any], now: float, batch: Any) -> str | None:
        """Has the guard decide where a step was measured. Returns its line; the record then has its events."""
        if self.guard is None:
            return None
        from taco_jax.train import guarded

        measured = "stats" in values
        self.guard.timed(step, now, measured=measured)
        if not measured or batch is None:
            return None
        stats = {} if values["skipped"] else values["stats"]  # what is not finite says nothing of codecs
        events, seconds = self.guard.measured(step, stats, self.state, batch), None
        if not events:
            return None
        changes = any(event.kind != "warn" for event in events)
        # A run that ends here leaves it to the next one, which finds the codecs in the checkpoint.
        if changes and step < self.stop and not self.stopped_by:
            self.state, seconds = self.guard.change(events, self.state)
            self.program = self.guard.program
            self.records.count(self.program.table)
        self.record["guard"] = [guarded.record(step, event, seconds) for event in events]
        return guarded.line(step, events, self.guard.guard.patience, seconds)

    def _write_record(self) -> None:
        """Writes the record; where the disk does not take it, saves the latest state and ends the run."""
        try:
            self.recorder.write(self.record)
        except OSError as error:
            # Of a step that may have been skipped: nothing goes for it.
            self.save(in_place_of_older=False)
            raise TrainingError(
                f"{self.recorder.path}: cannot be written ({error.strerror}); stopped after step {self.step}; with "
                f"more room the same command goes on"
            ) from error

    def _way_back(self) -> str:
        """Returns which checkpoints a run that diverged can go on from."""
        present = self.checkpoints.steps()
        if not present:
            return "There is no checkpoint to go on from."
        # The last of them may have been saved when the run had diverged already, its loss still finite.
        return f"Go on from before it diverged with --checkpoint.resume-step; present: {', '.join(map(str, present))}."

    def validate(self) -> dict[str, float]:
        """Mean loss per token of the validation batches, and its exponential; {} where validation is switched off."""
        total = count = 0.0
        running = None
        for batch in data.evaluation_batches(self.config, self.validation_tokens):
            result = self.program.eval_step(self.state, data.device_batch(batch, self.program.batch_sharding))
            if running is not None:
                nll, n = jax.device_get(running)
                total, count = total + float(nll), count + float(n)
            running = result
        if running is None:
            return {}
        nll, n = jax.device_get(running)
        loss = (total + float(nll)) / (count + float(n))
        return {"validation_loss": loss, "validation_perplexity": math.exp(min(loss, 700.0))}

    def save(self, in_place_of_older: bool = True) -> None:
        state = self.program.stored.pack(self.state)
        run = {"data": self.batches.state(), "seed": self.config.seed}
        run |= {} if self.lineage is None else {"started_from": self.lineage}
        # So that the same command goes on without the plan's file (`taco_jax.config.flags`).
        run |= {} if self.config.compression.planned is None else {"plan": self.config.compression.plan}
        run |= {} if self.base_digest is None else {base.DIGEST: self.base_digest}
        run |= {} if self.guard is None else {"guard": self.guard.state()}
        size = self.config.model.vocab_size
        vocabulary = (size, pad_vocab(size, self.config.mesh.tp))
        self.checkpoints.save(self.step, state, run, vocabulary=vocabulary, in_place_of_older=in_place_of_older)

    def summary(self) -> dict[str, Any]:
        """The last record; of a run that had nothing left to do, its validation alone."""
        if not self.record:
            self.record = {"step": self.step, **self.records.sent}
            self.record |= self.validate()
        return self.record

    def close(self) -> None:
        self.profile.close()
        self.watch.shutdown(wait=False)
        if self.recorder is not None:
            self.recorder.close()


def _when_done(out: Any) -> float:
    jax.block_until_ready(out)
    return time.perf_counter()
