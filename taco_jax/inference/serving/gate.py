"""The gate of the server: the names by which a request may call it, and the key that it must bring.

A web page in a browser may point a name of its own at 127.0.0.1 and then speak to a server there as if it were its own
(DNS rebinding). The name that it used is in the request's Host, so a server on loopback takes only names of loopback,
and those of --allowed-host. /health is open to all.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from taco_jax.inference.serving.engine_types import RequestError

OPEN = ("/health",)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANY = "*"
MOST_DISCARDED = 8 << 20  # bytes


class Gate:
    """An ASGI middleware. hosts: names, without ports, that Host may have; None: any. key: what must be brought."""

    def __init__(self, app, hosts: Iterable[str] | None = None, key: str | None = None):
        self._app, self._hosts = app, None if hosts is None else {_bare(host) for host in hosts}
        self._key = None if key is None else _digest(key)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN and (error := self._why_not(Headers(scope=scope))):
            await _discard_body(receive)
            asks = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            await JSONResponse(error.body(), error.status, asks)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _why_not(self, headers: Headers) -> RequestError | None:
        host = headers.get("host", "")
        if self._hosts is not None and ANY not in self._hosts and host_name(host) not in self._hosts:
            message = f"Host={host[:100]!r}: is not served here; --allowed-host takes more names"
            return RequestError(message, status=403, code="host_not_allowed")
        if self._key is None:
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        # Digests: the time that the comparison takes says nothing about the key, not even its length.
        if kind.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), self._key):
            return None
        message = "the API key is wrong" if kind else "an API key is needed: Authorization: Bearer KEY"
        return RequestError(message, status=401, code="invalid_api_key")


async def _discard_body(receive) -> None:
    """Reads what is sent along, up to a limit: a client that still sends may not see the answer of a connection that is
    closed, and half a request gets none."""
    size = 0
    while size <= MOST_DISCARDED and (message := await receive())["type"] == "http.request":
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            return


def host_name(host: str) -> str:
    """The name in a Host header: without the port, brackets of an IPv6 address, capitals and the last dot."""
    name, colon, port = host.rpartition(":")
    return _bare(name if colon and (port.isdigit() or not port) and (":" not in name or name.endswith("]")) else host)


def _bare(name: str) -> str:
    return name.strip().strip("[]").lower().rstrip(".")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
