"""The table of a diagnosis: a row for each equation, and which rows are suspects.

For `1 / (a - b)` in float16, where `a` is 0.1 and `b` is 0.0999, the rows say

    line            operation  before  error
    model.py:3 (f)  sub          0.0%  39.0%
    model.py:3 (f)  div         39.0%  63.8%

The operands of `sub` are right and its result is not, so `sub` is where the quotient
goes wrong: a *suspect*. A value is *off* if it differs from float32's by more than
`TOLERANCE`, in the norm of all of its elements, or is not finite where float32's is.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._diagnosis.text import percent
from optax_lossscale._programs.operations import PRODUCTS
from optax_lossscale._programs.values import is_narrow_dtype

TOLERANCE = 0.05
"""The relative error above which a value is off.

Rounding to 16 bits gives errors of a tenth of that in sound models of many layers.
"""


class Figures(NamedTuple):
    """What a value and float32's value of the same say of each other.

    Attributes:
      error: the norm of their difference over that of float32's value, or 1 if that is
        0; infinite if an element is not finite though float32's is.
      distance: the norm of their difference.
      lost: of the elements that are not zero in float32, the share that is zero.
      lost_error: the share of the squared difference that is due to these elements.
      largest: the largest finite magnitude in float32.
      size: the norm of float32's finite elements.
      typical: their root mean square.
      faults: what is wrong: `OFF`, `INFINITE` and `UNDEFINED`, in any combination.
    """

    error: float = 0.0
    distance: float = 0.0
    lost: float = 0.0
    lost_error: float = 0.0
    largest: float = 0.0
    size: float = 0.0
    typical: float = 0.0
    faults: int = 0


OFF = 1
"""A value differs from float32's by more than `TOLERANCE`."""

INFINITE = 2
"""A value is infinite in float32, too."""

UNDEFINED = 4
"""A value is NaN in float32, too."""


def compare(low: Any, true: Any) -> Figures:
    """Compares a floating-point or complex array with the same array in float32."""
    low = np.asarray(low).ravel()
    true = np.asarray(true).ravel()
    wide = np.result_type(true.dtype, np.float64)  # in which no square overflows
    low = low.astype(wide)
    true = true.astype(wide)
    known = np.isfinite(true)
    finite = known & np.isfinite(low)
    faults = 0
    if not known.all():
        faults |= INFINITE * bool(np.isinf(true).any())
        faults |= UNDEFINED * bool(np.isnan(true).any())
    is_bad = not np.array_equal(known, finite)
    if not finite.all():
        low = low[finite]
        true = true[finite]
    if not true.size:
        error = math.inf if is_bad else 0.0
        return Figures(error=error, faults=faults | OFF * is_bad)
    magnitudes = np.abs(true)
    distances = np.abs(low - true)
    size = _norm(magnitudes)
    apart = _norm(distances)
    is_lost = (low == 0) & (true != 0)
    error = _ratio(apart, size)
    if is_bad:
        error = math.inf
    return Figures(
        error=error,
        distance=apart,
        lost=_ratio(np.count_nonzero(is_lost), np.count_nonzero(true)),
        lost_error=_ratio(_norm(distances[is_lost]), apart) ** 2,
        largest=float(magnitudes.max()),
        size=size,
        typical=size / true.size**0.5,
        faults=faults | OFF * (error > TOLERANCE),
    )


def _norm(x: np.ndarray) -> float:
    # As fast as `np.linalg.norm`, which starts threads.
    return math.sqrt(np.einsum("i,i->", x, x))


def _ratio(part: float, whole: float) -> float:
    if whole:
        return float(part / whole)
    return 1.0 if part else 0.0


