"""Covers: few cases in which every combination of values that is asked for occurs; the same ones in every run."""

import functools
import itertools

import pytest


def cover(t: int, **factors) -> list[tuple]:
    """Cases (tuples in the order of the keywords) with every combination of the values of any t factors."""
    return cover_groups(itertools.combinations(factors, min(t, len(factors))), **factors)


def cover_groups(groups, **factors) -> list[tuple]:
    """Cases with every combination of the values of each group of factors.

    groups: tuples of names, as (("element", "operation"), ("dtype",)). Values of a factor in no group go round.
    """
    names, values = list(factors), [tuple(v) for v in factors.values()]
    groups = tuple(tuple(sorted(names.index(name) for name in group)) for group in groups)
    return [tuple(v[i] for v, i in zip(values, case)) for case in _cover(groups, tuple(map(len, values)))]


@functools.cache
def _cover(groups, sizes) -> tuple[tuple[int, ...], ...]:
    """Cases as the numbers of their values.

    Greedy: a case starts from the first combination that is missing and takes for every other factor the value that
    completes most missing ones. Of several orders of the factors the best is taken. Not minimal, but near it.
    """
    missing = dict.fromkeys(
        (group, values) for group in groups for values in itertools.product(*(range(sizes[k]) for k in group))
    )
    cases = []
    while missing:
        group, values = next(iter(missing))
        start = dict(zip(group, values))
        tries = [_complete(start, sizes, groups, missing, len(cases), first) for first in range(len(sizes))]
        case = max(tries, key=lambda case: sum((g, tuple(case[k] for k in g)) in missing for g in groups))
        for g in groups:
            missing.pop((g, tuple(case[k] for k in g)), None)
        cases.append(tuple(case[k] for k in range(len(sizes))))
    return tuple(cases)


def _complete(start, sizes, groups, missing, number, first) -> dict[int, int]:
    case = dict(start)
    for k in (*range(first, len(sizes)), *range(first)):
        if k in case:
            continue
        known = [g for g in groups if k in g and all(i == k or i in case for i in g)]
        # Ties go round, so that the combinations that nobody asks for differ from case to case.
        gains = [
            (
                sum((g, tuple(v if i == k else case[i] for i in g)) in missing for g in known),
                (v - number) % sizes[k],
            )
            for v in range(sizes[k])
        ]
        case[k] = gains.index(max(gains))
    return case


def in_turn(names) -> list:
    """Parameters (name, False) and (name, True): each name with one of them by day, in turn, the others marked slow."""
    return [
        pytest.param(name, value, marks=() if value == bool(k % 2) else pytest.mark.slow)
        for k, name in enumerate(names)
        for value in (False, True)
    ]
