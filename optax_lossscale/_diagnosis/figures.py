"""Measures how far a result is from its reference, and how large it is.

`diagnose` computes each result twice: as the program does, and in wider floats, which
is the *reference*. `figures_of` compares the two with NumPy, on the host, and returns
the measurements as `Figures`. For the result `[1.0, 2.0]` with the reference
`[1.0, 2.5]`, `error` is 0.5 / norm([1.0, 2.5]), or 19%, and `off_share` is one half:
only the second element is off by more than 5%.

The search for a fault reads only these measurements, not the arrays, because an array
is freed as soon as no later equation reads it.
"""

import dataclasses
import math

import numpy as np
from jax.typing import ArrayLike

TOLERANCE = 0.05
"""The largest relative error of a result that still counts as right.

It is about 13 times the largest error of one rounding to bfloat16, which is 2**-8 or
0.4%, and 100 times the largest error of one rounding to float16, which is 2**-11 or
0.05%. A heuristic: a smaller value counts results as wrong although their error is only
the sum of such roundings, and a larger one lets more faults go unnoticed.
"""

LARGE_SHARE = 0.2
"""The share of an array that may be off, lost or chosen differently before it matters.

A heuristic: in a healthy model, a few elements may be off because they are small, and a
few choices may differ because of ties. The larger this value, the more of an array can
be wrong unnoticed.
"""

# The least magnitude with which the error of an element is compared, relative to the
# mean magnitude. Without it, an element near 0 would count as off because of an error
# that is small beside the other elements. A heuristic.
_FRACTION_OF_MEAN = 0.25


@dataclasses.dataclass(frozen=True, eq=False)
class Figures:
    """How far a result is from its reference, and how large it is.

    The reference is the same result in float32, or, where the program itself runs in
    float32, the same result in float64. All norms are Euclidean.

    Attributes:
      count: how many elements the result has. A complex element counts as two.
      error: the relative error of the whole array: the norm of the difference from the
        reference, divided by the norm of the reference. It is 0 if both are zero, 1 if
        only the reference is, and infinite if the result is bad or the difference
        exceeds the range of float32. The largest elements dominate it.
      distance: the norm of the difference itself; infinite where `error` is infinite.
        Among the terms of a sum, the one with the largest distance contributes most to
        the error of the sum.
      off_share: the share of elements that are off. An element is off if it is finite
        and differs from its reference by more than 5% of the reference, or of a quarter
        of the mean magnitude, whichever is larger. Unlike in `error`, small elements
        count as much as large ones. But a finite mask, such as -3e4, raises the mean
        magnitude and so can hide other errors.
      bad: whether an element is not finite where the reference is finite.
      nan: whether an element is NaN where the reference is finite.
      is_reference_finite: whether every element of the reference is finite.
      is_reference_nan: whether an element of the reference is NaN.
      lost: the share of elements that became zero, by underflow or cancellation, among
        those whose reference is finite and not zero.
      at_limit: whether an element is 1 or -1 where the reference lies strictly between,
        as where a sigmoid or a tanh saturates.
      differing: for indices and conditions, the share in which the result and the
        reference differ; 0 for floats.
      largest: the largest finite absolute value of the result and of the reference,
        where the reference is finite.
      rms: the root mean square of the finite elements of the reference.
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
    differing: float = 0.0
    largest: float = 0.0
    rms: float = 0.0


def figures_of(actual: ArrayLike, reference: ArrayLike) -> Figures:
    """Compares a floating-point result with its reference.

    Args:
      actual: the result as the program computes it, of any shape, cast to float32,
        float64 or a complex dtype.
      reference: the result in the wider floats, of the same shape, cast to the same
        dtype.
    """
    actual = _flattened(actual)
    if not actual.size:
        return Figures(count=0)
    # Squares and differences of large elements may leave the range of float32.
    with np.errstate(all="ignore"):
        return _figures(actual, _flattened(reference))


def figures_of_choices(actual: ArrayLike, reference: ArrayLike) -> Figures:
    """Compares indices or conditions with those of the reference, of the same shape."""
    differs = np.not_equal(actual, reference)
    differing = float(differs.mean()) if differs.size else 0.0
    return Figures(differs.size, differing=differing)


def _figures(actual: np.ndarray, reference: np.ndarray) -> Figures:
    """Compares two flat arrays of floats, which are not empty."""
    magnitudes = np.abs(reference)
    # Unlike `max`, `np.maximum` returns NaN if either operand is NaN.
    largest = float(np.maximum(magnitudes.max(), np.abs(actual).max()))
    if not math.isfinite(largest):
        return _figures_if_not_finite(actual, reference)
    count = actual.size
    norm = _norm(reference)
    rms = norm / math.sqrt(count)
    difference = np.abs(actual - reference)
    distance = _norm(difference)
    if not distance:
        return Figures(count, largest=largest, rms=rms)
    floor = _FRACTION_OF_MEAN * float(magnitudes.mean(dtype=np.float64))
    is_off = difference > TOLERANCE * np.maximum(magnitudes, floor)
    n_nonzero = np.count_nonzero(reference)
    n_lost = np.count_nonzero(reference[actual == 0])
    is_at_limit = (np.abs(actual) == 1) & (magnitudes < 1)
    return Figures(
        count,
        error=distance / norm if norm else 1.0,
        distance=distance,
        off_share=float(is_off.mean()),
        lost=float(n_lost / max(n_nonzero, 1)),
        at_limit=bool(is_at_limit.any()),
        largest=largest,
        rms=rms,
    )


def _figures_if_not_finite(actual: np.ndarray, reference: np.ndarray) -> Figures:
    """Compares two flat arrays, at least one of which is not finite everywhere.

    Where the reference is not finite, both are set to 0. Where only the result is not
    finite, it is set to the reference, and `bad` reports it. All other measurements are
    therefore those of the finite elements.
    """
    is_finite = np.isfinite(reference)
    is_bad = is_finite & ~np.isfinite(actual)
    finite_reference = np.where(is_finite, reference, 0)
    finite_actual = np.where(is_finite & ~is_bad, actual, finite_reference)
    figures = _figures(finite_actual, finite_reference)
    bad = bool(is_bad.any())
    n_finite = np.count_nonzero(is_finite)
    # `rms` is a mean over the finite elements only, without the zeros put in above.
    share_finite = max(n_finite, 1) / actual.size
    return dataclasses.replace(
        figures,
        error=math.inf if bad else figures.error,
        distance=math.inf if bad else figures.distance,
        bad=bad,
        nan=bool(np.isnan(actual[is_bad]).any()),
        is_reference_finite=n_finite == actual.size,
        is_reference_nan=bool(np.isnan(reference).any()),
        rms=figures.rms / math.sqrt(share_finite),
    )


def _norm(x: np.ndarray) -> float:
    """Computes the Euclidean norm, in float64 if squares leave the range of float32.

    Float32 rounds squares below 2**-126 to multiples of 2**-149. In a sum above
    2**-100, each of these rounding errors is below 2**-49 of the sum, so not even 2**36
    of them together matter.
    """
    total = float(x @ x)
    if not 2.0**-100 < total < math.inf:
        total = float(np.square(x, dtype=np.float64).sum())
    return math.sqrt(total)


def _flattened(x: ArrayLike) -> np.ndarray:
    """Flattens an array; a complex element becomes its real and imaginary part."""
    flat = np.asarray(x).ravel()
    if flat.dtype.kind == "c":
        return flat.view(flat.real.dtype)
    return flat
