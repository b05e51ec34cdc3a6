"""The table of a diagnosis: a row for each equation, and which rows are suspects.

For `1 / (a - b)` in float16, where `a` is 0.1 and `b` is 0.0999, the rows say

    line            operation  before  error
    model.py:3 (f)  sub          0.0%  39.0%
    model.py:3 (f)  div         39.0%  63.8%

The operands of `sub` are right and its result is not, so `sub` is where the quotient
goes wrong: a *suspect*.
"""

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp

from optax_lossscale._diagnosis.figures import INFINITE, UNDEFINED, Figures
from optax_lossscale._diagnosis.text import percent
from optax_lossscale._programs.operations import EXACT, PRODUCTS
from optax_lossscale._programs.values import is_narrow_dtype

T = TypeVar("T")

Iterations = tuple[int, ...]
"""The iteration of each loop around an equation, the outermost first."""

PARAMETER = "parameter"
"""The operation of a row that stands for a parameter; its layer is the name."""


@dataclasses.dataclass(eq=False)
class Row:
    """An equation of the loss or of its gradient; print it to see its line.

    In a loop, `error`, `error_before` and `iterations` are those of the iteration with
    the largest error. In a suspect, they are those of the iteration in which it goes
    wrong. The other numbers are the largest of all iterations.

    Attributes:
      line: the line of your source, such as `model.py:12 (Block.__call__)`.
      layer: its scopes, such as `encoder/block_3`, or the parameters nearest to it.
      operation: its name in JAX, such as `dot_general`.
      dtype: the dtype of its result.
      is_compared: whether it was computed in float32, too.
      is_backward: whether it depends on the loss scale.
      error_before: the relative error of its worst operand.
      error: the relative error of its result; infinite if an element is not finite
        though float32's is.
      iterations: the iteration of each loop around it, the outermost first.
      lost: of the elements that are not zero in float32, the share that is zero.
      largest: the largest finite magnitude in float32.
      typical: the root mean square in float32.
      is_finite_in_float32: whether float32's result is finite.
      cause: of a suspect: `overflows`, `vanishes`, `cancels` or `rounds`; else "".
      products: of a suspect that computes right, but from operands that lack digits,
        the nearest products in 16 bits that made these.
    """

    line: str
    layer: str
    operation: str
    dtype: Any
    is_compared: bool = True
    is_backward: bool = False
    error_before: float = 0.0
    error: float = 0.0
    iterations: Iterations = ()
    lost: float = 0.0
    largest: float = 0.0
    typical: float = 0.0
    is_finite_in_float32: bool = True
    cause: str = ""
    products: "tuple[Row, ...]" = ()

    @property
    def badness(self) -> float:
        """The error, which is infinite if the result is not finite in any dtype."""
        return self.error if self.is_finite_in_float32 else math.inf

    @property
    def overflows_at(self) -> float:
        """The least power of two times which the largest magnitude is infinite."""
        if not self.largest:
            return math.inf
        room = math.log2(jnp.finfo(self.dtype).max) - math.log2(self.largest)
        return 2.0 ** (math.floor(room) + 1)

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
        self, figures: Figures, error_before: float, iterations: Iterations
    ) -> None:
        """Takes note of a result: of an iteration of a loop, or of the only one."""
        if figures.error > self.error:
            self.error = figures.error
            self.error_before = error_before
            self.iterations = iterations
        self.lost = max(self.lost, figures.lost)
        self.largest = max(self.largest, figures.largest)
        self.typical = max(self.typical, figures.typical)
        self.is_finite_in_float32 &= not figures.wrong & (INFINITE | UNDEFINED)


