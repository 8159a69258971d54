"""The rendezvous in one process: who is missing, who is gone, and who is to blame."""

import socket
import time

import pytest
from meetings import Meeting, free_port

from taco_jax.launch.launchers import Launch
from taco_jax.launch.rendezvous import Member


@pytest.fixture
def meeting():
    meetings = []

    def make(*args, **options):
        meetings.append(Meeting(*args, **options))
        return meetings[-1]

    yield make
    for one in meetings:
        one.end()


def test_all_end_well(meeting):
    m = meeting(3)
    m.start()
    for process in (1, 2, 0):
        m.members[process].send(stage="ready")
        m.members[process].send(ended=0)
    m.ends()


def test_missing_processes_are_named(meeting):
    m = meeting(4, timeout=3.0)
    m.join(0, 2)
    for process in (0, 2):
        line = m.hears(process, "stop")
        assert line.startswith(f"processes 1, 3 of 4 did not report to 127.0.0.1:{m.port + 1} within 3 s")
        assert f"0 on {socket.gethostname()}, 2 on {socket.gethostname()} did" in line and "\n" not in line


def test_coordinator_that_is_not_there():
    launch = Launch("test", "127.0.0.1", free_port(), 1, 2)
    with pytest.raises(TimeoutError, match="process 0 of 2 cannot be reached at 127.0.0.1:.*refused; look whether"):
        Member(launch, 0.5, 5.0, {})


def test_same_number_twice(meeting):
    m = meeting(3)
    m.join(0, 1)
    first = m.members[1]
    m.join(1)
    assert "have the same number; every process needs its own" in m.hears(1, "stop")
    first.close()


def test_other_settings(meeting):
    m = meeting(2)
    m.join(0)
    m.join(1, settings={"steps": 2})
    line = m.hears(1, "stop")
    assert line.startswith("steps: process 1 of 2 (host ")
    assert line.endswith("has 2, process 0 1; give all processes the same settings")


def test_strangers_are_no_matter(meeting):
    m = meeting(2)
    for data in (b"GET / HTTP/1.1\r\n\r\n", b'{"hello": "you"}\n', b"[1]\n"):
        with socket.create_connection(("127.0.0.1", m.port + 1)) as stranger:
            stranger.sendall(data)
    m.start()
    m.members[0].send(ended=0)
    m.members[1].send(ended=0)


def test_killed_process_is_named(meeting):
    m = meeting(3)
    m.start()
    # What its peers end with when the connection to it breaks, and they may be the first to say so.
    m.members[0].send(ended=1, how="ended with exit code 1")
    m.members[2].send(ended=-6, how="was ended by SIGABRT")
    m.members[1].close()
    for process in (0, 2):
        line = m.hears(process, "stop")
        assert line.startswith("process 1 of 3 (host ") and "is gone: it was killed, or its host is down" in line


def test_the_cause_comes_before_its_consequences(meeting):
    m = meeting(3)
    m.start()
    m.members[0].send(ended=1, how="ended with exit code 1")
    m.members[1].send(ended=2, how="ended with exit code 2", own=True)
    assert m.hears(2, "stop").startswith("process 1 of 3")
    m.members[2].send(ended=-9, how="was ended by SIGKILL", killed=True)


def test_silence(meeting):
    m = meeting(2, silence=1.0)
    m.start()
    assert "process 1 of 2" in (line := m.hears(0, "stop")) and "silent for 1 s (heartbeat_timeout)" in line


def test_pings_break_the_silence(meeting):
    m = meeting(2, silence=2.0)
    m.start()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        assert not any("stop" in message for member in m.members.values() for message in member.poll(0.05))
    assert not any(member.silent for member in m.members.values())


@pytest.mark.parametrize(
    "stages, message",
    [
        (["joined", None, "joined"], "process 1 did not join JAX's processes within 3 s (distributed_timeout)"),
        pytest.param(
            ["ready", "joined", "ready"],
            "start-up self-test: process 1 did not get through an all-reduce over all",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["joined"] * 3,
            "start-up self-test: all processes did not get through an all-reduce over all devices",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_self_test_that_hangs(meeting, stages, message):
    m = meeting(3, timeout=3.0)
    m.start()
    for process, stage in enumerate(stages):
        if stage:
            m.members[process].send(stage=stage)
    assert m.hears(2, "stop").startswith(message)
