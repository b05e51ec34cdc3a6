"""Whether a step's outputs depend on the loss scale, from a sweep of loss scales.

A loss scale that is a power of two changes no digit of a correct step's gradients. So
its outputs are the same, bit for bit, wherever nothing overflows and nothing
underflows. After an overflow the step is skipped, and skipped trials are not compared.
What remains is underflow, which grows as the loss scale falls: each halving takes a bit
from the smallest gradients, and then from larger ones.

An output of a wrong step shows one of two signs. It may follow a power of the loss
scale. Or it changes by more between two neighbouring loss scales than between any lower
ones, which underflow cannot explain. The exception is a number that underflow takes as
a whole, such as the sign of a gradient, which changes all at once.
"""

import numpy as np

from optax_lossscale.testing._numbers import Path, difference, norm
from optax_lossscale.testing._sweep import Sweep

_POWERS = (-1, 1, -2, 2, -0.5, 0.5)
# How far apart the slopes of neighbours may be, relatively. Changes by rounding in
# float16 may have any slopes, which are hardly ever that close at three neighbours.
_TOLERANCE = 0.02
# Float16 has 40 exponents between overflow and zero. Down to this far below the highest
# loss scale, few gradients underflow, and those are small.
_REACH = 20
# A change by underflow is at most this much of the largest one at lower loss scales.
_DIES_AWAY = 2 / 3


def powers(sweep: Sweep) -> dict[Path, float]:
    """The power of the loss scale that each output follows, if it follows one.

    It follows one if its values at four neighbouring scales are a linear function of
    that power of the scale.
    """
    followed = {}
    for path, values in sweep.outputs.items():
        for power in _POWERS:
            if _is_linear(values, 2.0 ** (power * sweep.exponents)):
                followed.setdefault(path, power)
    return followed


def _is_linear(values, x):
    """Whether some four neighbouring rows are a linear, non-constant function of x."""
    slopes = _steps(values) / np.diff(x)[:, None]
    steepness = norm(slopes)
    least_steep = np.minimum(steepness[:-1], steepness[1:])
    bends = norm(_steps(slopes))
    is_straight = (least_steep > 0) & (bends <= _TOLERANCE * least_steep)
    is_straight_twice = is_straight[:-1] & is_straight[1:]
    return bool(is_straight_twice.any())


def unexplained_changes(sweep: Sweep) -> dict[Path, tuple[float, float]]:
    """By path, where each output changes by more than underflow explains.

    The values are the exponents of the highest two neighbouring loss scales between
    which it does, the higher one first. Other outputs are left out. A step in which all
    gradients can underflow is judged by its higher loss scales.
    """
    exponents = sweep.exponents
    reach = _REACH if sweep.underflowed else np.inf
    is_in_reach = exponents[1:] >= exponents[0] - reach
    underflows = {path: _underflows(sweep, path) for path in sweep.outputs}
    where_any = [x.any(axis=1) for x in underflows.values()]
    how_many_underflow = np.sum(where_any, axis=0)
    unexplained = {}
    for path, values in sweep.outputs.items():
        # Where numbers of another output underflow, an output that is computed from
        # many numbers may change for that reason.
        others_underflow = how_many_underflow > underflows[path].any(axis=1)
        changes = np.where(underflows[path], 0, _steps(values))
        is_unexplained = norm(changes) > _explained(sweep, path)
        where = np.flatnonzero(is_unexplained & is_in_reach & ~others_underflow)
        if where.size:
            first = where[0]
            unexplained[path] = exponents[first], exponents[first + 1]
    return unexplained


def _underflows(sweep, path):
    """Which numbers underflow between which loss scales; bools, (scales - 1, numbers).

    A number underflows between two scales if it equals its value without gradients at
    the lower one, and differs from it at the higher one.
    If the output is a single number, it may be a flag of how large gradients are, and
    does not count.
    """
    before = sweep.outputs[path][:-1]
    after = sweep.outputs[path][1:]
    may_be_a_flag = before.shape[1] == 1
    if path not in sweep.underflowed or may_be_a_flag:
        return np.zeros(before.shape, bool)
    is_without_gradients = after == sweep.underflowed[path]
    return is_without_gradients & (before != after)


def _explained(sweep, path):
    """By how much underflow and rounding may change an output; shape (scales - 1,)."""
    values = sweep.outputs[path]
    sizes = norm(_steps(values))
    largest_down_from = np.maximum.accumulate(sizes[::-1])[::-1]
    largest_below = np.append(largest_down_from[1:], 0)
    return np.maximum(_DIES_AWAY * largest_below, sweep.negligible(path, values[:-1]))


def _steps(values):
    """The difference of each row from the one before."""
    return difference(values[1:], values[:-1])
