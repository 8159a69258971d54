"""The parent of each process of a run with several: meets the others, starts the worker, has the last word.

XLA aborts a process whose coordinator or peer has gone, from a thread of its own and with a stack trace as its last
words; a collective that waits for a dead peer may not return at all. So each process of a launch is two: this parent,
which never touches JAX, and the worker, the same command once more, which trains. The parent passes signals on to the
worker, tells the others how it ended, and, when another one is gone, ends it and says which one it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import BinaryIO

from taco_jax.config import ConfigError, TrainConfig, cli, flatten, to_dict
from taco_jax.launch.launchers import Launch
from taco_jax.launch.rendezvous import ADVICE, Hub, Member

# "PARENT:FD:WORDS" in the worker: its parent's pid, the pipe that it reports to, and the file of its last words.
VARIABLE = "TACO_JAX_SUPERVISOR"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Time for a worker to end by itself once another has failed: one that fails for the same reason says so itself.
GRACE_SECONDS = 2.0
# Settings that need not be the same on all processes.
LOCAL = ("devices", "gpu_memory_gb", "data.prefetch")


def supervise(launch: Launch, config: TrainConfig) -> int:
    """Runs this process' worker; returns the exit code: the worker's, or 1 when another process failed.

    Raises ConfigError if the coordinator's port cannot be served.
    """
    hub = None
    if launch.process == 0:
        try:
            hub = Hub(launch, config.distributed_timeout, config.heartbeat_timeout)
        except OSError as error:
            raise ConfigError(
                f"distributed={config.distributed!r}: process 0 cannot serve port {launch.port + 1} "
                f"({error.strerror}); choose another (JAX_COORDINATOR_ADDRESS, MASTER_PORT); the one before is used too"
            ) from None
        hub.start()
    settings = {k: v for k, v in flatten(to_dict(config)).items() if k not in LOCAL}
    try:
        member = Member(launch, config.distributed_timeout, config.heartbeat_timeout, settings)
        line = _wait_for_all(member, launch)
        code = 1
        if line is None:
            code, line = _run(member, launch)
        member.close()
    except TimeoutError as error:
        code, line = 1, str(error)
    if hub is not None:
        hub.join()
    if line is not None:
        cli.say(f"error: {line}", sys.stderr)
    return code


def _wait_for_all(member: Member, launch: Launch) -> str | None:
    """None when all processes have come; else the line that says why not."""
    while True:
        for message in member.poll(0.5):
            if "go" in message:
                return None
            if "stop" in message:
                return message["stop"]
        if not member.open or member.silent:
            return _gone(launch)


def _run(member: Member, launch: Launch) -> tuple[int, str | None]:
    """The worker from its start to its end. Returns the exit code, and the line to end with if there is one."""
    reader, last_words, worker = _start()
    reports, line, deadline, told = b"", None, None, False
    while True:
        # The worker's end shows within this time; a message, at once.
        for message in member.poll(0.1):
            if "stop" in message and line is None:
                line = message["stop"]
        if line is None and (not member.open or member.silent):
            line = _gone(launch)
        code = worker.poll()
        with contextlib.suppress(BlockingIOError):
            while new := os.read(reader, 1 << 12):
                reports += new
                for report in new.decode().split():
                    if report != OWN:
                        member.send(stage=report)
        own = OWN.encode() in reports.split()
        now = time.monotonic()
        if line is not None and deadline is None:
            deadline = now + GRACE_SECONDS
        if code is None:
            if line is not None and now > deadline:
                # Not SIGTERM, at which it would wait for the others, to save with them.
                worker.kill()
                worker.wait()
            continue
        if not told:
            told, ended = True, now
            if code:
                _show(last_words)
            killed = code < 0 and -code != signal.SIGABRT
            member.send(ended=code, how=_how(code), own=own, killed=killed)
        if code == 0 or own:
            return code, None  # it has said itself what there is to say
        if line is not None:
            return (1 if code > 0 or -code in (signal.SIGKILL, signal.SIGABRT) else 128 - code), line
        if now > ended + member.silence + GRACE_SECONDS:
            return 1, f"{launch.name} {_how(code)}; {ADVICE}"


def _start() -> tuple[int, BinaryIO, subprocess.Popen]:
    """The worker, the end of the pipe from which its reports come, and the file of its last words, which is deleted
    with the last process that has it open. Signals to stop go to the worker from now on."""
    last_words = tempfile.TemporaryFile()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    # A worker inherits what is blocked: a signal that comes while it imports waits until it has handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    worker = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env=os.environ | {VARIABLE: f"{os.getpid()}:{writer}:{last_words.fileno()}"},
        pass_fds=[writer, last_words.fileno()],
    )
    os.close(writer)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: worker.send_signal(number))
    # A terminal sends it to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return reader, last_words, worker


def _show(last_words: BinaryIO) -> None:
    """Prints what a worker that ended badly said to nobody (`Reporter.hush`)."""
    last_words.seek(0)
    if text := last_words.read().decode(errors="replace").rstrip("\n"):
        cli.say(text, sys.stderr)


def _gone(launch: Launch) -> str:
    return (
        f"process 0 of {launch.processes} (host {launch.host}, the coordinator) is gone: it was killed, or its host or "
        f"network is down; {ADVICE}"
    )


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    return f"was ended by signal {-code}"


OWN = "own"


class Reporter:
    """The worker's end of the pipe."""

    def __init__(self, descriptor: int, last_words: int):
        self._descriptor, self._last_words = descriptor, last_words

    @classmethod
    def find(cls) -> Reporter | None:
        """The reporter of a worker; None in a process that is none. The worker dies with its parent from here on."""
        parent, *descriptors = os.environ.pop(VARIABLE, "").split(":")
        if not descriptors:
            return None
        with contextlib.suppress(OSError, AttributeError):  # Linux alone has it; elsewhere an orphan ends on its own
            pr_set_pdeathsig = 1
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != int(parent):
            os._exit(1)
        for descriptor in descriptors:  # not for the programs that the worker starts
            os.set_inheritable(int(descriptor), False)
        return cls(*map(int, descriptors))

    def hush(self) -> None:
        """Keeps what native code says from here on from stderr; Python's own words still go there.

        When processes part, XLA's threads may tell of every call that was cancelled for it, after the run's last line
        and a page each (gRPC). The parent shows it all the same where the worker then ends with another code than 0.
        """
        sys.stderr.flush()
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
        os.dup2(self._last_words, 2)

    def stage(self, name: str) -> None:
        """Reached one of `taco_jax.launch.rendezvous.STAGES`."""
        self._write(name)

    def own(self) -> None:
        """This process has said itself why it ends: its parent need not."""
        self._write(OWN)

    def _write(self, word: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, f"{word}\n".encode())
