"""Fewer cases than all: those in which every two values meet, or some, the others being slow."""

import itertools

import pytest


def pairwise(**parameters):
    """Parametrizes a test over combinations in which any two values of two parameters meet.

    Each parameter is a dict of its values by their ids. A fault that takes one value, or two
    together, shows up in some case, as it would in the full product of all parameters.
    """
    names = [*parameters]
    cases = [*itertools.product(*(parameters[name] for name in names))]
    pairs_in = lambda case: set(
        itertools.combinations(zip(names, case, strict=True), 2)
    )
    missing = set().union(*map(pairs_in, cases))
    chosen = []
    while missing:
        # the first of the best
        case = max(cases, key=lambda case: len(pairs_in(case) & missing))
        chosen.append(case)
        missing -= pairs_in(case)
    values = [
        [parameters[n][i] for n, i in zip(names, case, strict=True)] for case in chosen
    ]
    return pytest.mark.parametrize(
        names, values, ids=["-".join(case) for case in chosen]
    )


def quick(name, cases, *chosen):
    """Parametrizes a test over the values of a dict, by their ids; those not chosen are slow."""
    assert set(chosen) <= set(cases)
    mark = lambda case: () if case in chosen else pytest.mark.slow
    values = [
        pytest.param(value, id=case, marks=mark(case)) for case, value in cases.items()
    ]
    return pytest.mark.parametrize(name, values)
