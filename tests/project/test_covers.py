"""The covers that choose the cases of other tests: complete, small, and the same in every run."""

import itertools

import pytest
from covers import cover

FACTORS = {"a": (0, 1, 2, 3), "b": "xy", "c": (None, 7.5, "z"), "d": (False, True), "e": ("p", "q", "r")}


@pytest.mark.parametrize("t,most", [(1, 4), (2, 16), (3, 52)])
def test_every_combination_meets(t, most):
    cases = cover(t, **FACTORS)
    names = list(FACTORS)
    for chosen in itertools.combinations(range(len(names)), t):
        wanted = set(itertools.product(*(FACTORS[names[i]] for i in chosen)))
        assert {tuple(case[i] for i in chosen) for case in cases} == wanted
    assert len(cases) == len(set(cases)) <= most
    assert cases == cover(t, **FACTORS)


def test_as_many_as_there_are_factors_is_the_full_product():
    few = {"a": (1, 2, 3), "b": "xy"}
    for t in (2, 3):
        assert set(cover(t, **few)) == set(itertools.product(*few.values())) and len(cover(t, **few)) == 6
