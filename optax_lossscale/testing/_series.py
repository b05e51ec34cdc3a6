"""One output of a step at falling loss scales, and whether it depends on them.

A loss scale that is a power of two changes no digit of a correct step's gradients. So
its outputs are the same, bit for bit, wherever nothing overflows and nothing
underflows. After an overflow the step is skipped, and skipped trials are not compared.
What remains is underflow, which grows as the loss scale falls: each halving takes a bit
from the smallest gradients, and then from larger ones.

An output of a wrong step shows one of two signs. It may follow a power of the loss
scale. Or it changes by more between two neighbouring loss scales than between any lower
ones, which underflow cannot explain. The exception is a number that underflow takes as
a whole, such as the sign of a gradient: where it emerges, it changes all at once.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from optax_lossscale.testing._contents import Path, difference

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
_NOISE = 0.01  # how much two runs at the same loss scale may differ, relatively


class Series(NamedTuple):
    """One output at several loss scales, in falling order.

    Its values are flat: int64 for integers and bools, else float64. A fall is from one
    loss scale to the next.
    """

    exponents: np.ndarray  # of the loss scales, as powers of two; shape (scales,)
    values: np.ndarray  # at each loss scale; shape (scales, numbers)
    again: np.ndarray  # of a second run at the highest loss scale; shape (numbers,)
    # Without gradients: at a loss scale at which they all underflow, if there is one
    without: np.ndarray | None

    @property
    def noise(self) -> float:
        """The norm of the difference between two runs at the same loss scale."""
        return _distance(self.values[0], self.again)

    @property
    def is_noisy(self) -> bool:
        """Whether two runs at the same loss scale differ by too much to compare any."""
        return self.noise > _NOISE * _norm(self.values[0])

    def differs(self, x: np.ndarray, y: np.ndarray) -> bool:
        """Whether the output of two runs differs by more than rounding and noise."""
        return _distance(x, y) > self._negligible(x)

    def _negligible(self, x):
        """The largest norm of a difference from `x` that rounding and noise explain."""
        return np.maximum(_ROUNDING * _norm(x), 8 * self.noise)

    def power(self) -> float | None:
        """The power of the loss scale that the output follows over four neighbours.

        It follows a power if it is a linear function of it. None if it follows none of
        the powers -1, 1, -2, 2, -1/2 and 1/2.
        """
        for first in range(len(self.exponents) - _IN_A_ROW):
            window = slice(first, first + _IN_A_ROW + 1)
            values = self.values[window]
            exponents = self.exponents[window]
            for candidate in _POWERS:
                if _is_linear(values, 2.0 ** (candidate * exponents)):
                    return candidate
        return None

    def emerging(self) -> np.ndarray:
        """Which numbers emerge from underflow at which falls; shape (falls, numbers).

        A number emerges at a fall if at the lower of the two loss scales it is as it is
        without gradients, and at the higher one is not. If the output is a single
        number, it may be a flag of how large gradients are, and does not count.
        """
        before = self.values[:-1]
        after = self.values[1:]
        may_be_a_flag = before.shape[1] == 1
        if self.without is None or may_be_a_flag:
            return np.zeros(before.shape, bool)
        is_without = after == self.without
        return is_without & (before != after)

    def unexplained(self) -> np.ndarray:
        """At which falls it changes by more than underflow explains; bools, (falls,).

        A step in which all gradients can underflow is judged by its higher loss scales.
        """
        before = self.values[:-1]
        after = self.values[1:]
        changes = difference(after, before)
        sizes = _norm(changes)
        largest_down_from = np.maximum.accumulate(sizes[::-1])[::-1]
        largest_below = np.append(largest_down_from[1:], 0)
        by_underflow = _DIES_AWAY * largest_below
        explained = np.maximum(by_underflow, self._negligible(before))
        of_the_others = np.where(self.emerging(), 0, changes)
        is_unexplained = _norm(of_the_others) > explained
        if self.without is None:
            return is_unexplained
        lowest = self.exponents[0] - _REACH
        return is_unexplained & (self.exponents[1:] >= lowest)


def powers(all_series: Mapping[Path, Series]) -> dict[Path, float]:
    """The power of the loss scale that each output follows, if it follows one."""
    followed = {}
    for path, series in all_series.items():
        power = series.power()
        if power is not None:
            followed[path] = power
    return followed


def unexplained_changes(
    all_series: Mapping[Path, Series],
) -> dict[Path, tuple[float, float]]:
    """The outputs that change by more than underflow explains, by path.

    Each with the exponents of the loss scales between which it first does, the higher
    one first.
    """
    # 1 at each fall at which numbers of the output emerge, and 0 at all others
    emerges = {
        path: series.emerging().any(axis=1).astype(int)
        for path, series in all_series.items()
    }
    how_many_emerge = sum(emerges.values())
    changes = {}
    for path, series in all_series.items():
        # Where numbers of another output emerge from underflow, an output that is
        # computed from many numbers may change for that reason.
        others_that_emerge = how_many_emerge - emerges[path]
        is_unexplained = series.unexplained() & (others_that_emerge == 0)
        falls = np.flatnonzero(is_unexplained)
        if falls.size:
            first = falls[0]
            changes[path] = series.exponents[first], series.exponents[first + 1]
    return changes


def _is_linear(values, x):
    """Whether the rows of values are a linear function of x, and not constant."""
    is_finite = np.isfinite(values).all(axis=0)
    rises = np.diff(values[:, is_finite], axis=0)
    slopes = rises / np.diff(x)[:, None]
    bends = np.diff(slopes, axis=0)
    least_slope = np.linalg.norm(slopes, axis=1).min()
    largest_bend = np.linalg.norm(bends, axis=1).max()
    return least_slope > 0 and largest_bend <= _TOLERANCE * least_slope


def _norm(x):
    """The L2 norm of the finite numbers of an array, over its last axis."""
    finite = np.where(np.isfinite(x), x, 0)
    return np.linalg.norm(finite, axis=-1)


def _distance(x, y):
    """The L2 norm of the difference, over the places where both arrays are finite."""
    return _norm(difference(x, y))
