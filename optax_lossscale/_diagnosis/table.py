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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from optax_lossscale._diagnosis.text import percent
from optax_lossscale._programs.operations import EXACT, PRODUCTS
from optax_lossscale._programs.values import is_narrow_dtype

T = TypeVar("T")

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
    magnitudes = np.abs(true if known.all() else true[known])
    if not finite.all():
        low = low[finite]
        true = true[finite]
    distances = np.abs(low - true)
    size = _norm(magnitudes)
    apart = _norm(distances)
    is_lost = (low == 0) & (true != 0)
    error = _ratio(apart, size) if np.array_equal(known, finite) else math.inf
    return Figures(
        error=error,
        distance=apart,
        lost=_ratio(np.count_nonzero(is_lost), np.count_nonzero(true)),
        lost_error=_ratio(_norm(distances[is_lost]), apart) ** 2,
        largest=float(magnitudes.max(initial=0)),
        size=size,
        typical=size / max(magnitudes.size, 1) ** 0.5,
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
        self, figures: Figures, error_before: float, iterations: tuple[int, ...]
    ) -> None:
        """Takes note of a result: of an iteration of a loop, or of the only one."""
        if figures.error > self.error:
            self.error = figures.error
            self.error_before = error_before
            self.iterations = iterations
        self.lost = max(self.lost, figures.lost)
        self.largest = max(self.largest, figures.largest)
        self.typical = max(self.typical, figures.typical)
        is_known = not figures.faults & (INFINITE | UNDEFINED)
        self.is_finite_in_float32 &= is_known
        self.is_finite &= is_known and figures.error < math.inf


@dataclasses.dataclass(eq=False)
class Fault:
    """A wrong value, and the wrong values from which it comes.

    Attributes:
      kinds: what is wrong: `OFF`, `INFINITE` and `UNDEFINED`, in any combination.
      row: the row of its equation; None for a constant.
      error: its relative error.
      error_before: the error of the worst operand.
      iterations: the iteration of each loop around it.
      before: the faults of the operands from which its own comes.
      cause: why it is wrong though its operands are right; "" if they are not.
      is_inherited: whether most of its error comes from what right operands lack.
    """

    kinds: int
    row: "Row | None" = None
    error: float = 0.0
    error_before: float = 0.0
    iterations: tuple[int, ...] = ()
    before: "Sequence[Fault]" = ()
    cause: str = ""
    is_inherited: bool = False


PARAMETER = "parameter"
"""The operation of a row that stands for a parameter; its layer is the name."""


class Origins:
    """Where values come from.

    Attributes:
      read: the rows that each row reads.
      faults: the faults with a cause, in the order in which they occurred.
    """

    def __init__(self):
        self.read: dict[Row, set[Row]] = defaultdict(set)
        self.faults: list[Fault] = []

    def suspects(self, wrong: Iterable[Fault]) -> list[Row]:
        """Returns the rows where wrong results go wrong, the worst first.

        A row has the numbers of the iteration in which it does. Of rows that are not
        finite, the first to run comes first.
        """
        reached = _reached(wrong, lambda fault: fault.before)
        return ranked(self._suspect(x) for x in self.faults if x in reached)

    def _suspect(self, fault: Fault) -> Row:
        products = ()
        if fault.is_inherited:
            products = self._nearest(fault.row, lambda x: x.operation in PRODUCTS)
            # Without a product, these are the nearest equations that round to 16 bits.
            products = products or self._nearest(
                fault.row, lambda x: x.operation not in EXACT
            )
        return dataclasses.replace(
            fault.row,
            cause=fault.cause,
            error=fault.error,
            error_before=fault.error_before,
            iterations=fault.iterations,
            is_finite=not fault.kinds & (INFINITE | UNDEFINED)
            and fault.error < math.inf,
            products=products,
        )

    def _nearest(self, row: Row, is_sought: Callable[[Row], bool]) -> tuple[Row, ...]:
        """Returns the rows with results of 16 bits that are the nearest before a row."""

        def is_found(x):
            return is_narrow_dtype(x.dtype) and is_sought(x)

        before = self.read[row] - {row}
        reached = _reached(before, lambda x: () if is_found(x) else self.read[x])
        return tuple(_one_a_line(filter(is_found, reached)))

    def nearest_parameters(self, row: Row) -> str:
        """Names the parameters that are read nearest before a row."""
        rows = [row]
        seen = {row}
        while rows:
            names = {x.layer for x in rows if x.operation == PARAMETER}
            if names:
                return ", ".join(sorted(names))
            rows = [y for x in rows for y in self.read.get(x, ()) if y not in seen]
            seen.update(rows)
        return ""

    def source_of(self, row: Row) -> Row:
        """Follows the largest errors back to the row in which most of it arises."""
        seen = {row}
        while True:
            before = [x for x in self.read[row] if x not in seen]
            worst = max(before, key=lambda x: x.error, default=row)
            if worst is row or worst.error < row.error / 2:
                return row
            seen.add(worst)
            row = worst

    def _products(self, row: Row) -> tuple[Row, ...]:
        """Returns the nearest products in 16 bits that made the operands of a row.

        If there are none, these are the nearest equations that round to 16 bits.
        """
        products = self._nearest(row, lambda x: x.operation in PRODUCTS)
        return products or self._nearest(row, lambda x: x.operation not in EXACT)

    def _nearest(self, row: Row, is_sought: Callable[[Row], bool]) -> tuple[Row, ...]:
        def is_found(x):
            return is_narrow_dtype(x.dtype) and is_sought(x)

        before = self.read[row] - {row}
        reached = _reached(before, lambda x: () if is_found(x) else self.read[x])
        return tuple(_one_a_line(filter(is_found, reached)))


def ranked(suspects: Iterable[Row]) -> list[Row]:
    """Sorts rows by their errors, and keeps one for each line and cause.

    Of those that are not finite, the first comes first.
    """
    by_error = sorted(suspects, key=lambda x: -x.error if x.is_finite else -math.inf)
    return _one_a_line(by_error)


def _one_a_line(rows: Iterable[Row]) -> list[Row]:
    first: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        first.setdefault((row.line, row.layer, row.cause), row)
    return list(first.values())


def _reached(start: Iterable[T], before: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Returns what is reached from some rows or faults, and these themselves."""
    reached: dict[T, None] = {}
    pending = list(start)
    while pending:
        x = pending.pop()
        if x not in reached:
            reached[x] = None
            pending += before(x)
    return reached
