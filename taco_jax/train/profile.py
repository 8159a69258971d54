"""`--profile START:STOP`: a trace of these steps, both included, in WORKDIR/profile, which xprof and TensorBoard open.

    xprof --logdir runs/train/profile

Every process records what it and its devices do. The traces of one run of several processes are one session, with a
file for each process. An earlier session of the same steps is set aside.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from taco_jax.config.rules import first_and_last
from taco_jax.train.workdir import PROFILE, set_aside


class Profile:
    """The trace of a run's steps `text`, "START:STOP"; of none where that is None."""

    def __init__(self, text: str | None, workdir: str | Path, say: Callable[[str], None]):
        """say: takes lines about what was recorded, and why not."""
        self.first, self.last = first_and_last(text) if text else (0, 0)
        self._say = say
        self._folder = Path(workdir) / PROFILE
        # The profiler names its session by the second, and its files by the host: processes would overwrite each other.
        self._own = self._folder / f".process-{jax.process_index()}"
        self._running, self._from, self._to = False, 0, 0

    def plan(self, first: int, last: int) -> None:
        """Says so if a run of steps first to last has none of those to trace."""
        if self.last and not (self.first <= last and self.last >= first):
            self._say(f"profile {self.first}:{self.last}: no trace, this run has the steps {first} to {last}")

    @contextlib.contextmanager
    def step(self, number: int, before: Any) -> Iterator[None]:
        """Around the start of a step. before: outputs of the step before, which ends before the trace begins."""
        if self.first <= number <= self.last and not self._running:
            jax.block_until_ready(before)
            self._start(number)
        if not self._running:
            yield
            return
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        self._to = number

    def after(self, number: int, out: Any) -> bool:
        """After the start of a step with these outputs: the last one of the trace ends before the trace does.

        Returns whether it has ended, which took time that is no step's.
        """
        if not self._running or number < self.last:
            return False
        jax.block_until_ready(out)
        self.close()
        return True

    def close(self) -> None:
        """Ends the trace and writes it, if one is being recorded: the run may end in the middle of it."""
        if not self._running:
            return
        self._running = False
        try:
            jax.profiler.stop_trace()
            self._say(f"profile of steps {self._from} to {self._to} in {self._put_in_place()}")
        except Exception as error:  # of the profiler's own kinds; a run does not end of a trace
            self._failed(error)
        finally:
            shutil.rmtree(self._own, ignore_errors=True)

    def _start(self, number: int) -> None:
        self._from = self._to = number
        try:
            # Here the first process is alone: the others wait for it in the step that comes.
            if jax.process_index() == 0 and self._session.exists():
                set_aside(self._session)
            jax.profiler.start_trace(self._own)
            self._running = True
        except Exception as error:
            self._failed(error)
            self.first = self.last = 0

    @property
    def _session(self) -> Path:
        # Of the steps that were asked for: processes may have to agree on it without a message.
        return self._folder / "plugins" / "profile" / f"steps_{self.first}-{self.last}"

    def _put_in_place(self) -> Path:
        self._session.mkdir(parents=True, exist_ok=True)
        name = socket.gethostname() + (f"_{jax.process_index()}" if jax.process_count() > 1 else "")
        for path in sorted(self._own.glob("plugins/profile/*/*")):
            # HOST.xplane.pb, HOST.trace.json.gz: hosts may have dots in their names.
            kind = next((kind for kind in (".xplane.pb", ".trace.json.gz") if path.name.endswith(kind)), path.suffix)
            path.replace(self._session / f"{name}{kind}")
        return self._folder

    def _failed(self, error: Exception) -> None:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self._say(f"profile {self.first}:{self.last}: not written ({what}); the run goes on")
