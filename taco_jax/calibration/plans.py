"""From statistics to a plan: what each option of a message costs and how large it is, and the plan's file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from taco_jax.calibration.allocation import Item, Option
from taco_jax.calibration.measure import Statistics
from taco_jax.codec import as_codec
from taco_jax.compression.plan_file import SitePlan

GRADIENT_WEIGHT = 0.1
"""Nats of the loss for a relative squared error of the gradient of 1. An error r turns the gradient so far that a share
r / 2 of each step's way is lost, and with it that share of the steps; a loss falls by about 0.2 nats for e times as
many steps at the end of a run. Batches are noisy themselves, which makes it less: this is the upper end."""
GUARD_DB = 3.0
"""The guard's bound is so much below what was measured."""
EXACT_BITS = 16.0

CANDIDATES = (
    "int4h,element=int3,block=32,scale=ue5m3", "int4h,scale=ue5m3", "int4h", "int4h,block=32,scale=ue5m3",
    "int4h,block=16,scale=ue5m3", "int4h,rotation=none,block=32,scale=ue5m3", "mxfp4", "mxfp4,block=16,scale=ue5m3",
    "tah4", "int5h", "int5h,block=32,scale=ue5m3", "int6h", "int6h,block=32,scale=ue5m3", "int8h",
)  # fmt: skip
"""The candidates where --codecs does not say others: of 3 to 8 bits, in blocks of 16 to 128, rotated and not."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The option of one message, with its statistics."""

    message: Item
    option: Option
    statistics: Statistics
    elements: int

    @property
    def bits(self) -> float:
        """Returns the wire bits of an element."""
        return bits_of(self.option.codec, self.elements)

    @property
    def calls(self) -> int:
        """Returns the number of messages: one for each layer."""
        return max(1, self.statistics.layers)


def bits_of(codec: str, elements: int) -> float:
    """Returns the wire bits of an element in a message of so many, scales and padding counted (exact: 16)."""
    found = as_codec(codec)
    if found.exact:
        return EXACT_BITS
    return 8 * found.wire_bytes(elements) / elements if not found.per_token else float("nan")


def costs(statistics: Statistics, direction: str, feedback: bool) -> np.ndarray:
    """Returns the predicted rise of the loss in nats with each candidate, float64[K]."""
    rise = statistics.rises(feedback).mean(0) if direction == "forward" else np.zeros(len(statistics.codecs))
    if statistics.gradient_error is None:
        return rise
    share = float(np.mean(statistics.gradient_sensitivities())) * statistics.relative_errors
    if feedback:
        # What the loss feels less, the gradient feels less: this alone was not measured by itself.
        flat, fed = statistics.sensitivity(), statistics.sensitivity(feedback=True)
        share = share * (fed / flat if flat else 1.0)
    return rise + GRADIENT_WEIGHT * share


def messages_of(
    measured: Mapping[tuple[str, str], Statistics],
    codecs: Sequence[str],
    *,
    elements: int,
    feedback: bool,
    delivered: frozenset[str] = frozenset(),
    size: Callable[[str, str, str], float] | None = None,
) -> list[Item]:
    """Returns the messages with their options, the exact one among them.

    Args:
      codecs: candidates, of those that were measured.
      elements: of one message.
      feedback: sums may take errors along; codecs that compress then do.
      delivered: sites whose errors are added exactly afterwards, where feedback costs nothing.
      size: (site, direction, codec) -> of all its calls; None: bits.
    """
    out = []
    for (site, direction), statistics in measured.items():
        fed = feedback and direction == "forward" and can_feed_back(site)
        found = costs(statistics, direction, fed)
        if fed and site in delivered:
            found = np.zeros_like(found)
        costs_of = dict(zip(statistics.codecs, map(float, found))) | {"none": 0.0}
        sizes = {
            c: max(1, statistics.layers) * elements * bits_of(c, elements) if size is None else size(site, direction, c)
            for c in (*codecs, "none")
        }
        options = (Option(c, fed and c != "none", costs_of[c], sizes[c]) for c in sizes)
        out.append(Item(site, direction, tuple(options)))
    return out


def can_feed_back(site: str) -> bool:
    """Returns whether a site is a row-parallel sum of layers."""
    return site.endswith(("attn/out", "mlp/down"))


def by_layer(measured: Mapping[tuple[str, str], Statistics]) -> dict[tuple[str, str], Statistics]:
    """Returns the statistics of layers/attn/out as those of layers/0/attn/out, layers/1/attn/out and so on."""
    out = {}
    for (site, direction), statistics in measured.items():
        for index in range(statistics.layers):
            name = site.replace("layers/", f"layers/{index}/", 1)
            out[name, direction] = dataclasses.replace(statistics.layer(index), layers=1)
        if not statistics.layers:
            out[site, direction] = statistics
    order = lambda entry: [int(part) if part.isdigit() else -1 for part in entry[0][0].split("/")[1:2]]
    return dict(sorted(out.items(), key=order))


def site_plans(choices: Sequence[Choice], sites: Sequence[str]) -> dict[str, SitePlan]:
    """Returns the plan of each site, exact where nothing was chosen."""
    found: dict[str, dict] = {site: {} for site in sites}
    for choice in choices:
        of_site = found[choice.message.site]
        of_site[choice.message.direction] = choice.option.codec
        of_site[f"{choice.message.direction}_measured"] = measured_values(choice)
        if choice.option.feedback:
            of_site["error_feedback"] = True
    return {site: SitePlan(**of_site) for site, of_site in found.items()}


def measured_values(choice: Choice) -> dict[str, float]:
    """Returns what the plan's file keeps of a message."""
    statistics, codec = choice.statistics, choice.option.codec
    values = {
        "kurtosis": statistics.kurtosis,
        "outlying_channels": statistics.outlying_channels,
        "bits": choice.bits,
        "elements": choice.elements,
        "calls": choice.calls,
        "cost": choice.option.cost,
    }
    if choice.message.direction == "forward":
        values["sensitivity"] = statistics.sensitivity()
        if statistics.of_codec["diagonal_fed"].any():
            values["sensitivity_with_feedback"] = statistics.sensitivity(feedback=True)
    if statistics.gradient_error is not None:
        values["gradient_sensitivity"] = float(np.mean(statistics.gradient_sensitivities()))
    if codec != "none":
        snr = float(statistics.snr_db()[statistics.codecs.index(codec)])
        if math.isfinite(snr):
            values |= {"snr_db": snr, "guard_snr_db": snr - GUARD_DB}
    return values


def average_bits(choices: Sequence[Choice]) -> float:
    """Returns the bits of an element over all messages."""
    values = [choice.calls * choice.elements for choice in choices]
    return sum(choice.bits * n for choice, n in zip(choices, values)) / sum(values)


def chosen(messages: Sequence[Item], options: Sequence[Option], measured, elements: int) -> list[Choice]:
    """Returns the choices of `allocation`, in the order of the messages."""
    return [Choice(m, o, measured[m.site, m.direction], elements) for m, o in zip(messages, options)]
