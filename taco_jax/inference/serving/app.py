"""The routes: /v1/completions, /v1/chat/completions, /v1/models and /health, with OpenAI's error object for all errors.

Only bodies of type application/json are taken: a web page in a browser cannot send one to another origin without asking
first, so a server on this machine is not at every page's command.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from taco_jax.inference.serving import replies, requests
from taco_jax.inference.serving.engine_types import RequestError
from taco_jax.inference.serving.gate import Gate
from taco_jax.inference.serving.replies import Reply
from taco_jax.inference.serving.service import Answer, Service

MAX_BODY = 8 << 20
"""Bytes. A prompt of 100,000 tokens has a tenth of that."""
MAX_BODIES = 16 * MAX_BODY
"""Bytes of all bodies that are arriving."""
RETRY_AFTER = {"Retry-After": "1"}
CLIENT_GONE = 499  # nobody reads it


def make_app(service: Service, *, hosts: Iterable[str] | None = None, key: str | None = None) -> Starlette:
    """The API of a service. hosts, key: who may ask, as in `serving.gate.Gate`."""
    started, bodies = int(time.time()), _Bodies()
    model = {"id": service.name, "object": "model", "created": started, "owned_by": "taco_jax"}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != service.name:
            message = f"model={request.path_params['name'][:100]!r}: is not served here; {service.name!r} is"
            raise RequestError(message, "model", status=404, code="model_not_found")
        return JSONResponse(model)

    async def health(request: Request) -> Response:
        trouble, counts = service.trouble, service.engine.counts()
        return JSONResponse(
            {"status": trouble or "ok", **counts._asdict()}, 503 if trouble else 200, RETRY_AFTER if trouble else None
        )

    async def completions(request: Request) -> Response:
        return await _complete(service, request, bodies, chat=False)

    async def chat_completions(request: Request) -> Response:
        return await _complete(service, request, bodies, chat=True)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
        ],
        middleware=[Middleware(Gate, hosts=hosts, key=key)],
        exception_handlers={RequestError: _refused, HTTPException: _no_such_route, Exception: _broken},
    )


async def _complete(service: Service, request: Request, bodies: _Bodies, *, chat: bool) -> Response:
    try:
        raw = await bodies.read(request)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    if service.draining:
        raise RequestError(service.trouble, status=503, code="shutting_down")
    asked = requests.parse(raw, chat=chat)
    answer = await _unless_gone(request, service.start(asked))
    if isinstance(answer, Response):
        return answer
    reply = Reply(service.name, chat=chat, include_usage=asked.include_usage)
    if asked.stream:
        return _Streamed(answer, reply)
    try:
        return await _unless_gone(request, _whole(answer, reply))
    finally:
        answer.close()


class _Bodies:
    """Reads the bodies of requests; `size`: bytes of those that are arriving."""

    def __init__(self):
        self.size = 0

    async def read(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(f"Content-Type={kind!r}: must be application/json", status=415)
        too_large = RequestError(f"the body has more than {MAX_BODY} bytes", status=413)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > MAX_BODY:
            raise too_large
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                self.size += len(part)
                if size > MAX_BODY:
                    raise too_large
                if self.size > MAX_BODIES:
                    raise RequestError("too many bodies are arriving; try again later", status=429, code="queue_full")
                parts.append(part)
        finally:
            self.size -= size
        return b"".join(parts)


async def _whole(answer: Answer, reply: Reply) -> Response:
    choices = [[] for _ in answer.jobs]
    async for delta in answer.deltas():
        choices[delta.index].append(delta)
    return JSONResponse(reply.whole(choices, answer))


async def _unless_gone(request: Request, work: Awaitable) -> Any:
    """What `work` returns, unless the client closes the connection first: then a response that nobody reads."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_GONE)
    finally:
        working.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Streamed(StreamingResponse):
    """Server-sent events. Where the client closes the connection, the answer is closed too."""

    def __init__(self, answer: Answer, reply: Reply):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(answer, reply), media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # not in the iterator: one that was never started runs no finally
            self._answer.close()


async def _events(answer: Answer, reply: Reply) -> AsyncIterator[str]:
    try:
        for chunk in reply.opening():
            yield replies.event(chunk)
        async for delta in answer.deltas():
            for chunk in reply.delta(delta):
                yield replies.event(chunk)
        for chunk in reply.closing(answer):
            yield replies.event(chunk)
    except RequestError as error:  # the status is sent already
        yield replies.event(error.body())
    yield replies.DONE


async def _refused(request: Request, error: RequestError) -> Response:
    return JSONResponse(error.body(), error.status, RETRY_AFTER if error.status in (429, 503) else None)


async def _no_such_route(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    return JSONResponse(RequestError(message, status=error.status_code).body(), error.status_code, error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    """The traceback is in the server's log."""
    return JSONResponse(RequestError("the server has a fault; its log says more", status=500).body(), 500)
