"""Whether an output of a step depends on the loss scale, judged by a series of runs.

A loss scale that is a power of two changes no digit of a correct step's gradients. So
its outputs are the same, bit for bit, wherever nothing overflows and nothing
underflows. After an overflow the step is skipped, and skipped steps are not compared.
What remains is underflow, which dies away as the loss scale rises: each doubling gives
every gradient one more bit, until it has them all.

So an output of a wrong step shows one of two signs. It may follow a power of the loss
scale (`power`). Or it changes by more between two neighbouring loss scales than between
lower ones, where more underflows (`change`).
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

_POWERS = (-1, 1, -2, 2, -0.5, 0.5)
# How many differences in a row must follow the same power of the loss scale
_IN_A_ROW = 3
# How far apart their slopes may be, relatively. Changes by rounding in float16 may have
# any slopes, which are hardly ever that close.
_TOLERANCE = 0.02
# Float16 has 40 exponents between overflow and zero. Down to this far below the highest
# loss scale, few gradients underflow, and those are small.
_REACH = 20
# A change by underflow is at most this much of the largest one at lower loss scales.
_DIES_AWAY = 2 / 3
_ROUNDING = 1e-6  # how much rounding may change an output, relatively


class Series(NamedTuple):
    """One output at several loss scales, in falling order."""

    exponents: np.ndarray  # of the loss scales, as powers of two; shape (scales,)
    # The output at each loss scale, flat: int64 for integers and bools, else float64;
    # shape (scales, numbers)
    values: np.ndarray
    # The output at a loss scale at which all gradients underflow, if there is one
    without: np.ndarray | None
    noise: float  # the norm of the difference between two runs at the same loss scale


def power(series: Series) -> float | None:
    """The power of the loss scale that an output follows over four neighbouring scales.

    It follows a power if it is a linear function of it. None if it follows none of the
    powers -1, 1, -2, 2, -1/2 and 1/2.
    """
    for first in range(len(series.exponents) - _IN_A_ROW):
        window = slice(first, first + _IN_A_ROW + 1)
        values = series.values[window]
        exponents = series.exponents[window]
        for candidate in _POWERS:
            if _is_linear(values, 2.0 ** (candidate * exponents)):
                return candidate
    return None


def _is_linear(values, x):
    """Whether the rows of values are a linear function of x, and not constant."""
    is_finite = np.isfinite(values).all(axis=0)
    rises = np.diff(values[:, is_finite], axis=0)
    slopes = rises / np.diff(x)[:, None]
    bends = np.diff(slopes, axis=0)
    least_slope = np.linalg.norm(slopes, axis=1).min()
    largest_bend = np.linalg.norm(bends, axis=1).max()
    return least_slope > 0 and largest_bend <= _TOLERANCE * least_slope


def emerging(series: Series) -> np.ndarray:
    """Which numbers emerge from underflow in which rows; shape (scales - 1, numbers).

    A number emerges in a row if it differs from the next row, where it is as it is
    without gradients. An output of one number may be a flag, and does not count.
    """
    upper = series.values[:-1]
    lower = series.values[1:]
    may_be_a_flag = upper.shape[1] == 1
    if series.without is None or may_be_a_flag:
        return np.zeros(upper.shape, bool)
    is_without = lower == series.without
    return is_without & (upper != lower)


def change(series: Series, looked_at: np.ndarray) -> int | None:
    """The first row after which an output changes other than underflow would change it.

    `looked_at` says for each row but the last whether to look at it. None if there is
    no such row.
    """
    values = series.values
    if series.without is not None:
        lowest_looked_at = series.exponents[0] - _REACH
        looked_at = looked_at & (series.exponents[1:] >= lowest_looked_at)
    changes = [distance(upper, lower) for upper, lower in pairwise(values)]
    moves = ~emerging(series)
    for row in np.flatnonzero(looked_at):
        largest_below = max(changes[row + 1 :], default=0)
        least = max(negligible(values[row], series.noise), _DIES_AWAY * largest_below)
        is_moving = moves[row]
        if distance(values[row, is_moving], values[row + 1, is_moving]) > least:
            return int(row)
    return None


def negligible(x: np.ndarray, noise: float) -> float:
    """The largest norm of a difference that rounding and noise explain."""
    return max(_ROUNDING * norm(x), 8 * noise)


def norm(x: np.ndarray) -> float:
    """The L2 norm of the finite numbers of an array."""
    return float(np.linalg.norm(x[np.isfinite(x)]))


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """The L2 norm of the difference, over the places where both arrays are finite."""
    are_finite = np.isfinite(x) & np.isfinite(y)
    difference = x[are_finite] - y[are_finite]
    return float(np.linalg.norm(difference))
