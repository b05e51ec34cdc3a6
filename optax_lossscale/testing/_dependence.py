"""Whether a series of outputs, at falling loss scales, depends on the loss scale.

A loss scale that is a power of two changes no digit of a correct step's gradients: the outputs
are the same, bit for bit, wherever nothing overflows and nothing underflows. After an overflow the
step is skipped, and skipped steps are not compared. What remains is underflow, which dies away as
the loss scale rises: each doubling gives every gradient one more bit, until it has them all.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

_POWERS = (-1, 1, -2, 2, -0.5, 0.5)
_IN_A_ROW = 3  # differences between neighbours that must follow the same power of the loss scale
_TOLERANCE = 0.02  # for their ratios; with rounding in float16 they may be anything
_SHARE = 0.03  # of all that the output changes by anywhere: a change that counts
_DIES_AWAY = 2 / 3
_AT_ONCE = 0.15  # of the numbers that change anywhere: one may change its sign by underflow
_ROUNDING = 1e-6  # of an output


class Series(NamedTuple):
    """One output at several loss scales."""

    exponents: np.ndarray  # of the loss scales, falling
    values: np.ndarray  # what came out at each, a row: int64 of integers and bools, else float64
    without: np.ndarray | None  # what comes out where all gradients underflow, if that is known
    noise: float  # the norm of the difference between two runs that should be the same


def power(series: Series) -> float | None:
    """The power of the loss scale that an output follows somewhere, up to a constant."""
    exponents = series.exponents
    for first in range(len(exponents) - _IN_A_ROW):
        window = slice(first, first + _IN_A_ROW + 1)
        values = series.values[window]
        values = values[:, np.isfinite(values).all(0)]
        for power in _POWERS:
            slopes = np.diff(values, axis=0).T / np.diff(2.0 ** (power * exponents[window]))
            sizes = np.linalg.norm(slopes, axis=0)
            differences = np.linalg.norm(np.diff(slopes), axis=0)
            if sizes.min() > 0 and differences.max() <= _TOLERANCE * sizes.min():
                return power
    return None


def emerging(series: Series) -> np.ndarray:
    """Between which rows numbers emerge from underflow: the lower one is as without gradients."""
    upper, lower = series.values[:-1], series.values[1:]
    # Single numbers may be flags.
    is_array = series.values.dtype == np.float64 and series.values.shape[1] > 1
    if series.without is None or not is_array:
        return np.zeros(upper.shape, bool)
    return (lower == series.without) & (upper != lower)


def change(series: Series, looked_at: np.ndarray) -> int | None:
    """The first row to be looked at after which an output changes other than by underflow."""
    values = series.values
    rows = values if series.without is None else [*values, series.without]
    extent = max(norm_of_difference(values[0], row) for row in rows)
    if extent <= negligible(values[0], series.noise):
        return None
    changes = [norm_of_difference(*pair) for pair in pairwise(values)]
    moves = (values[:-1] != values[1:]) & ~emerging(series)
    many = _AT_ONCE * (values != values[0]).any(0).sum()
    for i in np.flatnonzero(looked_at):
        change = norm_of_difference(values[i, moves[i]], values[i + 1, moves[i]])
        least = max(_SHARE * extent, _DIES_AWAY * max(changes[i + 1 :], default=0))
        if change > least and moves[i].sum() > many:
            return int(i)
    return None


def negligible(x: np.ndarray, noise: float) -> float:
    """The norm of a difference that rounding may make."""
    return max(_ROUNDING * float(np.linalg.norm(x[np.isfinite(x)])), 8 * noise)


def norm_of_difference(x: np.ndarray, y: np.ndarray) -> float:
    """The norm of the difference, without what is not finite."""
    both = np.isfinite(x) & np.isfinite(y)
    return float(np.linalg.norm(x[both] - y[both]))
