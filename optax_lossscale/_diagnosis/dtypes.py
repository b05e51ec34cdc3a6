"""What a program computes in which dtype."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.contexts import IS_REPORTED
from optax_lossscale._autocast.arrays import as_program
from optax_lossscale._autocast.products import (
    AT_DEFAULT,
    OF_A_DERIVATIVE,
    SCOPE,
    is_narrowed,
    remedy,
    usual_product,
    why_left,
)
from optax_lossscale._diagnosis.text import aligned
from optax_lossscale._programs.operations import TABLE, Is, traits
from optax_lossscale._programs.values import (
    FLOAT32,
    HALVES,
    asks_for_precision,
    is_float,
    is_product,
)
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import (
    Equation,
    equations,
    is_of_optax,
)
from optax_lossscale._programs.work import results_of, terms_of

_SHOWN = 20
_ADDS_OVER_DEVICES = Is.SENDS | Is.ADDS_MANY  # what has both traits
# The algorithms that round what they multiply, whatever its dtype.
_ROUNDING = dict.fromkeys(("F16_F16_F16", "F16_F16_F32"), jnp.dtype(jnp.float16))
_ROUNDING |= dict.fromkeys(("BF16_BF16_BF16", "BF16_BF16_F32"), jnp.dtype(jnp.bfloat16))


class Operation(NamedTuple):
    """All operations of one kind on one line, such as its products of float32 with float32.

    Attributes:
      primitive: its name in JAX, such as `dot_general`, `conv_general_dilated` or
        `reduce_sum`.
      operands: the dtypes of its operands; for a product, of the two that it
        multiplies.
      before: the dtypes of the operands before they were converted to wider ones.
      result: the dtype of its result; None if it has none.
      source: the line of your source, such as `model.py:12 (Block.__call__)`.
      count: how many of these operations the program has.
      multiplications: how many multiplications one run takes, if these are products.
      terms: how many numbers are summed into one, at most; sums over devices are not
        counted.
      by_choice: whether a product has its dtype on purpose: it asks for its precision,
        or Optax made it.
      by_autocast: whether it is `autocast` that computes it in 16 bits.
      left_in: where `autocast` leaves it in float32, such as "a loop that waits for a
        number".
    """

    primitive: str
    operands: tuple[np.dtype, ...]
    before: tuple[np.dtype, ...]
    result: np.dtype | None
    source: str
    count: int = 1
    multiplications: int = 0
    terms: int = 1
    by_choice: bool = False
    by_autocast: bool = False
    left_in: str = ""

    @property
    def dtype(self) -> np.dtype:
        """The dtype that it computes in, which is that of its widest operand."""
        return max(self.operands, key=lambda dtype: dtype.itemsize)


class DtypeReport(NamedTuple):
    """The result of `dtype_report`; print it for a table, with the largest first.

    Attributes:
      products: the matrix products and convolutions, in the order of the program.
      narrow: sums, products of many numbers, exponentials, logarithms and powers in 16
        bits or fewer, in the same order.
      opaque: kernels, callbacks and foreign calls, which cannot be looked into.
      unknown: operations on floating-point numbers that this version does not know.
      while_loops: the lines of `while` loops around products; they count as one
        iteration.
    """

    products: tuple[Operation, ...]
    narrow: tuple[Operation, ...]
    opaque: tuple[Operation, ...]
    unknown: tuple[Operation, ...]
    while_loops: tuple[str, ...]

    @property
    def multiplications(self) -> dict[np.dtype, int]:
        """The number of multiplications in each dtype, the largest first."""
        counts: Counter[np.dtype] = Counter()
        for product in self.products:
            counts[product.dtype] += product.multiplications
        return dict(counts.most_common())

    @property
    def shares(self) -> dict[np.dtype, float]:
        """The share of the multiplications in each dtype, the largest first."""
        total = max(sum(self.multiplications.values()), 1)
        return {dtype: n / total for dtype, n in self.multiplications.items()}

    def __str__(self) -> str:
        lines = ["Matrix products and convolutions:"]
        if not self.products:
            lines.append("  none")
        for dtype, share in self.shares.items():
            count = sum(p.count for p in self.products if p.dtype == dtype)
            lines.append(f"  {count} in {dtype}, {share:.1%} of the multiplications")
        sections = {
            "by line:": product_rows(self.products, self),
            "Sums, exponentials, logarithms and powers in 16 bits:": _rows(self.narrow),
            "Not looked into:": _rows(self.opaque),
            "Unknown:": _rows(self.unknown),
        }
        for title, rows in sections.items():
            if rows:
                lines += [title, *rows]
        lines += [
            f"Counted as one iteration: the loop at {line}" for line in self.while_loops
        ]
        return "\n".join(lines)


def dtype_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> DtypeReport:
    """Says in which dtype a function computes, and which lines of your source made it so.

    Flax's modules, and JAX itself, promote to the widest dtype they are given: one
    float32 input is enough to have everything after it computed in float32, and only
    the time it takes shows it. `autocast` avoids that. This report counts matrix
    products and convolutions, and their multiplications, by the dtype of their
    operands; and says where sums, exponentials, logarithms and powers are computed in
    16 bits, which have few digits and a small range.

    It traces the function with everything inside, but runs and compiles nothing, so
    shapes are enough. Give it the training step to include the backward pass. Every
    branch of a `cond` counts as run, and the body of a `while` as run once. Outer
    products do not count as products, nor do inner products, whose results are single
    numbers.

    Args:
      fun: a function that JAX can trace, compiled or not.
      *args: its arguments: trees and modules of arrays, or of `jax.ShapeDtypeStruct`.
        Anything else is passed on as it is.
      **kwargs: its keyword arguments, likewise.

    Returns:
      A `DtypeReport`: print it, or read its `products`, `shares`, `narrow` and
        `opaque`.

    Raises:
      TypeError: if `fun` is not a function.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> weights, x = jnp.ones((4, 2), jnp.float16), jnp.ones((8, 4))
      >>> report = ols.dtype_report(lambda weights, x: x @ weights, weights, x)
      >>> report.shares
      {dtype('float32'): 1.0}
      >>> report.products[0].operands
      (dtype('float32'), dtype('float16'))
    """
    validation.function("fun", fun)
    with IS_REPORTED(True), as_program(fun, args, kwargs) as call:
        return report_of(open_jaxpr(call.program))


def report_of(jaxpr: Any) -> DtypeReport:
    """The report of what was traced."""
    products = []
    narrow = []
    opaque = []
    unknown = []
    while_loops = []
    usual = str(usual_product().params["precision"])
    for at in equations(jaxpr):
        floats = [v for v in at.eqn.invars if is_float(v)]
        if Is.OPAQUE in traits(at.eqn) and floats:
            opaque.append(_operation(at))
        elif at.name not in TABLE and floats:
            unknown.append(_operation(at))
        elif is_product(at.eqn):
            products.append(_product(at, usual))
            loops = [around for around in at.holders if Is.WAITS in traits(around.eqn)]
            while_loops += [around.source for around in loops[:1]]
        elif floats and all(v.aval.dtype.itemsize <= 2 for v in floats):
            one = _operation(at)._replace(terms=at.summed * terms_of(at.eqn))
            its_traits = traits(at.eqn)
            is_wild = Is.EXPONENTIAL in its_traits or _ADDS_OVER_DEVICES in its_traits
            if one.terms > 1 or is_wild:
                narrow.append(one)
    return DtypeReport(
        _alike(products),
        _alike(narrow),
        _alike(opaque),
        _alike(unknown),
        tuple(dict.fromkeys(while_loops)),
    )


def product_rows(products: Iterable[Operation], report: DtypeReport) -> list[str]:
    """Products as lines of text, with their share of the report's multiplications."""
    return _rows(products, max(sum(p.multiplications for p in report.products), 1))


