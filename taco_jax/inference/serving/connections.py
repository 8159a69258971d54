"""Connections below HTTP: deadlines, a limit, and the end of those that a draining server need not wait for.

Who connects and says nothing, or half a request, has `Limits.head` seconds for the headers and `Limits.body` for the
body; then the connection is closed without a word. At most `Limits.most` connections are open: one more closes the one
that has been without a whole request for longest, so that clients who send theirs get in; only where all of them wait
for answers is the new one refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import resource
import sys
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from taco_jax.config import cli
from taco_jax.inference.serving.engine_types import RequestError

BACKLOG = 128
"""Connections that the system holds for us, which are as many as are accepted in one go."""
OTHER_FILES = 256  # what else the process has open
SPARE = 256  # connections beside those that may have a request in the queue
REPEAT = 60  # seconds before the same warning is given again


@dataclasses.dataclass
class Limits:
    """most: connections. The others are seconds: for headers, for a body, for what a client does not read."""

    most: int
    head: float = 10.0
    body: float = 30.0
    unread: float = 60.0


def room_for(requests: int) -> int:
    """Returns how many connections to allow so that as many requests can be under way; raises the limit of open files."""
    wanted = requests + SPARE
    files = wanted + BACKLOG + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, min(wanted, soft - BACKLOG - OTHER_FILES))
    return wanted


class Connections:
    """The connections of a server. `protocol` makes one, for uvicorn."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}
        """Those without a whole request, the longest so first."""
        self._warned: dict[str, float] = {}

    def protocol(self, **of_uvicorn: Any) -> Connection:
        return Connection(self, **of_uvicorn)

    def make_room(self, new: Connection) -> bool:
        """Returns whether there is room for one more; one without a request may have been closed for it."""
        if len(self.open) < self.limits.most:
            return True
        oldest = next(iter(self.waiting), None)
        what = "all wait for answers, new ones are refused" if oldest is None else "those without a request are closed"
        self.warn(f"{self.limits.most} connections are open, which is the limit: {what}")
        if oldest is None:
            return False
        oldest.give_up()
        return True

    def close_all(self) -> None:
        """Ends what is still open, read or not."""
        for connection in list(self.open):
            connection.give_up()

    def warn(self, text: str) -> None:
        """One line on stderr, and no second one for a while."""
        now = time.monotonic()
        if now - self._warned.get(text, -REPEAT) >= REPEAT:
            self._warned[text] = now
            cli.say(f"warning: {text}", sys.stderr)

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's handler of exceptions: a page for each connection that cannot be accepted is too much."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            self.warn(f"no connection can be accepted now: {error.strerror}")
        else:
            loop.default_exception_handler(context)


class Connection(H11Protocol):
    """One connection. It has a timer while it is without a whole request, or while its client reads nothing."""

    def __init__(self, connections: Connections, **of_uvicorn: Any):
        super().__init__(**of_uvicorn)
        self._connections, self._limits = connections, connections.limits
        self._timer: asyncio.TimerHandle | None = None
        self._state = ""
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        if not self._connections.make_room(self):
            self._refuse(RequestError("too many connections; try again later", status=503, code="too_many_connections"))
            return
        self._connections.open.add(self)
        self._follow()

    def connection_lost(self, exc) -> None:
        self._forget()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def timeout_keep_alive_handler(self) -> None:
        if not self._timer:  # else a request has begun
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._unread or self.loop.call_later(self._limits.unread, self.give_up)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def shutdown(self) -> None:
        """Called when the server has drained: half a request will get no answer."""
        if self._state == "body":
            self._refuse(RequestError("the server is shutting down", status=503, code="shutting_down"))
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError("the request is no HTTP/1.1"))

    def _unsupported_upgrade_warning(self) -> None:
        """Not a word: anybody can ask for it."""

    def give_up(self) -> None:
        """Closes the connection at once, whatever is under way."""
        self._forget()
        self.transport.abort()

    def _follow(self) -> None:
        """Starts the timer of the part of a request that is awaited now, or stops it."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and cycle.more_body:
            state, seconds = "body", self._limits.body
        elif cycle is None or cycle.response_complete:
            idle = self.timeout_keep_alive_task is not None  # uvicorn's own timer, between two requests
            state, seconds = "idle" if idle else "head", None if idle else self._limits.head
        else:
            state, seconds = "whole", None
        if state == self._state:
            return
        self._state = state
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.give_up)
        self._connections.waiting.pop(self, None)
        if state != "whole":
            self._connections.waiting[self] = None

    def _refuse(self, error: RequestError) -> None:
        """Answers in the place of the app, where it has not begun to, and closes the connection."""
        self._forget()
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        content = json.dumps(error.body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(content))), ("connection", "close")]
        try:
            if begun:
                raise h11.LocalProtocolError("an answer is under way")
            response = h11.Response(status_code=error.status, headers=headers, reason=b"")
            for event in (response, h11.Data(data=content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        except h11.LocalProtocolError:
            self.transport.abort()
            return
        if self.cycle is not None:  # whoever reads its body or writes its answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        if self._unread is None:  # what is written may not be read
            self._unread = self.loop.call_later(self._limits.head, self.transport.abort)

    def _forget(self) -> None:
        self._connections.open.discard(self)
        self._connections.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
