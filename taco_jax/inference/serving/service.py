"""From a checked request to the text of its answer: prompts into jobs, the engine's tokens into text, stop strings.

All of this runs in the event loop but for tokenising, which runs in a thread: a long prompt holds nobody else up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool

from taco_jax.config import ConfigError
from taco_jax.inference.generator import Generator
from taco_jax.inference.sampling import why_not_finite
from taco_jax.inference.serving.chat import Chat
from taco_jax.inference.serving.engine import Engine, QueueFull, Stopped
from taco_jax.inference.serving.errors import RequestError
from taco_jax.inference.serving.jobs import Event, Job
from taco_jax.inference.serving.requests import DEFAULT_MAX_TOKENS, Request
from taco_jax.inference.serving.stops import Stops
from taco_jax.inference.text import Tokenizer


class Delta(NamedTuple):
    """What is new of one choice. reason: "stop" or "length" on its last, else None."""

    index: int
    text: str
    reason: str | None


class Service:
    """What the API needs: the model's name, the engine, and `start`. longest: of a prompt and its answer, in tokens."""

    def __init__(self, generator: Generator, engine: Engine, name: str, longest: int, room: int):
        self.engine, self.name, self.longest = engine, name, longest
        self.chat = Chat(generator.checkpoint.template)
        self.draining = False
        self.answers = 0
        """Answers that are under way."""
        self._generator, self._room = generator, room

    @property
    def trouble(self) -> str | None:
        """Why no request is taken; None while they are."""
        return self.engine.failure or ("the server is shutting down" if self.draining else None)

    async def start(self, request: Request) -> Answer:
        """Puts a request into the engine's queue.

        Raises:
          RequestError: 400, 404 for another model, 429 where the queue is full, 503 where no request is taken.
        """
        if request.model not in (None, self.name):
            message = f"model={request.model!r}: is not served here; {self.name!r} is"
            raise RequestError(message, "model", status=404, code="model_not_found")
        if len(request.prompts) > self._room:
            message = f"prompt: {len(request.prompts)} prompts; at most {self._room} fit in the queue"
            raise RequestError(message, "prompt")
        prompts = await run_in_threadpool(self._encode, request)
        answer = Answer(self, self._generator.checkpoint.tokenizer, request, prompts)
        if self.draining:
            raise RequestError(self.trouble, status=503, code="shutting_down")
        try:
            self.engine.submit(answer.jobs)
        except QueueFull:
            raise RequestError("the queue is full; try again later", status=429, code="queue_full") from None
        except Stopped as error:
            raise RequestError(str(error), status=503, code="engine_stopped") from None
        self.answers += 1
        return answer

    def why_not_finite(self) -> str:
        """What is wrong where the model's logits are not finite."""
        return why_not_finite(self._generator.settings.dtype)

    def new_job(self, request: Request, prompt: list[int], seed: int, put) -> Job:
        room = self.longest - len(prompt)
        limit = request.max_tokens or (room if request.messages else DEFAULT_MAX_TOKENS)
        eos = frozenset() if request.ignore_eos else self._generator.checkpoint.eos
        return Job(prompt, min(limit, room), put, request.temperature, request.top_k, request.top_p, seed, eos)

    def _encode(self, request: Request) -> list[list[int]]:
        if request.messages is not None:
            key, encode = "messages", functools.partial(self._generator.checkpoint.tokenizer.encode, special=False)
            prompts = [encode(self.chat.prompt(request.messages))]
        else:
            key, prompts = "prompt", list(request.prompts)
        try:
            rows = [self._generator.encode(prompt) for prompt in prompts]
        except ConfigError as error:
            raise RequestError(str(error), key) from None
        for ids in rows:
            if len(ids) + (request.max_tokens or 1) > self.longest:
                wanted = f" and {request.max_tokens} to answer" if request.max_tokens else ""
                message = f"{key}: {len(ids)} tokens{wanted}; at most {self.longest} fit together"
                raise RequestError(message, key, code="context_length_exceeded")
        return rows


class Answer:
    """The choices of one request, one for each prompt. `close` must be called, whatever happens."""

    def __init__(self, service: Service, tokenizer: Tokenizer, request: Request, prompts: Sequence[list[int]]):
        self._service, self._closed = service, False
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue()
        seed = secrets.randbits(32) if request.seed is None else request.seed
        self.jobs = [
            service.new_job(request, prompt, seed + i, functools.partial(self._put, i))
            for i, prompt in enumerate(prompts)
        ]
        self._texts = [(tokenizer.stream(prompt), Stops(request.stop)) for prompt in prompts]
        self.prompt_tokens, self.completion_tokens = sum(map(len, prompts)), 0

    async def deltas(self) -> AsyncIterator[Delta]:
        """What is new, as it comes. Raises RequestError (500) where the engine fails."""
        left = set(range(len(self.jobs)))
        while left:
            index, event = await self._events.get()
            if index not in left:
                continue  # a token after the stop string
            delta = self._delta(index, event)
            if delta.reason:
                left.discard(index)
            if delta.text or delta.reason:
                yield delta

    def close(self) -> None:
        """Frees the rows of jobs that are not done."""
        if not self._closed:
            self._closed = True
            self._service.answers -= 1
            for job in self.jobs:
                self._service.engine.cancel(job)

    def _put(self, index: int, event: Event) -> None:
        """In the engine's thread. The loop may have ended before it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _delta(self, index: int, event: Event) -> Delta:
        if event.end == "failed":
            raise RequestError(self._service.trouble or "the engine failed", status=500, code="engine_stopped")
        if event.end == "not finite":
            raise RequestError(self._service.why_not_finite(), status=500, code="not_finite")
        self.completion_tokens += 1
        stream, stops = self._texts[index]
        text = stream.add(event.token) if event.end != "eos" else ""
        text = stops.add(text + stream.flush() if event.end else text)
        if stops.stopped:
            self._service.engine.cancel(self.jobs[index])
            return Delta(index, text, "stop")
        if event.end:
            return Delta(index, text + stops.rest(), "stop" if event.end == "eos" else "length")
        return Delta(index, text, None)
