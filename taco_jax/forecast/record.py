"""Losses of codecs by the record (`record.json`, which experiments/fit_forecast.py writes from the results)."""

from __future__ import annotations

import dataclasses

from taco_jax.forecast.constants import load

FILE = "record.json"
FEEDBACK = "_feedback"


@dataclasses.dataclass(frozen=True)
class Loss:
    """A relative change of the loss (training) or of the perplexity (first token) against exact sums.

    error: its standard error; None after one run of training. runs: pairs of it.
    """

    change: float
    error: float | None
    runs: int
    source: str

    @property
    def sure(self) -> bool:
        """Returns whether more than one pair of runs says it."""
        return self.error is not None

    def __str__(self) -> str:
        error = "one run" if self.error is None else f"standard error {100 * self.error:.2f} %"
        return f"{100 * self.change:+.2f} % ({error})"


def bound() -> float:
    """The change of the validation loss within which experiments/accuracy.py takes training as equivalent."""
    return load(FILE)["bound"]


def of(codecs: str, use: str, *, feedback: bool = False) -> Loss | None:
    """The record of codecs FORWARD[:BACKWARD] in a use: training, first_token, stages, gradients or weights; None where
    there is none."""
    forward, _, backward = codecs.partition(":")
    name = forward if backward in ("", forward) else codecs
    if use == "first_token":
        name = forward + (FEEDBACK if feedback else "")
    row = load(FILE)[use].get(name)
    return None if row is None else Loss(**row)
