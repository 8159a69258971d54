"""The server's life: a socket, uvicorn around the app, and signals.

The first SIGTERM or SIGINT drains: new requests get 503, those that were taken are finished, the process ends with
code 0. Prompts that are not tokenised yet are refused too: their work is bounded, but may take seconds. A second signal
ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from taco_jax.config import ConfigError, cli
from taco_jax.inference.serving.connections import BACKLOG, Connections, Limits, room_for
from taco_jax.inference.serving.service import Service

SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL = 0.02  # seconds
LAST_BYTES = 10  # seconds for what is written to be sent, after the last token


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet. Raises ConfigError for an address that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:  # the last of a name that no host can have
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--host {host} --port {port}: {reason}; --port 0 takes a port that is free") from None
    return bound


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Returns whether only this machine reaches it, as an IPv4 address in IPv6's form (::ffff:127.0.0.1) too."""
    found = ipaddress.ip_address(bound.getsockname()[0].partition("%")[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def configure(app: Starlette, connections: Connections) -> uvicorn.Config:
    """uvicorn's settings: connections within their limits, and no log but of faults."""
    return uvicorn.Config(
        app, interface="asgi3", http=connections.protocol, ws="none", lifespan="off", backlog=BACKLOG,
        log_level="error", access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=2 * LAST_BYTES,
    )  # fmt: skip


def serve(app: Starlette, service: Service, bound: socket.socket, ready: Callable[[], None], requests: int = 0) -> None:
    """Serves until a signal has drained it. On the main thread.

    ready: called once connections are accepted. requests: how many may be under way, each on a connection.
    """
    connections = Connections(Limits(room_for(requests)))
    asyncio.run(_Server(configure(app, connections), service, connections, ready).serve(sockets=[bound]))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, connections: Connections, ready: Callable[[], None]):
        super().__init__(config)
        self._service, self._connections, self._ready, self._draining = service, connections, ready, None

    async def startup(self, sockets=None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._connections.failed)
        try:
            await super().startup(sockets)
        except OSError as error:  # two servers may have bound the port, of which one listens
            raise ConfigError(f"{address(sockets[0])}: {error.strerror}; --port 0 takes a port that is free") from None
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self):
        """Instead of uvicorn's own, which close the socket at the first signal and end with the signal's status."""
        loop = asyncio.get_running_loop()
        before = {number: signal.signal(number, lambda n, _: self._signalled(loop, n)) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        if self._service.draining:
            os._exit(128 + number)
        self._service.draining = True
        loop.call_soon_threadsafe(self._start_draining, signal.Signals(number).name)

    def _start_draining(self, name: str) -> None:
        left = self._service.answers
        self._service.drain()
        cli.say(f"{name}: finishing {left} request{'' if left == 1 else 's'}; a second signal ends at once", sys.stderr)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        # Not while there are answers under way: a client that reads nothing would keep the server up.
        while self._service.engine.counts().busy or self._service.engine.counts().waiting:
            await asyncio.sleep(POLL)
        # Before uvicorn, which cancels what is left with a page of words.
        asyncio.get_running_loop().call_later(LAST_BYTES, self._connections.close_all)
        self.should_exit = True
