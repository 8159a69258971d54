"""Strangers at the rendezvous of a run: what they send is theirs alone, and bounded."""

import json
import socket
import time

import pytest
from meetings import Meeting

from taco_jax.launch import rendezvous

HELLO = {"hello": 1, "processes": 2, "host": "there", "pid": 7, "settings": {"steps": 1}}
NO_HELLO = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes": bytes(range(256)) * 100 + b"\n",
    "no object": b'1\nnull\n[]\n"a"\n{}\n',
    "stop": b'{"stop": "bye"}\n',
    "a long line": b"x" * (rendezvous.MAX_LINE + 1),
    "deep": b"[" * 60_000 + b"\n",
    "deeper": b"[" * 200_000 + b"\n",
    "a long number": b'{"hello":' + b"9" * 5000 + b"}\n",
    **{
        f"{key}={value!r}"[:40]: json.dumps(HELLO | {key: value}).encode() + b"\n"
        for key, value in [
            ("hello", True), ("hello", "1"), ("hello", None), ("hello", 1.0), ("processes", "2"), ("pid", None),
            ("pid", 10**40), ("host", ["a"]), ("host", "a\nerror: b"), ("host", "a" * 101), ("settings", [1]),
            ("settings", None),
        ]  # fmt: skip
    },
}  # fmt: skip


@pytest.fixture
def meeting():
    """A run of two that is under way."""
    meeting = Meeting(2, timeout=60.0, silence=60.0)
    yield meeting
    meeting.end()


def connect(meeting, data: bytes) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", meeting.port + 1), timeout=30)
    try:
        stranger.sendall(data)
    except OSError:
        pass  # it was closed before it had sent all
    return stranger


def say_hello(meeting, **changes) -> socket.socket:
    return connect(meeting, json.dumps(HELLO | changes).encode() + b"\n")


def answer(stranger: socket.socket) -> bytes:
    """All that comes until the other end closes the connection."""
    received = b""
    with stranger:
        try:
            while data := stranger.recv(4096):
                received += data
        except ConnectionError:  # closed with bytes that were not read
            pass
    return received


def told(stranger: socket.socket) -> str:
    """The line with which it is sent away."""
    (stop,) = (m["stop"] for m in map(json.loads, answer(stranger).splitlines()) if "stop" in m)
    return stop


def check_the_run_is_well(meeting) -> None:
    """Its members have heard nothing, and the hub still does its work."""
    assert not [m for member in meeting.members.values() for m in member.poll(0) if "ping" not in m]
    meeting.members[1].send(ended=-9, how="was ended by SIGKILL", killed=True)
    assert meeting.hears(0, "stop").startswith("process 1 of 2 (host ")


def test_lines_that_are_no_hello_end_their_connection_alone(meeting):
    meeting.start()
    for name, data in NO_HELLO.items():
        assert answer(connect(meeting, data)) == b"", name
    check_the_run_is_well(meeting)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, "process 1 of 2 (host there, pid 7) and process 1 of 2 (host "),
        ({"hello": 7}, "process 7 of 2 (host there, pid 7) says that there are 2; every process needs its own number"),
        ({"hello": -1}, "process -1 of 2"),
        ({"processes": 3}, "process 1 of 2 (host there, pid 7) says that there are 3"),
    ],
)
def test_a_hello_that_does_not_fit_a_run_is_answered_alone(meeting, capfd, changes, message):
    meeting.start()
    assert told(say_hello(meeting, **changes)).startswith(message)
    assert f"warning: refused at 127.0.0.1:{meeting.port + 1}: {message}" in capfd.readouterr().err
    check_the_run_is_well(meeting)


def test_before_a_run_starts(meeting):
    """Who claims to be process 0, or has other settings than it, before or after it has come."""
    assert "(host there, pid 7) is not the one that serves this port" in told(say_hello(meeting, hello=0))
    early = say_hello(meeting, settings={"steps": [3] * 999})
    while not meeting.hub._members:
        time.sleep(0.01)
    meeting.join(0)
    line = told(early)
    assert line.startswith("steps: process 1 of 2 (host there, pid 7) has [3, 3, ") and len(line) < 400
    line = told(say_hello(meeting, settings={"steps": 2}))
    assert "has 2, process 0 1; give all processes the same settings" in line
    meeting.join(1)
    assert meeting.hears(0, "go") and meeting.hears(1, "go")
    check_the_run_is_well(meeting)


def test_who_says_nothing_waits_neither_for_ever_nor_in_any_number(meeting, monkeypatch):
    meeting.start()
    monkeypatch.setattr(rendezvous, "MAX_STRANGERS", 3)
    silent = [connect(meeting, b"") for _ in range(5)]
    assert answer(silent[0]) == answer(silent[1]) == b""  # room for the last three
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.0)
    assert all(answer(stranger) == b"" for stranger in silent[2:])
    check_the_run_is_well(meeting)


def test_a_member_that_is_told_nonsense(meeting):
    meeting.start()
    line = meeting.hub._members[1].line
    line.socket.setblocking(True)
    line.socket.sendall(b'{"stop": [1]}\n{"stop": null}\n[\n{"stop": "words"}\n')
    line.socket.setblocking(False)
    assert meeting.hears(1, "stop") == "words"
    meeting.members[0].send(ended=0)
    meeting.members[1].send(ended=0)


@pytest.mark.parametrize("host, bound", [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")])
def test_it_listens_on_the_coordinators_address(host, bound):
    try:
        server = rendezvous._listen(host, 0)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with server:
        assert server.getsockname()[0] in ({bound, "::1"} if host == "localhost" else {bound})


@pytest.mark.parametrize("found", [["192.0.2.1"], ["127.0.1.1"], []], ids=["elsewhere", "loopback", "unknown"])
def test_it_listens_everywhere_where_the_coordinators_name_is_no_address_of_its_own(monkeypatch, found):
    """As behind a service's address, or where /etc/hosts gives a machine its own name as a loopback address."""
    real = socket.getaddrinfo

    def lookup(host, port, **options):
        if host != "node001":
            return real(host, port, **options)
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lookup)
    with rendezvous._listen("node001", 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")
