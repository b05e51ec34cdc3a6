"""Decides from a sweep whether a step's outputs depend on the loss scale.

Multiplying the loss by a power of two changes no digit of a correct step's gradients,
so its outputs are equal bit for bit at all loss scales at which nothing overflows or
underflows. A step that overflows is skipped, and a sweep leaves it out. What remains is
underflow, which becomes worse as the loss scale falls: each halving of the scale takes
one more bit from the smallest gradients, and later from larger ones, too. Of these
three outputs of a float16 step, only the first is correct:

    loss scale                    2**10     2**8     2**5     2**3
    a gradient, in 1e-9           11.00    10.94    11.18     7.45
    norm of scaled gradients        512      128       16        4
    whether that norm is > 100     True     True    False    False

An output of a wrong step shows one of two signs:

- It is a linear function of a power of the loss scale, as the norm is of the scale.
- It changes too early, as the last row does: between two neighboring loss scales, by
  more than two thirds of its largest change between lower ones. Changes caused by
  underflow start small and grow as the scale falls, as in the first row. The exception
  is an element that underflow changes all at once, such as the sign of a gradient.
"""

import numpy as np

from optax_lossscale.testing._numbers import Path, difference, norm
from optax_lossscale.testing._sweep import Sweep

# The powers that a gradient, its square and its root follow if the gradient is divided
# or multiplied by the loss scale. If an output follows several, the first counts.
_POWERS = (-1, 1, -2, 2, -0.5, 0.5)
# The largest relative difference of two neighboring slopes on a straight line. A
# heuristic: of three slopes in a row, a larger value would more often accept those that
# rounding made alike by chance; a smaller one would miss lines that noise bends.
_SLOPE_TOLERANCE = 0.02
# The outputs of a float16 step are compared only at loss scales down to this many
# exponents below the highest. A heuristic: half of the 40 exponents between overflow,
# at 2**16, and the smallest float16 number, 2**-24. If the largest gradient nearly
# overflows at the highest scale, only gradients that are more than 2**20 times smaller
# become zero within this range.
_REACH = 20
# A change between two neighboring scales may be caused by underflow if it is at most
# this share of the output's largest change between lower scales. From one scale of a
# sweep to the next, the rounding errors of elements that underflow become 4 or 8 times
# as large, so a share of about 1/4 or less is expected. The value leaves room for
# chance.
_UNDERFLOW_SHARE = 2 / 3


def powers_followed(sweep: Sweep) -> dict[Path, float]:
    """Returns the power of the loss scale that each output follows, by path.

    An output follows a power if its values at some four neighboring loss scales are a
    linear function of that power of the scale and are not constant. Other outputs are
    left out.
    """
    followed = {}
    for path, values in sweep.outputs.items():
        for power in _POWERS:
            if _is_linear(values, 2.0 ** (power * sweep.exponents)):
                followed.setdefault(path, power)
    return followed


def _is_linear(values: np.ndarray, x: np.ndarray) -> bool:
    """Whether some four neighboring rows are a linear, non-constant function of x."""
    slopes = _changes(values) / np.diff(x)[:, None]
    steepness = norm(slopes)
    min_steepness = np.minimum(steepness[:-1], steepness[1:])
    bends = norm(_changes(slopes))
    is_straight = (min_steepness > 0) & (bends <= _SLOPE_TOLERANCE * min_steepness)
    is_straight_twice = is_straight[:-1] & is_straight[1:]
    return bool(is_straight_twice.any())


def unexplained_changes(sweep: Sweep) -> dict[Path, tuple[float, float]]:
    """Finds outputs that change by more than underflow explains.

    Of a float16 step, only the loss scales within `_REACH` of the highest are compared.

    Returns:
      A dict from the path of each such output to the exponents of the two neighboring
      loss scales between which it changes, the higher one first. If there are several
      such pairs of loss scales, it holds the highest pair.
    """
    exponents = sweep.exponents
    reach = _REACH if sweep.is_narrow else np.inf
    is_in_reach = exponents[1:] >= exponents[0] - reach
    underflows = {path: _underflows(sweep, path) for path in sweep.outputs}
    has_underflow = {path: x.any(axis=1) for path, x in underflows.items()}
    n_underflowing = sum(has_underflow.values())
    unexplained = {}
    for path, values in sweep.outputs.items():
        # An output that is computed from many elements, such as a norm, may change if
        # one of them underflows, which shows in another output, such as Adam's moments.
        others_underflow = n_underflowing > has_underflow[path]
        changes = np.where(underflows[path], 0, _changes(values))
        is_unexplained = norm(changes) > _explained_change(sweep, path)
        is_fault = is_unexplained & is_in_reach & ~others_underflow
        if is_fault.any():
            first = int(is_fault.argmax())
            unexplained[path] = exponents[first], exponents[first + 1]
    return unexplained


def _underflows(sweep: Sweep, path: Path) -> np.ndarray:
    """Whether each element underflows between neighboring scales.

    The result is bool, of shape (scales - 1, elements).

    An element underflows between two loss scales if, at the lower one only, it has the
    value that it has when all gradients underflow. An output of a single element never
    counts as underflowing, because it may be a flag that says whether gradients are
    large.
    """
    before = sweep.outputs[path][:-1]
    after = sweep.outputs[path][1:]
    may_be_flag = before.shape[1] == 1
    if path not in sweep.underflowed or may_be_flag:
        return np.zeros(before.shape, bool)
    is_without_gradients = after == sweep.underflowed[path]
    return is_without_gradients & (before != after)


def _explained_change(sweep: Sweep, path: Path) -> np.ndarray:
    """Computes how much underflow, rounding and noise may change an output.

    The result is a norm for each pair of neighboring scales, of shape (scales - 1,).
    """
    values = sweep.outputs[path]
    norms = norm(_changes(values))
    largest_from_here = np.maximum.accumulate(norms[::-1])[::-1]
    largest_below = np.append(largest_from_here[1:], 0)
    by_underflow = _UNDERFLOW_SHARE * largest_below
    return np.maximum(by_underflow, sweep.tolerance(path, values[:-1]))


def _changes(rows: np.ndarray) -> np.ndarray:
    """Subtracts from each row the row before it."""
    return difference(rows[1:], rows[:-1])
