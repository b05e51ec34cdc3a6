"""Whether an output depends on the loss scale.

A loss scale that is a power of two changes no digit of a correct step's gradients, where nothing
overflows and nothing underflows. What overflows is skipped and not compared. What underflows loses
digits, and changes most numbers by little of what the step changes them by.
"""

import numpy as np

_POWERS = (-1, 1, -2, 2, -0.5, 0.5)
_TOLERANCE = 0.02  # for the ratio of two differences; with rounding in float16 it may be anything
_UNDERFLOW = 0.1  # may change a number by this share of what the step does
_MANY = 0.25  # of the numbers that change anywhere: underflow may turn the sign of some
_ROUNDING = 1e-6  # of a number


def power(values: list[np.ndarray], gap: int) -> float | None:
    """The power of the loss scale that an output follows, up to a constant.

    Its values are those at three loss scales, from the highest down, which are `gap` bits apart.
    So from `c + s**p` at each come two differences, one of them `2**(p * gap)` times the other.
    """
    numbers = np.stack(values).astype(np.float64)
    is_finite = np.isfinite(numbers).all(axis=0)
    upper, lower = -np.diff(numbers[:, is_finite], axis=0)
    for power in _POWERS:
        error = np.linalg.norm(upper - 2.0 ** (power * gap) * lower)
        if upper.any() and error <= _TOLERANCE * np.linalg.norm(upper):
            return power
    return None


def changes(high: np.ndarray, low: np.ndarray, start: np.ndarray, noise: float) -> bool:
    """Whether many numbers change by more than rounding and underflow may change them.

    Args:
      high: an output at a loss scale at which little underflows.
      low: the same at another loss scale.
      start: what the step starts from, or `high` itself where nothing underflows.
      noise: how far apart two runs are that should be the same.
    """
    is_finite = np.isfinite(high) & np.isfinite(low)
    if np.any(np.isfinite(high) != np.isfinite(low)):
        return True
    high = high[is_finite]
    change = np.abs(high - low[is_finite])
    made_by_step = np.abs(high - np.nan_to_num(start[is_finite], posinf=0, neginf=0))
    allowed = np.maximum(_UNDERFLOW * made_by_step, _ROUNDING * np.abs(high)) + 8 * noise
    moving = np.count_nonzero((change > 0) | (made_by_step > 0))
    return bool(np.count_nonzero(change > allowed) > _MANY * moving)


def share_that_vanished(high: np.ndarray, low: np.ndarray, without: np.ndarray) -> float:
    """The share of numbers that come out at the low loss scale as they do without gradients."""
    return float(np.mean((low == without) & (high != low)))
