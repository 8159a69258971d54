"""A job: one prompt on its way through the engine. A request with several prompts is several jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from taco_jax.inference.sampling import Rows


class Event(NamedTuple):
    """A token of a job. end: "eos" or "length" on its last; without a token "failed" where the engine stopped, and
    "not finite" where the model's logits are."""

    token: int | None
    end: str | None


@dataclasses.dataclass(eq=False)
class Job:
    """prompt and max_tokens fit the engine's longest sequence. put: called with each Event, in the engine's thread.

    started, received: how many tokens were begun and have arrived. done: nothing more is put.
    """

    prompt: list[int]
    max_tokens: int
    put: Callable[[Event], None]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    eos: frozenset[int] = frozenset()
    started: int = 0
    received: int = 0
    done: bool = False

    def row(self) -> Rows:
        """How it is sampled, as a batch of one."""
        one = lambda value, dtype: np.full((1,), value, dtype)
        return Rows(
            one(self.temperature, np.float32), one(self.top_k, np.int32), one(self.top_p, np.float32),
            one(self.seed % 2**32, np.uint32),
        )  # fmt: skip
