"""The knapsack against all choices that there are."""

import itertools

import numpy as np
import pytest

from taco_jax.calibration.allocation import Item, Option, within_cost, within_size
from taco_jax.errors import ConfigError


def _messages(seed: int) -> list[Item]:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([4.125, 4.25, 5.125, 6.25, 16.0], size=(5, 4)) * rng.choice([1.0, 3.0, 40.0], size=(5, 1))
    options = lambda row: tuple(
        Option(f"c{k}", False, float(rng.exponential(1 / s)), float(s)) for k, s in enumerate(row)
    )
    return [Item(f"site{i}", "forward", options(row)) for i, row in enumerate(sizes)]


def _best(messages, key, other, bound):
    """The least sum of `key` over all choices whose sums of `other` are within the bound."""
    total = lambda choice, name: sum(getattr(option, name) for option in choice)
    choices = itertools.product(*(message.options for message in messages))
    return min(total(choice, key) for choice in choices if total(choice, other) <= bound * (1 + 1e-12))


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_choices(seed):
    messages = _messages(seed)
    sizes = [sum(pick(o.size for o in m.options) for m in messages) for pick in (min, max)]
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = sizes[0] + share * (sizes[1] - sizes[0])
        chosen = within_size(messages, budget)
        assert sum(option.size for option in chosen) <= budget * (1 + 1e-12)
        assert all(option in message.options for option, message in zip(chosen, messages))
        best = _best(messages, "cost", "size", budget)
        # Sizes are rounded to a 20,000th of the budget: with a 500th less it finds at least as good a choice.
        assert sum(o.cost for o in chosen) <= max(best, _tight(messages, budget)) + 1e-12
        bound = sum(option.cost for option in chosen)
        cheap = within_cost(messages, bound)
        assert sum(option.cost for option in cheap) <= bound * (1 + 1e-12)
        assert sum(option.size for option in cheap) <= sum(option.size for option in chosen) * 1.002


def _tight(messages, budget):
    least = sum(min(o.size for o in m.options) for m in messages)
    return _best(messages, "cost", "size", max(budget * 0.998, least))


def test_budgets_that_nothing_meets():
    messages = _messages(0)
    least = sum(min(o.size for o in m.options) for m in messages)
    with pytest.raises(ConfigError, match=f"no choice of codecs has a size of .*; the least is {least:g}"):
        within_size(messages, 0.999 * least)
    assert sum(o.size for o in within_size(messages, least)) == pytest.approx(least)
    with pytest.raises(ConfigError, match="no choice of codecs costs 0; the least is"):
        within_cost(messages, 0.0)
    exact = [Item(m.site, m.direction, (*m.options, Option("none", False, 0.0, 640.0))) for m in messages]
    assert {option.codec for option in within_cost(exact, 0.0)} == {"none"}
