"""From a checked request to the text of its answer: prompts into jobs, the engine's tokens into text, stop strings.

All of this runs in the event loop but for templates and tokenising, which run in threads: a few for short prompts, one
for long ones, so that these hold nobody else up. Prompts on their way through them have their places in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from taco_jax.config import ConfigError
from taco_jax.inference.generator import Generator
from taco_jax.inference.logprobs import Scores, width
from taco_jax.inference.sampling import why_not_finite
from taco_jax.inference.serving.chat import Chat
from taco_jax.inference.serving.control import ControlTokens
from taco_jax.inference.serving.engine import Engine, QueueFull, Stopped
from taco_jax.inference.serving.engine_types import Event, Job, RequestError, Stops
from taco_jax.inference.serving.requests import DEFAULT_MAX_TOKENS, Request
from taco_jax.inference.serving.spelling import Prompt, Spelling, joined
from taco_jax.inference.text import Tokenizer

SHORT = 1 << 15  # bytes of a prompt, which a thread encodes in some ms
PER_TOKEN = 16  # characters: where a text has more than that for each token that fits, a part of it is tried first
CUT = 1000  # characters in which a part of a text must find a space to end at
MOST_VALUES = 1 << 20  # log-probabilities of one answer, which take some 100 bytes each
MESSAGES = 4  # times what fits: a template may leave out what an assistant has thought


class Delta(NamedTuple):
    """The news of one choice. reason: "stop" or "length" on its last, else None.

    logprobs: of the tokens since the one before, in the form of `Spelling`; None where none were asked for.
    """

    index: int
    text: str
    reason: str | None
    logprobs: dict | list | None = None


class Service:
    """The model's name, the engine, and `start`, as the API needs them. longest: a prompt and its answer, in tokens.

    room: prompts that may be under way or wait. control_tokens: texts of raw prompts may name control tokens; those of
    chats never do.
    """

    def __init__(
        self, generator: Generator, engine: Engine, name: str, longest: int, room: int, *, control_tokens: bool = True
    ):
        self.engine, self.name, self.longest = engine, name, longest
        self.chat = Chat(generator.checkpoint.template)
        self.draining = False
        self.answers = 0
        """Answers that are under way."""
        self.encoding = 0
        """Prompts that are not in the engine yet."""
        self._generator, self._room, self._control_tokens = generator, room, control_tokens
        tokenizer = generator.checkpoint.tokenizer
        self._control = ControlTokens(tokenizer, generator.checkpoint.eos)
        self._most_bytes = longest * max(len(token.encode()) for token in tokenizer.library.get_vocab())
        pool = functools.partial(ThreadPoolExecutor, thread_name_prefix="encode")
        self._chats, self._short, self._long, self._compiling = pool(2), pool(2), pool(1), pool(1)
        self.spelling = Spelling(tokenizer)
        self._stopped: set[asyncio.Future] = set()

    @property
    def trouble(self) -> str | None:
        """Why no request is taken; None while they are."""
        return self.engine.failure or ("the server is shutting down" if self.draining else None)

    def drain(self) -> None:
        """Takes no requests any more, and refuses those that are not in the engine yet. In the event loop."""
        self.draining = True
        for stopped in self._stopped:
            if not stopped.done():
                stopped.set_result(None)
        self.chat.close()

    async def start(self, request: Request) -> Answer:
        """Puts a request into the engine's queue.

        Raises:
          RequestError: 400, 404 for another model, 429 where the queue is full, 503 where no request is taken.
        """
        if request.model not in (None, self.name):
            message = f"model={request.model[:100]!r}: is not served here; {self.name!r} is"
            raise RequestError(message, "model", status=404, code="model_not_found")
        count = len(request.prompts) or 1
        if count > self._room:
            message = f"prompt: {count} prompts; at most {self._room} fit in the queue"
            raise RequestError(message, "prompt")
        self._check_sizes(request)
        counts = self.engine.counts()
        if counts.busy + counts.waiting + self.encoding + count > self._room:
            raise _queue_full()
        prompts = await self._encoded(request, count)
        answer = Answer(self, self._generator.checkpoint.tokenizer, request, prompts)
        try:
            self.engine.submit(answer.jobs)
        except QueueFull:
            raise _queue_full() from None
        except Stopped as error:
            raise RequestError(str(error), status=503, code="engine_stopped") from None
        self.answers += 1
        return answer

    def why_not_finite(self) -> str:
        """Returns what is wrong where the model's logits are not finite."""
        return why_not_finite(self._generator.settings.dtype)

    async def spelled(self, prompt: Prompt, scores: Scores, asked: int) -> dict[str, list]:
        """`Spelling.prompt_completion`, in a thread: a long prompt's may take a while."""
        spell = self.spelling.prompt_completion
        return await asyncio.get_running_loop().run_in_executor(self._short, spell, prompt, scores, asked)

    def new_job(self, request: Request, prompt: list[int], seed: int, put) -> Job:
        eos = frozenset() if request.ignore_eos else self._generator.checkpoint.eos
        return Job(
            prompt,
            self._max_tokens(request, len(prompt)),
            put,
            request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=seed,
            eos=eos,
            top=self._width(request),
            whole=request.echo and request.logprobs is not None,
        )

    def _max_tokens(self, request: Request, length: int) -> int:
        """Tokens that follow a prompt of that length, at most."""
        limit = (self.longest if request.messages else DEFAULT_MAX_TOKENS) if (n := request.max_tokens) is None else n
        return min(limit, self.longest - length)

    def _width(self, request: Request) -> int:
        return 0 if request.logprobs is None else width(request.logprobs, self._generator.config.vocab_size)

    def _check_sizes(self, request: Request) -> None:
        """Refuses what cannot fit by its bytes, before anything is done with it."""
        if request.messages is not None:
            size, most = sum(_size(text) for m in request.messages for text in m.values()), MESSAGES * self._most_bytes
            if size > most:
                raise _too_long("messages", f"{size} bytes; at most {most} are taken")
        for prompt in request.prompts:
            if isinstance(prompt, list):
                self._check_length(len(prompt), request, "prompt")
            elif (size := _size(prompt)) > self._most_bytes:
                raise _too_long("prompt", f"{size} bytes; {self.longest} tokens have at most {self._most_bytes}")

    def _check_length(self, length: int, request: Request, key: str, more: str = "") -> None:
        if length + (1 if request.max_tokens is None else request.max_tokens) > self.longest:
            wanted = f" and {request.max_tokens} to answer" if request.max_tokens else ""
            raise _too_long(key, f"{more}{length} tokens{wanted}; at most {self.longest} fit together")

    def _check_values(self, request: Request, rows: Sequence[list[int]]) -> None:
        """Refuses what would be more log-probabilities than an answer should hold."""
        if request.logprobs is not None:
            tokens = sum(request.echo * len(ids) + self._max_tokens(request, len(ids)) for ids in rows)
            if tokens * (1 + request.logprobs) > MOST_VALUES:
                message = f"logprobs={request.logprobs}: {tokens} tokens would have {1 + request.logprobs} values each"
                raise RequestError(f"{message}; an answer has at most {MOST_VALUES}", "logprobs")

    async def _encoded(self, request: Request, count: int) -> list[Prompt]:
        """The ids of all prompts, and their texts where these are needed; programs for log-probabilities are compiled.

        Their places in the queue are taken until the threads are done with them, although the client may have gone, or
        the server be shutting down.
        """
        given_up = threading.Event()
        work = asyncio.ensure_future(self._encode(request, given_up))
        stopped = asyncio.get_running_loop().create_future()
        self.encoding += count
        self._stopped.add(stopped)
        work.add_done_callback(lambda _: self._left(count))
        try:
            if not self.draining:
                await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self.draining:
                raise RequestError(self.trouble, status=503, code="shutting_down")
            return work.result()
        finally:
            given_up.set()
            self._stopped.discard(stopped)
            work.add_done_callback(lambda _: work.cancelled() or work.exception())  # it is nobody's any more

    def _left(self, count: int) -> None:
        self.encoding -= count

    async def _encode(self, request: Request, given_up: threading.Event) -> list[Prompt]:
        """Each part of the work in the threads that it is for; nothing more is begun once it is given up."""
        loop = asyncio.get_running_loop()

        def unless_given_up(work, *arguments):
            if given_up.is_set():
                raise RequestError("nobody waits for it")
            return work(*arguments)

        if request.messages is not None:
            text, marks = await loop.run_in_executor(self._chats, unless_given_up, self._chat, request)
            threads = self._short if len(text) <= SHORT else self._long
            ids = functools.partial(unless_given_up, self._chat_ids, text, marks, request)
            rows = [Prompt(await loop.run_in_executor(threads, ids))]
        else:
            rows = []
            for prompt in request.prompts:
                threads = self._short if len(prompt) <= SHORT else self._long
                rows.append(await loop.run_in_executor(threads, unless_given_up, self._prompt, prompt, request))
        self._check_values(request, [row.ids for row in rows])
        if request.logprobs is not None:
            prepare = functools.partial(
                self.engine.prepare, whole=request.echo, steps=request.max_tokens is None or request.max_tokens > 1
            )
            lengths = [len(row.ids) for row in rows]
            await loop.run_in_executor(self._compiling, unless_given_up, prepare, lengths, self._width(request))
        return rows

    def _prompt(self, prompt: str | list[int], request: Request) -> Prompt:
        ids = self._prompt_ids(prompt, request)
        if not request.echo and request.logprobs is None:
            return Prompt(ids)
        text = prompt if isinstance(prompt, str) else None
        return self.spelling.prompt(ids, text, ends=request.max_tokens == 0)

    def _chat(self, request: Request) -> tuple[str, dict[str, str]]:
        marked = self._control.mark(request.messages, self.chat.source)
        most = self._most_bytes * (2 if marked.marks else 1)  # a mark has up to three bytes more than what it is for
        return self.chat.prompt(marked.messages, most), marked.marks

    def _chat_ids(self, text: str, marks: dict[str, str], request: Request) -> list[int]:
        ids = lambda part: self._control.encode(part, marks)
        return self._checked(text, ids, request, "messages")

    def _prompt_ids(self, prompt: str | list[int], request: Request) -> list[int]:
        if not self._control_tokens:
            if isinstance(prompt, str):
                return self._checked(prompt, self._control.encode_text, request, "prompt")
            self._control.check_ids(prompt)
        return self._checked(prompt, self._generator.encode, request, "prompt")

    def _checked(self, prompt: str | list[int], encode, request: Request, key: str) -> list[int]:
        """The ids of a prompt, where they fit. The work is bounded by what fits, not by the text's length."""
        try:
            size = PER_TOKEN * self.longest
            while isinstance(prompt, str) and size < len(prompt):
                if end := _between_words(prompt, size):
                    self._check_length(len(encode(prompt[:end])), request, key, "more than ")
                size *= 2
            ids = encode(prompt)
            if not ids:
                raise RequestError(f"{key}: has no tokens; give at least one", key)
        except ConfigError as error:
            raise RequestError(str(error), key) from None
        self._check_length(len(ids), request, key)
        if unknown := [i for i in ids if i >= self._generator.config.vocab_size]:
            size = self._generator.config.vocab_size
            raise RequestError(f"{key}: token id {unknown[0]} is not in the vocabulary of {size}", key)
        return ids


