"""Parametrizing tests, so that quick tests are few: the other cases are slow.

Values are given as a dict by their ids, or as names that are their own ids.
"""

import itertools

import pytest


def product(**parameters):
    """Parametrizes a test over all combinations; in quick tests, each value is in some case."""
    values = []
    seen = set()
    for case in itertools.product(*parameters.values()):
        # A case is quick if it has a value that none before it has.
        its_own = set(zip(parameters, case, strict=True))
        marks = pytest.mark.slow if its_own <= seen else ()
        seen |= its_own
        arguments = [
            _value(parameters[name], i)
            for name, i in zip(parameters, case, strict=True)
        ]
        values.append(pytest.param(*arguments, id="-".join(case), marks=marks))
    return pytest.mark.parametrize(list(parameters), values)


def quick(name, cases, *chosen):
    """Parametrizes a test over cases, of which those not chosen are slow."""
    assert set(chosen) <= set(cases)
    mark = lambda case: () if case in chosen else pytest.mark.slow
    values = [pytest.param(_value(cases, i), id=i, marks=mark(i)) for i in cases]
    return pytest.mark.parametrize(name, values)


def one_in(n, name, cases, first=0):
    """As `quick`, where no case is more telling than another: the first of each `n` are chosen.

    Of two tests with the same cases, `first` lets one begin where the other leaves out.
    """
    return quick(name, cases, *[*cases][first::n])


def _value(cases, i):
    return cases[i] if isinstance(cases, dict) else i
