"""Figures: how far a result is from the reference, and how large it is."""

import dataclasses
import math

import numpy as np
from jax.typing import ArrayLike

TOLERANCE = 0.05
"""How far numbers may be from the reference, relative to it, and still be right."""

LARGE_SHARE = 0.2
"""The share of an array's numbers that may be off or lost, or chosen otherwise."""

# An error is relative to the number, or to a quarter of the mean size if that is larger,
# so that numbers near 0 do not count much.
_LEAST = 0.25


@dataclasses.dataclass(frozen=True, eq=False)
class Figures:
    """How far a result is from the reference, and how large it is.

    The reference is the same result in float32, or, in the further run of the program in
    float32, the same in float64.

    Attributes:
      count: how many numbers the result has; a complex number counts as two.
      error: how far it is from the reference: the norm of the difference, relative to
        the norm of the reference. It is 0 if the numbers of both are all 0, 1 if only
        those of the reference are, and infinite if the result is bad or the difference
        is out of float32's range.
      distance: the norm of the difference, not relative; infinite where `error` is.
      off_share: the share of its numbers that are finite, and off by more than 5% of the
        reference, or of a quarter of the mean size where that is more. A finite mask,
        such as -3e4, counts in the mean size, and so may hide that others are off.
      bad: whether a number is not finite where the reference is.
      nan: whether a number is NaN where the reference is finite.
      is_reference_finite: whether all numbers of the reference are finite.
      is_reference_nan: whether a number of the reference is NaN.
      lost: the share that is zero, of the numbers whose reference is finite and not zero.
      at_limit: whether a number is 1 or -1 where the reference is between these.
      decided: of indices and conditions, the share that the reference decides otherwise.
      largest: the largest finite absolute value, of the result or of the reference,
        where the reference is finite.
      typical: the root mean square of the finite numbers of the reference.
    """

    count: int = 1
    error: float = 0.0
    distance: float = 0.0
    off_share: float = 0.0
    bad: bool = False
    nan: bool = False
    is_reference_finite: bool = True
    is_reference_nan: bool = False
    lost: float = 0.0
    at_limit: bool = False
    decided: float = 0.0
    largest: float = 0.0
    typical: float = 0.0


def figures_of(actual: ArrayLike, reference: ArrayLike) -> Figures:
    """The figures of a result of floats.

    Args:
      actual: the result, as the program computes it, in a dtype of 32 bits or more.
      reference: the same in the wider floats, as an array of the same dtype.
    """
    actual = _numbers(actual)
    if not actual.size:
        return Figures(count=0)
    # Differences of large numbers, and squares, may leave float32's range.
    with np.errstate(all="ignore"):
        return _figures(actual, _numbers(reference))


def figures_of_choices(actual: ArrayLike, reference: ArrayLike) -> Figures:
    """The figures of indices or conditions, as the program and the reference decide."""
    is_otherwise = np.not_equal(actual, reference)
    decided = float(is_otherwise.mean()) if is_otherwise.size else 0.0
    return Figures(is_otherwise.size, decided=decided)


def _figures(actual: np.ndarray, reference: np.ndarray) -> Figures:
    """The figures of a result of floats, in one row."""
    sizes = np.abs(reference)
    largest = float(np.maximum(sizes.max(), np.abs(actual).max()))  # NaN if one is NaN
    if not math.isfinite(largest):
        return _figures_if_not_finite(actual, reference)
    count = actual.size
    norm = _norm(reference)
    typical = norm / math.sqrt(count)
    apart = np.abs(actual - reference)
    distance = _norm(apart)
    if not distance:
        return Figures(count, largest=largest, typical=typical)
    least = _LEAST * float(sizes.mean(dtype=np.float64))
    is_off = apart > TOLERANCE * np.maximum(sizes, least)
    n_nonzero = np.count_nonzero(reference)
    n_lost = np.count_nonzero(reference[actual == 0])
    is_at_limit = (np.abs(actual) == 1) & (sizes < 1)
    return Figures(
        count,
        error=distance / norm if norm else 1.0,
        distance=distance,
        off_share=float(is_off.mean()),
        lost=float(n_lost / max(n_nonzero, 1)),
        at_limit=bool(is_at_limit.any()),
        largest=largest,
        typical=typical,
    )


def _figures_if_not_finite(actual: np.ndarray, reference: np.ndarray) -> Figures:
    """The figures of a result if it or the reference has a number that is not finite."""
    is_finite = np.isfinite(reference)
    is_bad = is_finite & ~np.isfinite(actual)
    finite = np.where(is_finite, reference, 0)
    figures = _figures(np.where(is_finite & ~is_bad, actual, finite), finite)
    bad = bool(is_bad.any())
    n_finite = np.count_nonzero(is_finite)
    share_finite = max(n_finite, 1) / actual.size
    return dataclasses.replace(
        figures,
        error=math.inf if bad else figures.error,
        distance=math.inf if bad else figures.distance,
        bad=bad,
        nan=bool(np.isnan(actual[is_bad]).any()),
        is_reference_finite=n_finite == actual.size,
        is_reference_nan=bool(np.isnan(reference).any()),
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
