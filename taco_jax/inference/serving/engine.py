"""Continuous batching: one thread owns the devices, and requests enter and leave its batch between two steps.

    engine = Engine(programs, waiting=64)
    engine.start()
    engine.submit([job])        # from any thread; QueueFull, Stopped
    engine.cancel(job)          # its row is free for the next job at once

All waiting jobs that find a free row enter before the next step. A program is started before the host reads the tokens
of the one before it, so a job that has ended may still be in one more step, whose token is dropped: whose a program's
rows were is noted when it starts. Programs run in the order in which they are started, so a row can be given away
while such a step is under way.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from taco_jax.config import cli
from taco_jax.inference.compiled import bucket
from taco_jax.inference.logprobs import Scores
from taco_jax.inference.sampling import NOT_FINITE
from taco_jax.inference.serving.batch_programs import RowPrograms
from taco_jax.inference.serving.engine_types import Event, Job


class QueueFull(Exception):
    """No room for these jobs now."""


class Stopped(Exception):
    """The engine takes no jobs any more; the message says why."""


class Counts(NamedTuple):
    """rows of the batch, how many are busy, jobs that wait for one, jobs ever taken."""

    rows: int
    busy: int
    waiting: int
    taken: int


class _Started(NamedTuple):
    """A program that was started: the tokens that it will have chosen, and whose they are.

    scores: of the tokens, for all rows of the batch or, `prompt` beside them, for one.
    """

    tokens: jax.Array
    rows: list[tuple[int, Job]]
    scores: Scores | None = None
    prompt: Scores | None = None


class Engine:
    """See the top of this file. waiting: how many jobs may wait while all rows are busy."""

    def __init__(self, programs: RowPrograms, waiting: int):
        self._programs, self._room = programs, programs.batch + waiting
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._rows: list[Job | None] = [None] * programs.batch
        self._taken = 0
        self._reason: str | None = None  # why no job is taken any more
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._live: tuple[tuple[bool, ...], jax.Array] | None = None  # the last mask, and the same on the devices
        self._state, self._cache = programs.empty()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; jobs that are not done fail."""
        self._fail("the server has stopped")
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    @property
    def failure(self) -> str | None:
        """Why the engine takes no jobs; None while it does."""
        return self._reason

    def counts(self) -> Counts:
        with self._changed:
            return Counts(len(self._rows), sum(map(bool, self._rows)), len(self._waiting), self._taken)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes all of the jobs, in order, or none.

        Raises:
          QueueFull: not all of them find a row or a place to wait.
          Stopped: the engine has failed or was stopped.
        """
        with self._changed:
            if self._reason:
                raise Stopped(self._reason)
            if len(self._waiting) + sum(map(bool, self._rows)) + len(jobs) > self._room:
                raise QueueFull
            self._waiting.extend(jobs)
            self._taken += len(jobs)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nothing more is put for the job; a second time, or after its end, nothing happens."""
        with self._changed:
            if not job.done:
                self._drop(job)
                if job in self._waiting:
                    self._waiting.remove(job)

    def prepare(self, lengths: Sequence[int], top: int, *, whole: bool, steps: bool) -> None:
        """`RowPrograms.prepare` for prompts of these lengths, in a thread that is not the engine's."""
        for length in lengths:
            self._programs.prepare(length, top, whole=whole, steps=steps)

    def _run(self) -> None:
        started: deque[_Started] = deque()
        try:
            while self._wait(idle=not started):
                for row, job in self._admit():
                    started.append(self._insert(row, job))
                rows = [(row, job) for row, job in self._busy() if job.started < job.max_tokens]
                if rows:
                    started.append(self._step(rows))
                while len(started) > bool(rows):
                    self._read(started.popleft())
        except Exception as error:  # of the devices, mostly: what is in the cache is lost
            reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
            cli.say(f"error: the engine has stopped: {reason}", sys.stderr)
            self._fail(f"the engine has stopped ({reason})")

    def _wait(self, *, idle: bool) -> bool:
        """Until there is something to do; False when the engine was stopped."""
        with self._changed:
            while idle and not (self._reason or self._waiting or any(self._rows)):
                self._changed.wait()
            return self._reason is None

    def _admit(self) -> list[tuple[int, Job]]:
        with self._changed:
            admitted = []
            for row, job in enumerate(self._rows):
                if job is None and self._waiting:
                    self._rows[row] = self._waiting.popleft()
                    admitted.append((row, self._rows[row]))
            return admitted

    def _busy(self) -> list[tuple[int, Job]]:
        with self._changed:
            return [(row, job) for row, job in enumerate(self._rows) if job is not None]

    def _insert(self, row: int, job: Job) -> _Started:
        programs = self._programs
        tokens_1L = np.zeros((1, bucket(len(job.prompt), programs.longest)), np.int32)
        tokens_1L[0, : len(job.prompt)] = job.prompt
        where = np.array([len(job.prompt), row], np.int32)
        arguments = programs.put((tokens_1L, where, job.row()))
        insert = programs.insert(tokens_1L.shape[1], top=job.top, whole=job.whole)
        self._state, self._cache, scores = insert(programs.params, self._state, self._cache, *arguments)
        job.started += 1
        return _Started(self._state.tokens, [(row, job)], *scores)

    def _step(self, rows: list[tuple[int, Job]]) -> _Started:
        programs, mask = self._programs, [False] * len(self._rows)
        for row, job in rows:
            mask[row] = True
            job.started += 1
        if self._live is None or self._live[0] != tuple(mask):
            self._live = tuple(mask), programs.put(np.array(mask))
        top = max(job.top for _, job in rows)
        step = programs.step(greedy=all(job.temperature == 0 for _, job in rows), top=top)
        self._state, self._cache, scores = step(programs.params, self._state, self._cache, self._live[1])
        return _Started(self._state.tokens, rows, scores)

    def _read(self, started: _Started) -> None:
        """Waits for a program and hands out its tokens."""
        tokens = np.asarray(started.tokens).tolist()
        scores, prompt = jax.device_get((started.scores, started.prompt))
        for row, job in started.rows:
            event = _event(job, tokens[row], _of_row(scores, row) if job.top else None, prompt)
            with self._changed:
                if job.done:
                    continue
                job.received += 1
                end = event.end or ("length" if job.received == job.max_tokens else None)
                if end:
                    self._drop(job)
            job.put(event._replace(end=end))

    def _drop(self, job: Job) -> None:
        job.done = True
        if job in self._rows:
            self._rows[self._rows.index(job)] = None

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._reason = self._reason or reason
            jobs = [*filter(None, self._rows), *self._waiting]
            for job in jobs:
                self._drop(job)
            self._waiting.clear()
            self._changed.notify()
        for job in jobs:
            job.put(Event(None, "failed"))


def _of_row(scores: Scores, row: int) -> Scores:
    """Scores of one row, of a program for all rows or for one."""
    at = min(row, len(scores.chosen) - 1)
    return Scores(*(a[at : at + 1] for a in scores))


def _event(job: Job, token: int, scores: Scores | None, prompt: Scores | None) -> Event:
    """The event of a job's token, but for its end by length. prompt: scores of all positions of a padded prompt."""
    if prompt is not None:
        prompt = Scores(*(a[: len(job.prompt) - 1] for a in prompt))
    if token == NOT_FINITE or (prompt is not None and np.isnan(prompt.best).any()):
        return Event(None, "not finite")
    if not job.max_tokens:
        return Event(None, "length", None, prompt)
    return Event(token, "eos" if token in job.eos else None, scores, prompt)