def _between_words(text: str, most: int) -> int:
    """Returns where a word ends, at most that far from the text's begin; 0 where none does nearby."""
    for at in range(most, max(0, most - CUT), -1):
        if text[at] == " " and not text[at - 1].isspace() and not text[at + 1 : at + 2].isspace():
            return at
    return 0


def _size(text: str) -> int:
    return len(text.encode())


def _too_long(key: str, what: str) -> RequestError:
    return RequestError(f"{key}: {what}", key, code="context_length_exceeded")


def _queue_full() -> RequestError:
    return RequestError("the queue is full; try again later", status=429, code="queue_full")


class Answer:
    """The choices of one request, one for each prompt. `close` must be called, whatever happens."""

    def __init__(self, service: Service, tokenizer: Tokenizer, request: Request, prompts: Sequence[Prompt]):
        self._service, self._closed = service, False
        self._request, self._prompts = request, prompts
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue()
        seed = secrets.randbits(32) if request.seed is None else request.seed
        self.jobs = [
            service.new_job(request, prompt.ids, seed + i, functools.partial(self._put, i))
            for i, prompt in enumerate(prompts)
        ]
        self._texts = [(tokenizer.stream(prompt.ids), Stops(request.stop)) for prompt in prompts]
        self._begun: set[int] = set()
        self._offsets = [len(prompt.text) for prompt in prompts]  # characters before the next token
        self.prompt_tokens, self.completion_tokens = sum(len(prompt.ids) for prompt in prompts), 0

    async def deltas(self) -> AsyncIterator[Delta]:
        """What is new, as it comes. Raises RequestError (500) where the engine fails."""
        left, held = set(range(len(self.jobs))), {}
        while left:
            index, event = await self._events.get()
            if index not in left:
                continue  # a token after the stop string
            before = [held.pop(index, None)]
            if event.prompt is not None:
                before.append(await self._service.spelled(self._prompts[index], event.prompt, self._request.logprobs))
            delta = self._delta(index, event)
            delta = delta._replace(logprobs=joined([*before, delta.logprobs]))
            if delta.reason:
                left.discard(index)
            if delta.text or delta.reason:
                yield delta
            else:
                held[index] = delta.logprobs

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
        first = index not in self._begun
        self._begun.add(index)
        echoed = self._prompts[index].text if self._request.echo and first else ""
        if event.token is None:
            return Delta(index, echoed, event.end)
        self.completion_tokens += 1
        stream, stops = self._texts[index]
        text = stream.add(event.token) if event.end != "eos" else ""
        text = text + stream.flush() if event.end else text
        logprobs = self._logprobs(index, event)
        self._offsets[index] += len(text)
        text = echoed + stops.add(text)
        if stops.stopped:
            self._service.engine.cancel(self.jobs[index])
            return Delta(index, text, "stop", logprobs)
        if event.end:
            return Delta(index, text + stops.rest(), "stop" if event.end == "eos" else "length", logprobs)
        return Delta(index, text, None, logprobs)

    def _logprobs(self, index: int, event: Event) -> dict | list | None:
        """Returns those of one token. A chat leaves out the token that ends it, which is no part of its message."""
        if event.scores is None:
            return None
        spelling, asked = self._service.spelling, self._request.logprobs
        if self._request.messages is not None:
            return [] if event.end == "eos" else spelling.chat([event.token], event.scores, asked)
        return spelling.completion([event.token], [self._offsets[index]], event.scores, asked)
