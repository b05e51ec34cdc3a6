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

INFINITE = 2
"""What is wrong with a value: it is infinite, in float32, too."""

UNDEFINED = 4
"""What is wrong with a value: it is NaN, in float32, too."""


class Figures(NamedTuple):
    """What a value and the same value in float32 say of each other.

    Attributes:
      wrong: what is wrong: a sum of `OFF`, `INFINITE` and `UNDEFINED`, or 0.
      error: the norm of their difference over that of float32's value, or 1 if that is
        0; infinite if an element is not finite though float32's is.
      distance: the norm of their difference.
      lost: of the elements that are not zero in float32, the share that is zero.
      lost_error: the share of the squared difference that is due to these elements.
      largest: the largest finite magnitude in float32.
      size: the norm of float32's finite elements.
      typical: their root mean square.
    """

    wrong: int
    error: float
    distance: float
    lost: float
    lost_error: float
    largest: float
    size: float
    typical: float


def compare(low: Any, true: Any) -> Figures:
    """Compares a floating-point or complex array with the same array in float32."""
    # No square of a float32 overflows in float64.
    wide = np.result_type(true.dtype, np.float64)
    low = np.asarray(low).ravel().astype(wide)
    true = np.asarray(true).ravel().astype(wide)
    is_known = np.isfinite(true)
    is_finite = is_known & np.isfinite(low)
    wrong = 0
    if not is_known.all():
        wrong += INFINITE * bool(np.isinf(true).any())
        wrong += UNDEFINED * bool(np.isnan(true).any())
    magnitudes = np.abs(_where(is_known, true))
    low = _where(is_finite, low)
    true = _where(is_finite, true)
    distances = np.abs(low - true)
    is_lost = (low == 0) & (true != 0)
    size = _norm(magnitudes)
    distance = _norm(distances)
    error = math.inf
    if np.array_equal(is_known, is_finite):
        error = _ratio(distance, size)
    return Figures(
        wrong=wrong + OFF * (error > TOLERANCE),
        error=error,
        distance=distance,
        lost=_ratio(int(np.count_nonzero(is_lost)), int(np.count_nonzero(true))),
        lost_error=_ratio(_norm(distances[is_lost]), distance) ** 2,
        largest=float(magnitudes.max(initial=0)),
        size=size,
        typical=size / max(magnitudes.size, 1) ** 0.5,
    )


def _where(is_kept: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x if is_kept.all() else x[is_kept]


def _norm(x: np.ndarray) -> float:
    # As fast as `np.linalg.norm`, which starts threads.
    return math.sqrt(np.einsum("i,i->", x, x))


def _ratio(part: float, whole: float) -> float:
    if whole:
        return float(part / whole)
    return 1.0 if part else 0.0
