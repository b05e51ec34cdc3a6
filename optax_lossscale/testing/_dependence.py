"""Whether a series of outputs, at falling loss scales, depends on the loss scale.

A loss scale that is a power of two changes no digit of a correct step's gradients: the
outputs are the same, bit for bit, wherever nothing overflows and nothing underflows.
After an overflow the step is skipped, and skipped steps are not compared. What remains
is underflow, which dies away as the loss scale rises: each doubling gives every
gradient one more bit, until it has them all.

So an output of a wrong step is known by either of two signs: it follows a power of the
loss scale, or it changes by more between two neighbours than at lower loss scales,
where more underflows.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

_POWERS = (-1, 1, -2, 2, -0.5, 0.5)
# Differences between neighbours that must follow the same power of the loss scale
_IN_A_ROW = 3
_TOLERANCE = 0.02  # for their ratios; with rounding in float16 they may be anything
# In float16 there are 40 exponents from overflow to zero. This far below the highest
# loss scale, few gradients underflow, and those are small.
_REACH = 20
_DIES_AWAY = 2 / 3  # of the largest change at lower loss scales
_ROUNDING = 1e-6  # of an output


class Series(NamedTuple):
    """One output at several loss scales."""

    exponents: np.ndarray  # of the loss scales, falling
    # What came out at each, a row: int64 of integers and bools, else float64
    values: np.ndarray
    # What comes out where all gradients underflow, if that is known
    without: np.ndarray | None
    noise: float  # the norm of the difference between two runs that should be the same


def power(series: Series) -> float:
    """The power of the loss scale that an output follows somewhere, up to a constant; or 0."""
    for first in range(len(series.exponents) - _IN_A_ROW):
        window = slice(first, first + _IN_A_ROW + 1)
        for candidate in _POWERS:
            scales = 2.0 ** (candidate * series.exponents[window])
            if _is_linear(series.values[window], scales):
                return candidate
    return 0


def _is_linear(values, x):
    """Whether all rows of values lie on one line over x, which is not level."""
    with np.errstate(invalid="ignore"):
        rises = np.diff(values, axis=0)
        slopes = rises / np.diff(x)[:, None]
        bends = np.diff(slopes, axis=0)
        least_slope = np.linalg.norm(slopes, axis=1).min()
        largest_bend = np.linalg.norm(bends, axis=1).max()
    return least_slope > 0 and largest_bend <= _TOLERANCE * least_slope


def emerging(series: Series) -> np.ndarray:
    """Between which rows numbers emerge from underflow: the lower one is as without gradients."""
    upper = series.values[:-1]
    lower = series.values[1:]
    may_be_a_flag = upper.shape[1] == 1
    if series.without is None or may_be_a_flag:
        return np.zeros(upper.shape, bool)
    return (lower == series.without) & (upper != lower)


def change(series: Series, looked_at: np.ndarray) -> int | None:
    """The first row to be looked at after which an output changes other than by underflow."""
    values = series.values
    if series.without is not None:
        lowest_looked_at = series.exponents[0] - _REACH
        looked_at = looked_at & (series.exponents[1:] >= lowest_looked_at)
    changes = []
    for upper, lower in pairwise(values):
        changes.append(distance(upper, lower))
    moves = ~emerging(series)
    for row in np.flatnonzero(looked_at):
        largest_below = max(changes[row + 1 :], default=0)
        least = max(
            _DIES_AWAY * largest_below,
            _ROUNDING * distance(values[row], 0),
            8 * series.noise,
        )
        is_moving = moves[row]
        upper = values[row, is_moving]
        lower = values[row + 1, is_moving]
        if distance(upper, lower) > least:
            return int(row)
    return None


def distance(x: np.ndarray, y: np.ndarray | int) -> float:
    """The norm of the difference, without what is not finite."""
    with np.errstate(invalid="ignore"):
        difference = x - y
    return float(np.linalg.norm(difference[np.isfinite(difference)]))
