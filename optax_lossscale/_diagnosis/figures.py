"""What a value and the same value in float32 say of each other.

A value is *off* if it differs from float32's by more than `TOLERANCE`, in the norm of
all of its elements, or is not finite where float32's is.
"""

import math
from typing import Any, NamedTuple

import numpy as np

TOLERANCE = 0.05
"""The relative error above which a value is off.

Rounding to 16 bits gives errors of a tenth of that in sound models of many layers.
"""

OFF = 1
"""What is wrong with a value: it is off."""

OVERFLOWED = 2
"""What is wrong with a value: it is off, as it is not finite though float32's is."""

INFINITE = 4
"""What is wrong with a value: it is infinite, in float32, too."""

UNDEFINED = 8
"""What is wrong with a value: it is NaN, in float32, too."""

# How many elements are compared at a time: few enough to stay in a processor's cache
_CHUNK = 2**15


class Figures(NamedTuple):
    """What a value and the same value in float32 say of each other.

    Attributes:
      count: how many elements there are.
      infinite: how many are infinite in float32.
      undefined: how many are NaN in float32.
      overflowed: how many are not finite though float32's are.
      nonzero: how many are finite and not zero in float32.
      vanished: how many of these are zero.
      squares: the sum of the squares of float32's finite elements.
      squared_distance: the sum of the squared differences of what is finite in both.
      squared_vanished: what vanished elements contribute to it.
      largest: the largest finite magnitude in float32.
    """

    count: int
    infinite: int
    undefined: int
    overflowed: int
    nonzero: int
    vanished: int
    squares: float
    squared_distance: float
    squared_vanished: float
    largest: float

    @property
    def wrong(self) -> int:
        """What is wrong: a sum of `OFF`, `OVERFLOWED`, `INFINITE`, `UNDEFINED`, or 0."""
        return (
            OFF * (self.error > TOLERANCE)
            + OVERFLOWED * (self.overflowed > 0)
            + INFINITE * (self.infinite > 0)
            + UNDEFINED * (self.undefined > 0)
        )

    @property
    def size(self) -> float:
        """The norm of float32's finite elements."""
        return math.sqrt(self.squares)

    @property
    def distance(self) -> float:
        """The norm of the difference of what is finite in both."""
        return math.sqrt(self.squared_distance)

    @property
    def error(self) -> float:
        """The distance over the size, or 1 if that is 0; infinite if any is overflowed."""
        return math.inf if self.overflowed else _ratio(self.distance, self.size)

    @property
    def lost(self) -> float:
        """Of the elements that are not zero in float32, the share that is zero."""
        return _ratio(self.vanished, self.nonzero)

    @property
    def lost_error(self) -> float:
        """The share of the squared difference that is due to these elements."""
        return _ratio(self.squared_vanished, self.squared_distance)

    @property
    def typical(self) -> float:
        """The root mean square of float32's finite elements."""
        finite = self.count - self.infinite - self.undefined
        return math.sqrt(self.squares / max(finite, 1))


def compare(low: Any, true: Any) -> Figures:
    """Compares a floating-point or complex array with the same array in float32."""
    low = np.asarray(low).ravel()
    true = np.asarray(true).ravel()
    # No square of a float32 overflows in float64.
    wide = np.result_type(true.dtype, np.float64)
    chunks = [
        _compare(low[n : n + _CHUNK].astype(wide), true[n : n + _CHUNK].astype(wide))
        for n in range(0, max(low.size, 1), _CHUNK)
    ]
    *columns, magnitudes = zip(*chunks, strict=True)
    return Figures._make([*map(sum, columns), max(magnitudes)])


def _compare(low: np.ndarray, true: np.ndarray) -> Figures:
    largest = _largest(true)
    if not math.isfinite(largest + _largest(low)):
        return _compare_what_is_finite(low, true)
    distance = low - true
    vanished = distance[(low == 0) & (true != 0)]
    return Figures(
        count=true.size,
        infinite=0,
        undefined=0,
        overflowed=0,
        nonzero=_count(true),
        vanished=vanished.size,
        squares=_squares(true),
        squared_distance=_squares(distance),
        squared_vanished=_squares(vanished),
        largest=largest,
    )


def _compare_what_is_finite(low: np.ndarray, true: np.ndarray) -> Figures:
    is_known = np.isfinite(true)
    is_finite = is_known & np.isfinite(low)
    overflowed = true[is_known & ~is_finite]
    figures = _compare(low[is_finite], true[is_finite])
    return figures._replace(
        count=true.size,
        infinite=_count(np.isinf(true)),
        undefined=_count(np.isnan(true)),
        overflowed=overflowed.size,
        nonzero=figures.nonzero + _count(overflowed),
        squares=figures.squares + _squares(overflowed),
        largest=max(figures.largest, _largest(overflowed)),
    )


def _count(x: np.ndarray) -> int:
    return int(np.count_nonzero(x))


def _squares(x: np.ndarray) -> float:
    return float(np.vdot(x, x).real)


def _largest(x: np.ndarray) -> float:
    """Returns the largest magnitude; it is not finite if any is not."""
    return float(np.abs(x).max(initial=0))


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return 1.0 if part else 0.0
