"""The choice of codecs under a budget, against all choices and sums by hand."""

import itertools

import numpy as np
import pytest

from taco_jax.dropin.allocation import Budget, Option, allocate


def every_choice(rows, bits):
    """The least error of all choices that keep the average."""
    total = sum(weight for weight, _ in rows)
    fits = [
        choice
        for choice in itertools.product(*(options for _, options in rows))
        if sum(w * o.bits for (w, _), o in zip(rows, choice)) <= bits * total
    ]
    return min(sum(w * o.error for (w, _), o in zip(rows, choice)) for choice in fits)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_of_all(seed):
    """Never above the average; and no worse than the best choice of a thousandth less, for sizes are rounded."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(6):
        bits = [4.125, 5.125, 6.125, 8.125, 32.0]
        errors = [*sorted(10 ** random.uniform(-5, -1, 4), reverse=True), 0.0]
        rows.append((random.uniform(0.5, 1.5), [Option(str(b), b, e) for b, e in zip(bits, errors)]))
    total = sum(w for w, _ in rows)
    for bits in (4.9, 5.5, 7.0, 12.0, 32.0):
        chosen = allocate(Budget(bits), rows)
        assert sum(w * o.bits for (w, _), o in zip(rows, chosen)) <= bits * total * (1 + 1e-6)
        error = sum(w * o.error for (w, _), o in zip(rows, chosen))
        assert every_choice(rows, bits) <= error * (1 + 1e-9) <= every_choice(rows, 0.999 * bits) * (1 + 1e-8)
    assert all(o.error == 0 for o in allocate(Budget(32), rows))


def test_a_step_that_goes_over_two_costs_both():
    options = [Option("a", 4.0, 1.0), Option("b", 8.0, 0.5), Option("c", 9.0, 0.4)]
    chosen = lambda bits: allocate(Budget(bits), [(1.0, options)])[0].codec
    assert [chosen(bits) for bits in (4, 5.5, 8, 8.9, 9)] == ["a", "a", "b", "b", "c"]


def test_what_a_budget_leaves_is_used():
    """A codec that loses a little less for a few bits is taken where the next one is too large, though a mixture of
    its neighbours would lose less."""
    options = [Option("int4h", 4.125, 0.0245), Option("mxfp4", 4.25, 0.0229), Option("int5h", 5.125, 0.0054)]
    assert [allocate(Budget(bits), [(1.0, options)])[0].codec for bits in (4.2, 5, 5.2)] == ["int4h", "mxfp4", "int5h"]


def test_the_fewest_bits_that_reach_an_snr():
    options = [Option("a", 4.0, 1e-2), Option("b", 4.5, 1e-1), Option("c", 6.0, 1e-3), Option("none", 16.0, 0.0)]
    at = lambda snr: allocate(Budget(snr=snr), [(1.0, options)])[0].codec
    assert [at(snr) for snr in (5, 20, 21, 30, 31)] == ["a", "a", "c", "c", "none"]