@dataclasses.dataclass(eq=False)
class Row:
    """An equation of the loss or of its gradient; print it to see its line.

    In a loop, the numbers are those of the iteration with the largest error, but
    `lost`, `largest` and `typical` are the largest of all iterations.

    Attributes:
      line: the line of your source, such as `model.py:12 (Block.__call__)`.
      layer: its scopes, such as `encoder/block_3`, or the parameters nearest to it.
      operation: its name in JAX, such as `dot_general`.
      dtype: the dtype of its result.
      is_backward: whether it depends on the loss scale.
      error_before: the relative error of its worst operand.
      error: the relative error of its result; infinite if an element is not finite
        though float32's is.
      lost: of the elements that are not zero in float32, the share that is zero.
      is_finite: whether the result is finite.
      is_finite_in_float32: whether float32's is.
      largest: the largest magnitude in float32.
      typical: the root mean square in float32.
      iterations: the iteration of each loop around it, the outermost first.
      is_compared: whether it was computed in float32, too.
      cause: of a suspect: `overflows`, `vanishes`, `cancels` or `rounds`; else "".
      products: of a suspect that computes right with operands that are a little off,
        the nearest products in 16 bits that made these.
    """

    line: str
    layer: str
    operation: str
    dtype: Any
    is_backward: bool = False
    error_before: float = 0.0
    error: float = 0.0
    lost: float = 0.0
    is_finite: bool = True
    is_finite_in_float32: bool = True
    largest: float = 0.0
    typical: float = 0.0
    iterations: tuple[int, ...] = ()
    is_compared: bool = True
    cause: str = ""
    products: "tuple[Row, ...]" = ()

    @property
    def place(self) -> str:
        """Its operation, line, layer and iteration."""
        layer = f" [{self.layer}]" if self.layer else ""
        iterations = ", ".join(map(str, self.iterations))
        iteration = f", iteration {iterations}" if iterations else ""
        return f"{self.operation} at {self.line}{layer}{iteration}"

    def __str__(self) -> str:
        error = percent(self.error) if self.is_compared else "not compared"
        return (
            f"{self.place}: {self.dtype}, error {error} after "
            f"{percent(self.error_before)}, lost {percent(self.lost)}, largest "
            f"{self.largest:.3g}, typical {self.typical:.3g}"
        )

    def note(
        self,
        figures: Figures,
        cause: str,
        error_before: float,
        iterations: tuple[int, ...],
    ) -> None:
        """Takes note of a result: of an iteration of a loop, or of the only one."""
        # The numbers of an iteration with wrong operands say less.
        if (cause != "", figures.error) > (self.cause != "", self.error):
            self.error = figures.error
            self.error_before = error_before
            self.cause = cause
            self.iterations = iterations
        self.lost = max(self.lost, figures.lost)
        self.largest = max(self.largest, figures.largest)
        self.typical = max(self.typical, figures.typical)
        is_known = not figures.faults & (INFINITE | UNDEFINED)
        self.is_finite_in_float32 &= is_known
        self.is_finite &= is_known and figures.error < math.inf


PARAMETER = "parameter"
"""The operation of a row that stands for a parameter; its layer is the name."""


class Origins:
    """Which rows made the operands of each row.

    Attributes:
      all: the rows that a row reads.
      wrong: of these, the ones that were wrong when the result of the row was.
    """

    def __init__(self):
        self.all: dict[Row, set[Row]] = defaultdict(set)
        self.wrong: dict[Row, set[Row]] = defaultdict(set)

    def suspects(self, table: Iterable[Row], results: Iterable[Row]) -> list[Row]:
        """Returns the rows where results go wrong, the worst first.

        These are the rows with a `cause` that a result depends on through nothing but
        wrong values. Of those that are not finite, the first to run comes first.

        Args:
          table: all rows, in the order in which they run.
          results: the rows of the results that are wrong.
        """
        reached = _reached(results, self.wrong.__getitem__)
        suspects = [row for row in table if row in reached and row.cause]
        for row in suspects:
            if row.cause == "cancels" or not is_narrow_dtype(row.dtype):
                row.products = self._products(row)
        return self.ranked(suspects)

    @staticmethod
    def ranked(suspects: Iterable[Row]) -> list[Row]:
        """Sorts rows by their errors; those that are not finite stay in their order."""
        return sorted(suspects, key=lambda x: -x.error if x.is_finite else -math.inf)

    def nearest_parameters(self, row: Row) -> str:
        """Names the parameters that are read nearest before a row."""
        rows = [row]
        seen = {row}
        while rows:
            names = {x.layer for x in rows if x.operation == PARAMETER}
            if names:
                return ", ".join(sorted(names))
            rows = [y for x in rows for y in self.all.get(x, ()) if y not in seen]
            seen.update(rows)
        return ""

    def source_of(self, row: Row) -> Row:
        """Follows the largest errors back to the row in which most of it arises."""
        seen = {row}
        while True:
            before = [x for x in self.all[row] if x not in seen]
            worst = max(before, key=lambda x: x.error, default=row)
            if worst is row or worst.error < row.error / 2:
                return row
            seen.add(worst)
            row = worst

    def _products(self, row: Row) -> tuple[Row, ...]:
        """Returns the nearest products in 16 bits that made the operands of a row.

        If there are none, these are the nearest equations with results in 16 bits.
        """
        products = self._nearest(row, lambda x: x.operation in PRODUCTS)
        return products or self._nearest(row, lambda x: True)

    def _nearest(self, row: Row, is_sought: Callable[[Row], bool]) -> tuple[Row, ...]:
        def is_found(x):
            return is_narrow_dtype(x.dtype) and is_sought(x)

        before = self.all[row] - {row}
        reached = _reached(before, lambda x: () if is_found(x) else self.all[x])
        return tuple(filter(is_found, reached))


def _reached(
    start: Iterable[Row], next_rows: Callable[[Row], Iterable[Row]]
) -> dict[Row, None]:
    """Returns the rows that are reached from some rows, and these themselves."""
    reached: dict[Row, None] = {}
    pending = list(start)
    while pending:
        row = pending.pop(0)
        if row not in reached:
            reached[row] = None
            pending += next_rows(row)
    return reached
