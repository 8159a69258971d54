"""The choice of a codec for each message under a budget: a multiple-choice knapsack, solved by dynamic programming.

    minimise sum of cost[m, k(m)]    so that    sum of size[m, k(m)] <= budget

Sizes are whole cells of a grid, the budget is CELLS of them. Sizes are rounded to the nearest, and where a solution
then passes the budget, it is solved again with as much less: what is returned always keeps to the budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from taco_jax.errors import ConfigError

CELLS = 20_000


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to send a message. cost: predicted; size: of the budget's kind, bits or seconds of all its calls."""

    codec: str
    feedback: bool
    cost: float
    size: float


@dataclasses.dataclass(frozen=True)
class Item:
    """One site and direction, and the ways to send it."""

    site: str
    direction: str
    options: tuple[Option, ...]


def cheapest(messages: Sequence[Item]) -> float:
    """Returns the least size that any choice has."""
    return sum(min(option.size for option in message.options) for message in messages)


def least_cost(messages: Sequence[Item]) -> float:
    """Returns the least cost that any choice has."""
    return sum(min(option.cost for option in message.options) for message in messages)


def within_size(messages: Sequence[Item], budget: float) -> list[Option]:
    """Returns an option for each message: the least cost of those whose sizes add up to at most `budget`.

    Raises:
      ConfigError: even the smallest ones are above the budget.
    """
    least = cheapest(messages)
    if least > budget * (1 + 1e-12):
        raise ConfigError(f"no choice of codecs has a size of {budget:g}; the least is {least:g}")
    # A choice of the smallest ones is always there, whatever rounding does.
    best = [min(message.options, key=lambda o: (o.size, o.cost)) for message in messages]
    cell = budget / CELLS
    # Roundings may add up to half a cell for each message: a choice that fits exactly must not be missed.
    limit = budget + cell * len(messages) / 2
    while cell > 0 and (chosen := _solved(messages, limit, cell)) is not None:
        over = sum(option.size for option in chosen) - budget
        if over <= budget * 1e-12:
            return min(best, chosen, key=lambda options: sum(option.cost for option in options))
        limit -= max(over, cell)
    return best


def within_cost(messages: Sequence[Item], bound: float) -> list[Option]:
    """Returns an option for each message: the least size of those whose costs add up to at most `bound`.

    Raises:
      ConfigError: even the best ones cost more than the bound.
    """
    least = least_cost(messages)
    if least > bound * (1 + 1e-12):
        raise ConfigError(f"no choice of codecs costs {bound:g}; the least is {least:g}")
    swap = lambda o: dataclasses.replace(o, cost=o.size, size=o.cost)
    swapped = [dataclasses.replace(m, options=tuple(map(swap, m.options))) for m in messages]
    return [swap(option) for option in within_size(swapped, bound)]


def _solved(messages: Sequence[Item], limit: float, cell: float) -> list[Option] | None:
    """The best choice whose rounded sizes fit into `limit`, None where there is none."""
    cells = int(np.floor(limit / cell + 1e-9))
    if cells < 0:
        return None
    # total[c]: the least cost of the messages so far with sizes of c cells and less.
    total, picks, widths = np.zeros(cells + 1), [], []
    for message in messages:
        width = [round(option.size / cell) for option in message.options]
        with_option = np.full((len(width), cells + 1), np.inf)
        for k, (option, w) in enumerate(zip(message.options, width)):
            if w <= cells:
                with_option[k, w:] = total[: cells + 1 - w] + option.cost
        pick = with_option.argmin(0)
        total = with_option[pick, np.arange(cells + 1)]
        picks.append(pick.astype(np.int16))  # of programs with thousands of collectives there are many
        widths.append(width)
    if not np.isfinite(total[cells]):
        return None
    chosen, at = [], cells
    for message, pick, width in zip(reversed(messages), reversed(picks), reversed(widths)):
        k = int(pick[at])
        chosen.append(message.options[k])
        at -= width[k]
    return chosen[::-1]
