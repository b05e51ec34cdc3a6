"""Fewer cases than all combinations: every two values meet in one of them."""

import itertools

import pytest


def pairwise(**parameters):
    """Parametrizes a test over combinations in which any two values of two parameters meet.

    Each parameter is a dict of its values by their ids. A fault that takes one value, or two
    together, shows up in some case, as it would in the full product of all parameters.
    """
    names = [*parameters]
    cases = [*itertools.product(*(parameters[name] for name in names))]
    pairs_in = lambda case: set(itertools.combinations(zip(names, case, strict=True), 2))
    missing = set().union(*map(pairs_in, cases))
    chosen = []
    while missing:
        case = max(cases, key=lambda case: len(pairs_in(case) & missing))  # the first of the best
        chosen.append(case)
        missing -= pairs_in(case)
    values = [[parameters[n][i] for n, i in zip(names, case, strict=True)] for case in chosen]
    return pytest.mark.parametrize(names, values, ids=["-".join(case) for case in chosen])
