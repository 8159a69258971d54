"""Which codec each kind of collective gets: the least error under an average of bits, or the fewest bits for an SNR.

Errors are relative powers, |error|^2 / |result|^2, and weights are elements sent. What the loss feels of an error is
not known of a program that is not ours.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from taco_jax.calibration import allocation as knapsack
from taco_jax.errors import ConfigError

DEFAULT_BITS = 4.5
EXACT = "none"


class Option(NamedTuple):
    """A codec for a collective: bits an element with scales, and its relative error power."""

    codec: str
    bits: float
    error: float

    @property
    def snr(self) -> float:
        """dB."""
        return snr_of(self.error)


def snr_of(error: float) -> float:
    """The SNR in dB of a relative error power; infinite where there is none."""
    return -10 * math.log10(error) if error > 0 else math.inf


@dataclasses.dataclass(frozen=True)
class Budget:
    """An average of bits an element, or an SNR in dB that each collective reaches. Without either, `DEFAULT_BITS`.

    Raises ConfigError for what cannot be.
    """

    bits: float | None = None
    snr: float | None = None

    def __post_init__(self):
        if self.bits is not None and self.snr is not None:
            raise ConfigError(f"bits={self.bits:g} with snr={self.snr:g}: give one of them")
        for key, value, most in (("bits", self.bits, 32), ("snr", self.snr, 200)):
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value <= most):
                unit = "bits an element" if key == "bits" else "dB"
                shown = f"{value:g}" if number else repr(value)
                raise ConfigError(f"{key}={shown}: must be a number of {unit}, above 0 and at most {most}")
        if self.bits is None and self.snr is None:
            object.__setattr__(self, "bits", DEFAULT_BITS)

    def __str__(self) -> str:
        return f"{self.bits:g} bits" if self.bits is not None else f"{self.snr:g} dB"

    def check(self, bits: Mapping[str, float]) -> None:
        """Raises ConfigError where each of these codecs, by name with its bits, needs more than the budget."""
        least = min(bits, key=bits.get)
        if self.bits is not None and self.bits < bits[least]:
            raise ConfigError(
                f"bits={self.bits:g}: the codecs that are tried need {bits[least]:g} at least ({least}); "
                "give more bits, or codecs of fewer"
            )


def allocate(budget: Budget, rows: Sequence[tuple[float, Sequence[Option]]]) -> list[Option]:
    """One option for each row of (weight, options).

    Raises:
      ConfigError: no choice of options keeps the average of bits.
    """
    if budget.snr is not None:
        return [_fewest_bits(options, budget.snr) for _, options in rows]
    return _least_error(rows, budget.bits)


def _fewest_bits(options: Iterable[Option], snr: float) -> Option:
    return min((o for o in options if o.snr >= snr), key=lambda o: (o.bits, o.error))


def _least_error(rows: Sequence[tuple[float, Sequence[Option]]], bits: float) -> list[Option]:
    """Least sum of weight x error, by the knapsack that plans of models are chosen by."""
    total = sum(weight for weight, _ in rows)
    # A share of rounding.
    budget = bits * total * (1 + 1e-9)
    least = sum(weight * min(option.bits for option in options) for weight, options in rows)
    if least > budget:
        least = math.ceil(100 * least / total) / 100
        raise ConfigError(f"bits={bits:g}: these collectives need {least:g} at least; give more")
    items = []
    for weight, options in rows:
        by_bits = sorted(options, key=lambda option: option.bits)  # of equal errors the fewest bits
        ways = (knapsack.Option(o.codec, False, cost=weight * o.error, size=weight * o.bits) for o in by_bits)
        items.append(knapsack.Item("", "", tuple(ways)))
    chosen = knapsack.within_size(items, budget)
    return [next(o for o in options if o.codec == way.codec) for (_, options), way in zip(rows, chosen)]
