"""Stopping on request: SIGTERM or SIGUSR1 to any process makes all of them save after the same step and stop.

Schedulers send the signal some time before they kill (SLURM's `--signal`, Kubernetes' grace period), rarely to all
processes in the same step. A handler only takes a note, so a signal that comes while the program compiles, validates or
saves waits for the next step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.launch.supervisor import STOP_SIGNALS

# A request as a number that outgrows all others of lower processes: process * this + signal, and 0 for none.
_SIGNALS = 128


class StopRequests:
    """The requests of this process, and what all processes agree on. Use as a context manager, on the main thread.

    On another thread, where Python allows no handlers, nobody requests anything.
    """

    def __init__(self):
        self._number = 0
        self._old: dict[int, Any] = {}
        self._agree: Callable | None = None

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
            # A supervisor starts its worker with these blocked: what came in the meantime is delivered here.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, _) -> None:
        self._number = self._number or number

    def prepare(self, mesh: Mesh) -> None:
        """Compiles the agreement: the maximum over all processes, of one int32 a device. Every process calls it."""
        if jax.process_count() == 1:
            return
        cut, whole = NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P())
        maximum = jax.jit(lambda x: x.max(), out_shardings=whole)
        request = lambda number: number and jax.process_index() * _SIGNALS + number
        place = lambda number: jax.make_array_from_callback(
            (mesh.size,), cut, lambda index: np.full(1, request(number), np.int32)
        )
        # Placed once: what remains for every step is one call of a compiled program.
        numbers = {number: place(number) for number in (0, *map(int, STOP_SIGNALS))}
        compiled = maximum.lower(numbers[0]).compile()
        self._agree = lambda number: compiled(numbers[number])

    def ask(self) -> Callable[[], str | None]:
        """Asks all processes, which must all do so in the same order among their other programs.

        Returns a function that waits for the answer: "SIGTERM to process 1" where there is a request, else None. The
        answer does not wait for programs that are launched after this call.
        """
        number = int(self._number)
        if self._agree is None:
            return lambda: _words(jax.process_index() * _SIGNALS + number if number else 0)
        answer = self._agree(number)
        return lambda: _words(int(answer))


def _words(request: int) -> str | None:
    process, number = divmod(request, _SIGNALS)
    if not number:
        return None
    name = signal.Signals(number).name
    return f"{name} to process {process}" if jax.process_count() > 1 else name
