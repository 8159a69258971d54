"""The last words of a worker: native ones are kept from the end of a run that went well."""

import os
import sys
import tempfile

import pytest

from taco_jax.config import TrainConfig
from taco_jax.launch import distributed, supervisor
from taco_jax.launch.launchers import Launch
from taco_jax.launch.supervisor import Reporter


def test_native_words_after_the_end_are_kept_for_the_parent_and_pythons_are_not(capfd):
    with tempfile.TemporaryFile() as stderr, tempfile.TemporaryFile() as last_words, capfd.disabled():
        pipe, kept, ours = os.open(os.devnull, os.O_WRONLY), os.dup(2), sys.stderr
        os.dup2(stderr.fileno(), 2)
        try:
            os.write(2, b"before\n")
            Reporter(pipe, last_words.fileno()).hush()
            os.write(2, b"E0000 coordination_service_agent.cc:282] CANCELLED\n")
            print("a warning of Python's", file=sys.stderr)
            at_the_end = os.pread(stderr.fileno(), 1000, 0)
            supervisor._show(last_words)  # as the parent does, if the worker then ends badly
            shown = os.pread(stderr.fileno(), 1000, 0)
        finally:
            os.dup2(kept, 2)
            sys.stderr = ours
            os.close(kept)
            os.close(pipe)
    assert at_the_end == b"before\na warning of Python's\n"
    assert shown == at_the_end + b"E0000 coordination_service_agent.cc:282] CANCELLED\n"


def test_a_worker_finds_its_parent(monkeypatch):
    assert Reporter.find() is None
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as last_words:
        monkeypatch.setenv(supervisor.VARIABLE, f"{os.getppid()}:{writer}:{last_words.fileno()}")
        monkeypatch.setattr(supervisor.ctypes, "CDLL", lambda _: (_ for _ in ()).throw(OSError))
        reporter = Reporter.find()
        reporter.stage("joined")
        assert os.read(reader, 100) == b"joined\n" and not os.get_inheritable(last_words.fileno())
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("code, want", [(0, ["hush", "shutdown"]), (3, ["own", "hush", "leave 3"])])
def test_native_words_are_kept_before_the_processes_part(monkeypatch, code, want):
    calls = []

    class Spy:
        own = lambda self: calls.append("own")
        hush = lambda self: calls.append("hush")

    launch = Launch("test", "127.0.0.1", 12345, 1, 2)
    monkeypatch.setattr(distributed.launchers, "find", lambda _: launch)
    monkeypatch.setattr(distributed.Reporter, "find", Spy)
    monkeypatch.setattr(distributed, "start", lambda *_: None)
    monkeypatch.setattr(distributed, "leave", lambda code: calls.append(f"leave {code}"))
    monkeypatch.setattr("jax.distributed.shutdown", lambda: calls.append("shutdown"))
    distributed.run(TrainConfig(), lambda config: code)
    assert calls[: len(want)] == want
