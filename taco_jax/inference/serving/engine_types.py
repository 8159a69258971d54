"""Types that the engine and its callers exchange: jobs and their events, refusals, stop strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from taco_jax.inference.logprobs import Scores
from taco_jax.inference.sampling import Rows


class Event(NamedTuple):
    """A token of a job. end: "eos" or "length" on its last; without a token "failed" where the engine stopped, and
    "not finite" where the model's logits are.

    scores: of the token (B = 1), for jobs that ask for log-probabilities. prompt: with a job's first event, of all
    tokens of its prompt but the first, for those that ask for these. A job of no tokens has one event, without a token.
    """

    token: int | None
    end: str | None
    scores: Scores | None = None
    prompt: Scores | None = None


@dataclasses.dataclass(eq=False)
class Job:
    """prompt and max_tokens fit the engine's longest sequence. put: called with each Event, in the engine's thread.

    top: alternatives of each token that programs compute, 0 for no log-probabilities (`logprobs.width`). whole: the
    prompt's own tokens are scored too. started, received: how many tokens were begun and have arrived. done: nothing
    more is put.
    """

    prompt: list[int]
    max_tokens: int
    put: Callable[[Event], None]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    eos: frozenset[int] = frozenset()
    top: int = 0
    whole: bool = False
    started: int = 0
    received: int = 0
    done: bool = False

    def row(self) -> Rows:
        """Returns how it is sampled, as a batch of one."""
        one = lambda value, dtype: np.full((1,), value, dtype)
        return Rows(
            one(self.temperature, np.float32), one(self.top_k, np.int32), one(self.top_p, np.float32),
            one(self.seed % 2**32, np.uint32),
        )  # fmt: skip


class RequestError(Exception):
    """param: the field of the body that is at fault. code: for programs, such as "context_length_exceeded"."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Stops:
    """Text goes in as it comes and is let out once no stop string can begin in it. stopped: one was found.

    Where several are found in the same piece, the text ends before the one that begins first.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.stopped = tuple(stops), "", False

    def add(self, text: str) -> str:
        """Returns what can be let out now."""
        if self.stopped:
            return ""
        held = self._held + text
        begins = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if begins:
            self.stopped, self._held = True, ""
            return held[: min(begins)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """Returns what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns how much of the text's end the stop string may begin with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
