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
    """Least sum of weight x error. Steps along each row's convex hull, the most error for a bit first."""
    hulls = [_hull(options) for _, options in rows]
    at = [0] * len(rows)
    total = sum(weight for weight, _ in rows)
    left = bits * total - sum(weight * hull[0].bits for (weight, _), hull in zip(rows, hulls))
    # A share of rounding.
    if left < -1e-9 * total * bits:
        least = sum(weight * hull[0].bits for (weight, _), hull in zip(rows, hulls)) / total
        least = math.ceil(100 * least) / 100
        raise ConfigError(f"bits={bits:g}: these collectives need {least:g} at least; give more")
    steps = [
        ((hull[n].error - hull[n + 1].error) / (hull[n + 1].bits - hull[n].bits), row, n)
        for row, hull in enumerate(hulls)
        for n in range(len(hull) - 1)
    ]
    for _, row, n in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        weight, hull = rows[row][0], hulls[row]
        # From where the row is: an earlier step may have been too large, and this one goes over both.
        cost = weight * (hull[n + 1].bits - hull[at[row]].bits)
        if n + 1 > at[row] and cost <= left + 1e-9 * total:
            at[row], left = n + 1, left - cost
    return [hull[n] for hull, n in zip(hulls, at)]


def _hull(options: Iterable[Option]) -> list[Option]:
    """The options of which no mixture of others has fewer bits and less error, by bits."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bits, o.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(a: Option, b: Option) -> float:
    return (b.error - a.error) / (b.bits - a.bits)
