"""Figures: how far a result is from float32's, and how large it is.

They are computed for many results at once, as NumPy takes longer to begin with an array
than to go through a small one. So the results lie one after the other in one array for
the program's numbers and in one for float32's, and each figure is a reduction over
parts of these.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

TOLERANCE = 0.05
"""How far numbers may be from float32's, relative to those, and still be right."""

_LIFTED = 0.25  # of the mean size: a smaller number is off relative to this, not itself
_TOGETHER = 2**16  # how many numbers to go through at once, as they are in a cache


@dataclasses.dataclass(frozen=True, eq=False)
class Figures:
    """How far a result is from float32's, and how large it is.

    Attributes:
      count: how many numbers the result has; a complex number counts as two.
      error: how far it is from float32's: the norm of the difference, relative to the
        norm of float32's; infinite if it is bad.
      distance: the norm of the difference, not relative; infinite if it is bad.
      off_share: the share of its numbers that are off by more than 5%.
      bad: whether a number is not finite where float32's is.
      nan: whether a number is NaN where float32's is finite.
      is_finite: whether float32's result is finite.
      nan_true: whether a number of float32's is NaN.
      lost: of the numbers that are not zero in float32, the share that is zero.
      decided: of indices and conditions, the share that float32 decides otherwise.
      largest: the largest finite absolute value, of the program or in float32.
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
    decided: float = 0.0
    largest: float = 0.0
    typical: float = 0.0


_COLUMNS = [(field.name, field.type) for field in dataclasses.fields(Figures)]


def rows_of(counts: Sequence[int]) -> np.ndarray:
    """Rows of figures, one for each number of numbers, of which no more is known."""
    rows = np.zeros(len(counts), _COLUMNS)
    rows["count"] = counts
    rows["is_finite"] = True
    return rows


def figures_of(results: Sequence[Any]) -> np.ndarray:
    """The figures of some results, a row for each.

    Args:
      results: pairs of arrays of one floating-point dtype, of 32 bits or more; of a
        choice, whether float32 decides otherwise, beside None.
    """
    lows = [_numbers(pair.low) for pair in results]
    rows = rows_of([low.size for low in lows])
    floats = []
    for n, pair in enumerate(results):
        if pair.true is None:
            rows["decided"][n] = lows[n].mean()
        elif lows[n].size:
            floats.append(n)
    for part in _parts(rows["count"], floats):
        low = _joined([lows[n] for n in part])
        true = _joined([_numbers(results[n].true) for n in part])
        filled = rows[part]
        # Differences of large numbers, and squares, may leave float32's range.
        with np.errstate(all="ignore"):
            _fill(filled, low, true)
        rows[part] = filled
    return rows


def error_of(low: Any, true: Any) -> float:
    """How far an array is from another, relative to that, as `Figures.error` is."""
    x = np.ravel(low)
    rows = rows_of([x.size])
    if x.size:
        with np.errstate(all="ignore"):
            _fill(rows, x, np.ravel(true))
    return float(rows["error"][0])


def _fill(rows: np.ndarray, low: np.ndarray, true: np.ndarray) -> None:
    """Fills rows with the figures of results that lie one after the other."""
    counts = rows["count"]
    starts = counts.cumsum() - counts

    def total(x):
        return np.add.reduceat(x, starts, dtype=float)

    def largest(x):
        return np.maximum.reduceat(np.abs(x), starts)

    finite_counts = counts
    if not (np.isfinite(low).all() and np.isfinite(true).all()):
        is_finite = np.isfinite(true)
        is_bad = is_finite & ~np.isfinite(low)
        rows["bad"] = total(is_bad) > 0
        rows["nan"] = total(is_bad & np.isnan(low)) > 0
        finite_counts = total(is_finite)
        rows["is_finite"] = finite_counts == counts
        rows["nan_true"] = total(np.isnan(true)) > 0
        true = np.where(is_finite, true, 0)
        low = np.where(is_finite & ~is_bad, low, true)
    sizes = np.abs(true)
    norm = np.sqrt(total(np.square(true, dtype=float)))
    rows["typical"] = norm / np.sqrt(np.maximum(finite_counts, 1))
    rows["largest"] = largest(true)
    apart = np.abs(low - true)
    if apart.any():
        distance = np.sqrt(total(np.square(apart, dtype=float)))
        rows["distance"] = distance
        rows["error"] = np.where(distance, distance / norm, 0)
        rows["largest"] = np.maximum(rows["largest"], largest(low))
        least = np.repeat(_LIFTED * total(sizes) / counts, counts)
        is_off = apart > TOLERANCE * np.maximum(sizes, least)
        rows["off_share"] = total(is_off) / counts
        is_lost = (low == 0) & (true != 0)
        rows["lost"] = total(is_lost) / np.maximum(total(true != 0), 1)
    for column in ("distance", "error"):
        rows[column][rows["bad"]] = np.inf


def _parts(counts: np.ndarray, which: Sequence[int]) -> Iterator[list[int]]:
    """The results that are gone through together, in parts of some size."""
    part: list[int] = []
    total = 0
    for n in which:
        part.append(n)
        total += counts[n]
        if total > _TOGETHER:
            yield part
            part = []
            total = 0
    if part:
        yield part


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _numbers(x: Any) -> np.ndarray:
    """The numbers of an array in one row; the two parts of complex ones."""
    flat = np.asarray(x).ravel()
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
