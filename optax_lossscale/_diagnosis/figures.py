"""Figures: how far a result is from float32's, and how large it is."""

import dataclasses
import math

import numpy as np
from jax.typing import ArrayLike

TOLERANCE = 0.05
"""How far numbers may be from float32's, relative to those, and still be right."""

LARGE_SHARE = 0.2
"""The share of an array's numbers that may be off or lost, or chosen otherwise."""

# Of the mean size: smaller numbers are off relative to this and not to themselves, so
# that those near 0 do not count much.
_LEAST = 0.25


@dataclasses.dataclass(frozen=True, eq=False)
class Figures:
    """How far a result is from float32's, and how large it is.

    Attributes:
      count: how many numbers the result has; a complex number counts as two.
      error: how far it is from float32's: the norm of the difference, relative to the
        norm of float32's. It is 0 if the numbers of both are all 0, 1 if only float32's
        are, and infinite if the result is bad.
      distance: the norm of the difference, not relative; infinite if the result is bad.
      off_share: the share of its numbers that are off by more than 5% of themselves, or
        of a quarter of the mean size where that is more.
      bad: whether a number is not finite where float32's is.
      nan: whether a number is NaN where float32's is finite.
      is_finite: whether float32's result is finite.
      nan_true: whether a number of float32's is NaN.
      lost: the share that is zero, of the numbers that are not zero in float32.
      at_limit: whether a number is 1 or -1, and float32's is between these.
      decided: of indices and conditions, the share that float32 decides otherwise.
      largest: the largest finite absolute value, of the program or in float32, where
        float32's is finite.
      typical: the root mean square of the finite numbers in float32.
    """

    count: int = 1
    error: float = 0.0
    distance: float = 0.0
    off_share: float = 0.0
    bad: bool = False
    nan: bool = False
    is_finite: bool = True
    nan_true: bool = False
    lost: float = 0.0
    at_limit: bool = False
    decided: float = 0.0
    largest: float = 0.0
    typical: float = 0.0


def figures_of(low: ArrayLike, true: ArrayLike | None) -> Figures:
    """The figures of a result.

    Args:
      low: the result, as the program computes it, in a dtype of 32 bits or more.
      true: the same in float32. If it is None, `low` tells of each index or condition
        whether float32 decides otherwise.
    """
    low = _numbers(low)
    if not low.size:
        return Figures(count=0)
    if true is None:
        return Figures(low.size, decided=float(low.mean()))
    # Differences of large numbers, and squares, may leave float32's range.
    with np.errstate(all="ignore"):
        return _figures(low, _numbers(true))


def _figures(low: np.ndarray, true: np.ndarray) -> Figures:
    """The figures of a result of floats, in one row."""
    sizes = np.abs(true)
    largest = float(np.maximum(sizes.max(), np.abs(low).max()))  # NaN if one is NaN
    if not math.isfinite(largest):
        return _of_any(low, true)
    norm = _norm(true)
    typical = norm / math.sqrt(low.size)
    apart = np.abs(low - true)
    distance = _norm(apart)
    if not distance:
        return Figures(low.size, largest=largest, typical=typical)
    least = _LEAST * float(sizes.sum()) / low.size
    is_off = apart > TOLERANCE * np.maximum(sizes, least)
    n_nonzero = np.count_nonzero(true)
    n_lost = np.count_nonzero(true[low == 0])
    is_at_limit = (np.abs(low) == 1) & (sizes < 1)
    return Figures(
        low.size,
        error=distance / norm if norm else 1.0,
        distance=distance,
        off_share=np.count_nonzero(is_off) / low.size,
        lost=n_lost / max(n_nonzero, 1),
        at_limit=bool(is_at_limit.any()),
        largest=largest,
        typical=typical,
    )


def _of_any(low: np.ndarray, true: np.ndarray) -> Figures:
    """The figures of a result of which a number is not finite."""
    is_finite = np.isfinite(true)
    is_bad = is_finite & ~np.isfinite(low)
    finite = np.where(is_finite, true, 0)
    figures = _figures(np.where(is_finite & ~is_bad, low, finite), finite)
    bad = bool(is_bad.any())
    n_finite = np.count_nonzero(is_finite)
    share_finite = max(n_finite, 1) / low.size
    return dataclasses.replace(
        figures,
        error=math.inf if bad else figures.error,
        distance=math.inf if bad else figures.distance,
        bad=bad,
        nan=bool(np.isnan(low[is_bad]).any()),
        is_finite=n_finite == low.size,
        nan_true=bool(np.isnan(true).any()),
        typical=figures.typical / math.sqrt(share_finite),
    )


def _norm(x: np.ndarray) -> float:
    """The root of the sum of squares, in float64 if float32 does not hold it."""
    total = float(x @ x)
    if not 2.0**-100 < total < math.inf:
        total = float(np.square(x, dtype=np.float64).sum())
    return math.sqrt(total)


def _numbers(x: ArrayLike) -> np.ndarray:
    """The numbers of an array in one row; the two parts of complex ones."""
    flat = np.asarray(x).ravel()
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