@dataclasses.dataclass(eq=False)
class Fault:
    """A wrong value, and the wrong values from which it comes.

    Attributes:
      wrong: what is wrong, as in `Figures.wrong`.
      before: the faults of the operands from which this comes.
      row: the row of the equation; None for a constant or the stack of a loop.
      error_before: the error of the worst operand.
      error: the error of the value.
      iterations: the iteration of each loop around the equation.
      new: what of `wrong` is wrong with no operand.
      cause: why the value is wrong though the operands are right; "" if they are not.
      is_inherited: whether the equation computes right, from operands that lack digits.
    """

    wrong: int
    before: "Sequence[Fault]" = ()
    row: Row | None = None
    error_before: float = 0.0
    error: float = 0.0
    iterations: Iterations = ()
    new: int = 0
    cause: str = ""
    is_inherited: bool = False


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
        """Returns the rows where wrong results go wrong; see `ranked`."""
        reached = _reached(wrong, lambda fault: fault.before)
        return ranked(self._suspect(x) for x in self.faults if x in reached)

    def _suspect(self, fault: Fault) -> Row:
        row = fault.row
        assert row is not None  # as the fault has a cause
        return dataclasses.replace(
            row,
            error_before=fault.error_before,
            error=fault.error,
            iterations=fault.iterations,
            is_finite_in_float32=not fault.new & (INFINITE | UNDEFINED),
            cause=fault.cause,
            products=self._made_by(row, fault) if fault.is_inherited else (),
        )

    def _made_by(self, row: Row, fault: Fault) -> tuple[Row, ...]:
        """Returns the nearest products in 16 bits that made the operands of a row.

        If the result is not finite, what became zero in 16 bits may have made it so,
        and counts as well. If there is none, these are the nearest equations that round
        to 16 bits.
        """
        before = self.read[row] - {row}
        is_finite = fault.error < math.inf

        def is_source(x):
            has_lost = x.lost > 0 and x.operation not in EXACT and not is_finite
            return is_narrow_dtype(x.dtype) and (x.operation in PRODUCTS or has_lost)

        def before_source(x):
            return () if is_source(x) else self.read[x]

        def before_rounding(x):
            if not is_narrow_dtype(x.dtype):
                return self.read[x]
            return [y for y in self.read[x] if is_narrow_dtype(y.dtype)]

        sources = list(filter(is_source, _reached(before, before_source)))
        if not sources:
            reached = _reached(before, before_rounding)
            narrow = [x for x in reached if is_narrow_dtype(x.dtype)]
            sources = [x for x in narrow if x.operation not in EXACT]
        return tuple(_one_a_line(sources))

    def nearest_parameters(self, row: Row) -> str:
        """Names the parameters that are read nearest before a row."""
        rows = {row}
        seen = {row}
        while rows:
            names = {x.layer for x in rows if x.operation == PARAMETER}
            if names:
                return ", ".join(sorted(names))
            rows = set().union(*(self.read.get(x, ()) for x in rows)) - seen
            seen |= rows
        return ""

    def source_of(self, row: Row) -> Row:
        """Follows the largest errors back to the row in which most of one arises."""
        seen = {row}
        while True:
            # What is much further off than the result does not make it.
            before = [x for x in self.read[row] - seen if x.error < 2 * row.error]
            worst = max(before, key=lambda x: x.error, default=None)
            if worst is None or worst.error < row.error / 2:
                return row
            seen.add(worst)
            row = worst


def ranked(suspects: Iterable[Row]) -> list[Row]:
    """Sorts rows, the worst first, and keeps one of each line, layer and cause.

    Of rows that are not finite, the first to run comes first.
    """
    return _one_a_line(sorted(suspects, key=lambda row: -row.badness))


def _one_a_line(rows: Iterable[Row]) -> list[Row]:
    first: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        first.setdefault((row.line, row.layer, row.cause), row)
    return list(first.values())


def _reached(start: Iterable[T], before: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Returns what is reached from some rows or faults, the nearest first."""
    reached: dict[T, None] = {}
    pending = deque(start)
    while pending:
        x = pending.popleft()
        if x not in reached:
            reached[x] = None
            pending += before(x)
    return reached
