"""Half requests on real sockets: deadlines, the limit of connections, the end. The app says yes to a whole request."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest

pytest.importorskip("httpx", reason="the client: pip install 'taco-jax[test]'")
pytest.importorskip("starlette", reason="the extra serve: pip install 'taco-jax[serve]'")

import httpx
import uvicorn

from taco_jax.inference.serving import connections as module
from taco_jax.inference.serving import process
from taco_jax.inference.serving.connections import BACKLOG, OTHER_FILES, Connections, Limits, room_for

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
BODY = HEAD + b'Content-Length: 100\r\n\r\n{"a'
FOREVER = 600.0


class Server:
    """uvicorn with our connections in a thread."""

    def __init__(self, limits: Limits):
        self.connections, self.held, self.tasks = Connections(limits), threading.Event(), []
        self.bound = process.bind("127.0.0.1", 0)
        self.server = uvicorn.Server(process.configure(self.app, self.connections))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.url = process.address(self.bound)
        while not self.server.started:
            time.sleep(0.005)

    def _run(self) -> None:
        async def serve():
            self.loop = asyncio.get_running_loop()
            await self.server.serve(sockets=[self.bound])

        asyncio.run(serve())

    async def app(self, scope, receive, send) -> None:
        """Reads the body; /wait waits until `held` is set, /large sends more than anybody's buffers hold."""
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        if message["type"] == "http.disconnect":
            return
        while scope["path"] == "/wait" and not self.held.is_set():
            await asyncio.sleep(0.005)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64 if scope["path"] == "/large" else 0):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b"yes"})

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.bound.getsockname(), timeout=60)
        connection.sendall(data)
        return connection

    def is_up(self) -> bool:
        return httpx.get(self.url, timeout=60).text == "yes"

    def end(self) -> None:
        self.held.set()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def start():
    servers = []

    def start(**limits):
        servers.append(Server(Limits(**{"most": 50, "head": FOREVER, "body": FOREVER, "unread": FOREVER} | limits)))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in 60 s"
        time.sleep(0.005)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            received += data
    return received


def error(answer: bytes) -> tuple[int, str, str]:
    """(status, code, message) of an answer that is OpenAI's error object."""
    head, _, body = answer.partition(b"\r\n\r\n")
    content = json.loads(body)["error"]
    assert b"content-type: application/json" in head.lower() and set(content) == {"message", "type", "param", "code"}
    return int(head.split()[1]), content["code"], content["message"]


@pytest.mark.parametrize("sent", [b"", HEAD, BODY], ids=["nothing", "headers", "body"])
def test_half_a_request_has_its_time(start, sent):
    server = start(**{"body" if sent == BODY else "head": 0.2})
    assert rest(server.connect(sent)) == b"" and not server.connections.open
    server.connections.limits.head = FOREVER
    assert server.is_up()


def test_a_byte_now_and_then_is_no_way_around(start):
    server = start(head=0.3)
    connection = server.connect(HEAD)
    with contextlib.suppress(OSError):
        for _ in range(2000):
            connection.sendall(b"a")
            time.sleep(0.01)
        pytest.fail("20 s, and the connection is open")
    connection.close()


def test_whole_requests_have_no_deadline_and_the_next_of_a_connection_has_one(start):
    server = start()
    connection = server.connect(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
    until(lambda: server.connections.open and not server.connections.waiting)
    server.connections.limits.head = server.connections.limits.body = 0.05
    time.sleep(0.3)
    server.held.set()
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(1000)
    assert received.startswith(b"HTTP/1.1 200") and b"yes" in received
    connection.sendall(HEAD)
    assert rest(connection) == b""


def test_a_client_that_reads_nothing_is_given_up(start):
    server = start(unread=0.2)
    with server.connect(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        until(lambda: server.connections.open)
        until(lambda: not server.connections.open)
        assert server.is_up()


def test_half_requests_beyond_the_limit_make_room_and_one_line(start, capfd):
    server = start(most=5)
    sent = [b"", HEAD, BODY] * 10
    halves = [server.connect(data) for data in sent]
    assert server.is_up() and len(server.connections.open) <= 5
    assert all(rest(half) == b"" for half in halves[: len(halves) - 5])
    assert server.is_up()
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["warning: 5 connections are open, which is the limit: those without a request are closed"]


def test_a_new_connection_is_refused_where_all_wait_for_answers(start, capfd):
    server = start(most=2)
    waiting = [server.connect(b"GET /wait HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") for _ in range(2)]
    until(lambda: len(server.connections.open) == 2 and not server.connections.waiting)
    for _ in range(3):
        assert error(rest(server.connect()))[:2] == (503, "too_many_connections")
    server.held.set()
    assert all(b"yes" in rest(connection) for connection in waiting)
    until(lambda: not server.connections.open)
    assert server.is_up()
    assert capfd.readouterr().err.count("\n") == 1


def test_what_is_no_request_is_refused_without_a_word_in_the_log(start, capfd):
    server = start()
    for data in (b"\x16\x03\x01 hello\r\n\r\n", b"GET /\r\n\r\n", HEAD + b"a" * 100_000, HEAD + b"Host: b\r\n\r\n"):
        assert error(rest(server.connect(data)))[0] == 400
    bad_chunk = HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    assert error(rest(server.connect(bad_chunk)))[0] == 400
    upgrade = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert b"yes" in rest(server.connect(upgrade))
    assert server.is_up() and capfd.readouterr().err == ""


def test_the_end_does_not_wait_for_half_requests(start, capfd):
    server = start()
    halves = [server.connect(data) for data in (b"", HEAD, BODY)]
    until(lambda: len(server.connections.open) == 3)
    server.server.should_exit = True
    server.thread.join(60)
    assert not server.thread.is_alive()
    assert rest(halves[0]) == rest(halves[1]) == b""
    assert error(rest(halves[2])) == (503, "shutting_down", "the server is shutting down")
    assert capfd.readouterr().err == ""  # uvicorn would show a traceback for each


def test_connections_that_cannot_be_accepted_make_one_line(capfd):
    connections, loop = Connections(Limits(1)), asyncio.new_event_loop()
    for _ in range(100):
        context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
        connections.failed(loop, context)
    loop.close()
    assert capfd.readouterr().err == "warning: no connection can be accepted now: Too many open files\n"


@pytest.mark.parametrize(
    "requests, soft, hard, room, raised",
    [
        (80, 1024, 4096, 336, None),
        (2000, 1024, 4096, 2256, 2640),
        (5000, 1024, 4096, 3712, 4096),
        (80, -1, -1, 336, None),
    ],
)
def test_as_many_connections_as_requests_may_be_under_way(monkeypatch, requests, soft, hard, room, raised):
    limits = []
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(module.resource, "setrlimit", lambda _, both: limits.append(both))
    assert room_for(requests) == room and limits == ([(raised, hard)] if raised else [])
    assert soft == -1 or room + BACKLOG + OTHER_FILES <= (raised or soft)