def _operation(at: Equation) -> Operation:
    """An operation, with all its floating-point operands."""
    floats = [n for n, v in enumerate(at.eqn.invars) if is_float(v)]
    return Operation(
        primitive=at.name,
        operands=tuple(at.eqn.invars[n].aval.dtype for n in floats),
        before=tuple(at.before[n] for n in floats),
        result=at.eqn.outvars[0].aval.dtype if at.eqn.outvars else None,
        source=at.source,
    )


def _product(at: Equation, usual: str) -> Operation:
    """An operation that multiplies its first two operands."""
    eqn = at.eqn
    terms = terms_of(eqn)
    precision = str(eqn.params.get("precision"))
    operands = tuple(_ROUNDING.get(precision, v.aval.dtype) for v in eqn.invars[:2])
    asks = asks_for_precision(eqn) and precision not in _ROUNDING
    by_choice = is_of_optax(eqn) or (asks and precision != usual)
    left_in = ""
    if FLOAT32 in operands and not by_choice:
        left_in = AT_DEFAULT if asks else _left_in(at)
    return Operation(
        primitive=eqn.primitive.name,
        operands=operands,
        before=at.before[:2],
        result=eqn.outvars[0].aval.dtype,
        source=at.source,
        multiplications=at.runs * results_of(eqn) * terms,
        terms=terms,
        by_choice=by_choice,
        by_autocast=operands[0] in HALVES and _is_in_autocast(at),
        left_in=left_in,
    )


