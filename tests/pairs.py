"""Pairwise cover: few cases in which every two values of any two parameters meet."""

import itertools


def pairwise(**values) -> list[tuple]:
    """Cases (tuples in the order of the keywords) that cover all pairs; the same ones in every run.

    Greedy: each case starts from the first pair that is still missing and takes, for every other parameter, the value
    that covers most. Not minimal, but within a few cases of it.
    """
    names = list(values)
    wanted = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in range(len(values[names[i]]))
        for b in range(len(values[names[j]]))
    }
    order = sorted(wanted)
    cases = []
    while wanted:
        (i, a), (j, b) = next(pair for pair in order if pair in wanted)
        case = {i: a, j: b}
        for k in range(len(names)):
            if k not in case:
                # Ties go round, so that the pairs that nobody needs differ from case to case.
                choices = range(len(values[names[k]]))
                best = [(_gain(case, k, v, wanted), (v - len(cases)) % len(choices), v) for v in choices]
                case[k] = max(best)[2]
        wanted -= set(itertools.combinations(sorted(case.items()), 2))
        cases.append(tuple(values[name][case[k]] for k, name in enumerate(names)))
    return cases


def _gain(case, k, v, wanted) -> int:
    return sum(tuple(sorted(((k, v), item))) in wanted for item in case.items())