def _is_in_autocast(at: Equation) -> bool:
    """Whether `autocast` runs an equation, or it is of a derivative that is made from that."""
    return any(SCOPE in str(e.eqn.source_info.name_stack) for e in (at, *at.holders))


def _left_in(at: Equation) -> str:
    """What a product that `autocast` leaves in float32 is, or what it is in."""
    for around in (at, *at.holders):
        reason = why_left(around.eqn)
        if reason:
            return reason
    # Where the program shows it, it would have been narrowed.
    is_derived = _is_in_autocast(at) and is_narrowed(at.eqn)
    return OF_A_DERIVATIVE if is_derived else ""


def _alike(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """The operations, where those that differ only in their counts are one."""
    kinds: dict[Operation, Operation] = {}
    for one in operations:
        kind = one._replace(count=0, multiplications=0, terms=0)
        others = kinds.get(kind, kind)
        kinds[kind] = kind._replace(
            count=others.count + 1,
            multiplications=others.multiplications + one.multiplications,
            terms=max(others.terms, one.terms),
        )
    return tuple(kinds.values())


def _rows(operations: Iterable[Operation], total: int = 0) -> list[str]:
    """The largest operations as lines of text, with their share of `total` multiplications."""
    largest = sorted(operations, key=_size, reverse=True)
    if not largest:
        return []
    rows = [_row(one, total) for one in largest[:_SHOWN]]
    lines = aligned(rows, text=range(len(rows[0])))
    left = len(largest) - _SHOWN
    return [*lines, f"  and {left} more"] if left > 0 else lines


def _size(one: Operation) -> tuple[int, ...]:
    return one.multiplications, one.terms, one.count


def _row(one: Operation, total: int) -> tuple[str, ...]:
    """As in `float32 × float16→float32  50.0%  1 dot_general  model.py:12 (f), by choice`."""
    dtypes = []
    for now, was in zip(one.operands, one.before, strict=True):
        dtypes.append(str(now) if now == was else f"{was}→{now}")
    if len(set(dtypes)) == 1:
        dtypes = dtypes[:1]
    share = [f"{one.multiplications / total:.1%}"] if total else []
    terms = (
        f" of {one.terms} terms" if one.terms > 1 and not one.multiplications else ""
    )
    why = ", by choice" if one.by_choice else ""
    if one.left_in:
        why = f", as autocast leaves {one.left_in}: {remedy(one.left_in)}"
    return (
        "",
        " × ".join(dtypes),
        *share,
        f"{one.count} {one.primitive}{terms}",
        one.source + why,
    )
