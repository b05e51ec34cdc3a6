"""What `diagnose` alone still asks, until it is rewritten: see `dtypes` below.

`dtype_report`: which operations of a program compute in which dtype, by line.

It reads the traced program and runs nothing. A row collects the operations of one kind
on one line, as in

    float16→float32 × float32  50.0%  1 dot_general  model.py:12 (Block.__call__)

where half of all multiplications are in a product of two arrays: one in float16, which
was first widened to float32, and one in float32. Products are listed in every dtype,
and so are operations whose inside is not in the jaxpr, such as kernels. Sums and
exponentials are listed only in 16 bits or fewer, where they may go wrong.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from optax_lossscale._arrays import checks
from optax_lossscale._autocast.products import usual_precision
from optax_lossscale._diagnosis.equations import keeps_numbers
from optax_lossscale._diagnosis.old_operations import TABLE, Trait, traits
from optax_lossscale._diagnosis.old_walk import programs_in
from optax_lossscale._diagnosis.old_work import (
    asks_for_highest,
    count_results,
    count_terms,
    is_product,
)
from optax_lossscale._diagnosis.text import aligned, percent
from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.call import as_program
from optax_lossscale._programs.lines import is_made_by_optax, line_of
from optax_lossscale._programs.values import (
    HALVES,
    Atom,
    dtype_in,
    dtypes_in,
    is_inexact,
)
from optax_lossscale._programs.versions import mapped_axes, name_of, open_jaxpr


class Operation(NamedTuple):
    """All operations of one kind on one line, such as products of two float32 arrays.

    Attributes:
      primitive: its name in JAX, such as `dot_general`, `conv_general_dilated` or
        `reduce_sum`.
      operands: the dtypes of the operands that are floats; for a product, the dtypes of
        the two arrays that it multiplies. An operation that cannot be looked into and
        reads no floats has the dtypes of its results here.
      before: the dtypes of the operands before they were converted to wider dtypes, in
        the function that computes with them or in one that calls it. Where `before`
        differs from `operands`, an operand was widened.
      source: the line of your source, such as `model.py:12 (Block.__call__)`.
      count: how many of these operations the program has.
      multiplications: how many multiplications one run computes; 0 if these operations
        are not products.
      terms: the largest number of terms that one of these operations adds up in one
        element of its result.
      by_choice: whether a product has its dtype on purpose: because its call sets
        HIGHEST precision or an algorithm, and that is not the default, or because Optax
        made it.
    """

    primitive: str
    operands: tuple[np.dtype, ...]
    before: tuple[np.dtype, ...]
    source: str
    count: int = 1
    multiplications: int = 0
    terms: int = 1
    by_choice: bool = False

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which it computes, which is that of its widest operand.

        Float16 with bfloat16 computes in float32, because neither can represent all
        numbers of the other.
        """
        dtypes = self.operands
        if HALVES.issubset(dtypes):
            dtypes = *dtypes, np.dtype(np.float32)
        return max(dtypes, key=lambda dtype: dtype.itemsize)

    @property
    def is_widened(self) -> bool:
        """Whether an operand in 16 bits was widened, other than by choice."""
        is_wide = self.dtype.itemsize > 2 and not self.by_choice
        return is_wide and not HALVES.isdisjoint(self.before)


class DtypeReport(NamedTuple):
    """The result of `dtype_report`; print it for a table, the largest operations first.

    Attributes:
      products: the matrix products and convolutions, in the order of the program.
      narrow: operations in 16 bits or fewer that may lose small terms or overflow, in
        the same order: sums, inner products, products of many elements, exponentials,
        logarithms and powers. See whether any of them should be in float32.
      opaque: operations that cannot be looked into: kernels, callbacks, foreign calls,
        and operations that this version does not know.
    """

    products: tuple[Operation, ...] = ()
    narrow: tuple[Operation, ...] = ()
    opaque: tuple[Operation, ...] = ()

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
        counts = self.multiplications
        total = max(sum(counts.values()), 1)
        return {dtype: n / total for dtype, n in counts.items()}

    def __str__(self) -> str:
        totals = [
            f"  {share:.1%} of the multiplications in {dtype}"
            for dtype, share in self.shares.items()
        ]
        narrow = rows_of(self.narrow, self)
        sections = {
            "Matrix products and convolutions:": totals or ["  none"],
            "by line:": rows_of(self.products, self),
            "Sums, exponentials, logarithms and powers in 16 bits or fewer:": narrow,
            "Not looked into:": rows_of(self.opaque, self),
        }
        lines = []
        for title, rows in sections.items():
            if rows:
                lines += [title, *rows]
        return "\n".join(lines)


def dtype_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> DtypeReport:
    """Reports in which dtypes a function computes, by source line.

    Use it if a model in 16 bits is no faster than in float32. JAX promotes operands to
    the widest dtype among them, and so do Flax's modules without a `dtype`. After a
    single float32 input, everything may therefore be computed in float32, and the only
    sign of it is the time that it takes. `autocast` avoids this. The report counts
    matrix products and convolutions, and their multiplications, by the dtype of their
    operands. It also lists where sums, exponentials, logarithms and powers are computed
    in 16 bits, where numbers have few digits or a small range.

    To include the backward pass, call it on the whole training step. It traces the
    function and all that it calls, but runs and compiles nothing, so shapes are
    enough. Every branch of a `cond` counts as run, and the body of a `while` as run
    once. Outer products, which sum nothing, do not count as products. Neither do inner
    products, alone or in a batch, which multiply each element only once.

    Args:
      fun: a function that JAX can trace, compiled or not.
      *args: its arguments: trees and modules of arrays, or of `jax.ShapeDtypeStruct`.
        Anything else is passed on as it is.
      **kwargs: its keyword arguments, likewise.

    Returns:
      A `DtypeReport`. Print it, or read its `products`, `shares`, `narrow` and
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
    checks.check_function("fun", fun)
    with as_program(fun, args, kwargs) as call:
        return report_of(open_jaxpr(call.program))


def report_of(jaxpr: Jaxpr) -> DtypeReport:
    """Reports on an open jaxpr."""
    return _report_of(jaxpr, usual_precision())


def rows_of(operations: Iterable[Operation], report: DtypeReport) -> list[str]:
    """Formats operations of a report as aligned lines, the largest first."""
    total = sum(report.multiplications.values())
    size = attrgetter("multiplications", "terms")
    largest = sorted(operations, key=size, reverse=True)
    return aligned([_row(operation, total) for operation in largest])


@cached_by_program
def _report_of(
    jaxpr: Jaxpr,
    default_precision: Any,
    line: str = "",
    before: tuple[np.dtype, ...] = (),
) -> DtypeReport:
    """Reports on an open jaxpr, and on all programs inside it.

    Args:
      jaxpr: the program.
      default_precision: the precision of a product whose call does not set one.
      line: the user's line that runs the program; "" for the whole program.
      before: the dtypes of its arguments before the caller widened them. If it is
        empty, they count as not widened.
    """
    # The dtypes of values before they were widened, by `id`: literals have no hash.
    unwidened: dict[int, np.dtype] = {}
    for v, dtype in zip(jaxpr.invars, before, strict=False):
        unwidened[id(v)] = dtype
    reports = []
    for eqn in jaxpr.eqns:
        operands = _dtypes_before(eqn.invars, unwidened)
        if keeps_numbers(eqn):
            # There is one operand for all results, or one for each.
            for v, dtype in zip(eqn.outvars, itertools.cycle(operands)):
                unwidened[id(v)] = dtype
        source = line_of(eqn, line)
        reports.append(_report_on(eqn, default_precision, source, unwidened))
        inner_before = operands if Trait.CALLS in traits(eqn) else ()
        for program in programs_in(eqn):
            inner = open_jaxpr(program)
            report = _report_of(inner, default_precision, source, inner_before)
            reports.append(_repeated(report, _times_run(eqn)))
    return DtypeReport(
        products=_merged(report.products for report in reports),
        narrow=_merged(report.narrow for report in reports),
        opaque=_merged(report.opaque for report in reports),
    )


def _report_on(
    eqn: JaxprEqn,
    default_precision: Any,
    source: str,
    unwidened: Mapping[int, np.dtype],
) -> DtypeReport:
    """Reports on a single equation, without the programs inside it."""

    def operation(values):
        """Describes the equation by the dtypes of these operands or results."""
        operands = tuple(dtypes_in(values))
        before = _dtypes_before(values, unwidened)
        return Operation(name_of(eqn), operands, before, source, terms=count_terms(eqn))

    floats = list(filter(is_inexact, eqn.invars))
    if is_product(eqn):
        is_default = eqn.params.get("precision") == default_precision
        is_asked_for = asks_for_highest(eqn) and not is_default
        product = operation(eqn.invars[:2])._replace(
            multiplications=count_results(eqn) * count_terms(eqn),
            by_choice=is_asked_for or is_made_by_optax(eqn),
        )
        return DtypeReport(products=(product,))
    if Trait.OPAQUE in traits(eqn) or name_of(eqn) not in TABLE:
        values = floats or list(filter(is_inexact, eqn.outvars))
        opaque = (operation(values),) if values else ()
        return DtypeReport(opaque=opaque)
    needs_digits = count_terms(eqn) > 1 or Trait.EXPONENTIAL in traits(eqn)
    if floats and needs_digits:
        narrow = operation(floats)
        if narrow.dtype.itemsize <= 2:
            return DtypeReport(narrow=(narrow,))
    return DtypeReport()


def _dtypes_before(
    values: Sequence[Atom], unwidened: Mapping[int, np.dtype]
) -> tuple[np.dtype, ...]:
    """Returns the dtypes of values; for widened values, the dtypes before that."""
    return tuple(unwidened.get(id(v), dtype_in(v)) for v in values)


def _repeated(report: DtypeReport, times: int) -> DtypeReport:
    """Counts the multiplications of a program as often as it runs."""
    products = tuple(
        product._replace(multiplications=times * product.multiplications)
        for product in report.products
    )
    return report._replace(products=products)


def _times_run(eqn: JaxprEqn) -> int:
    """Returns how often an equation runs its programs; a `while` counts as once."""
    if Trait.SCANS in traits(eqn):
        return eqn.params["length"]
    if Trait.MAPS in traits(eqn):
        mesh = eqn.params["mesh"]
        return math.prod(mesh.shape[axis] for axis in mapped_axes(eqn))
    return 1


def _merged(lists: Iterable[Iterable[Operation]]) -> tuple[Operation, ...]:
    """Merges operations of one kind, which differ only in how much they compute.

    Their counts and multiplications are added up, and the largest `terms` is kept.
    """
    totals: dict[Operation, Operation] = {}
    for operation in itertools.chain.from_iterable(lists):
        kind = operation._replace(count=0, multiplications=0, terms=0)
        total = totals.get(kind, kind)
        totals[kind] = total._replace(
            count=total.count + operation.count,
            multiplications=total.multiplications + operation.multiplications,
            terms=max(total.terms, operation.terms),
        )
    return tuple(totals.values())


def _row(operation: Operation, total: int) -> tuple[str, ...]:
    """Formats the cells of a row; `total` is the number of multiplications in all."""
    dtypes = [
        str(dtype) if dtype == before else f"{before}→{dtype}"
        for dtype, before in zip(operation.operands, operation.before, strict=True)
    ]
    size = f"{operation.terms} terms" if operation.terms > 1 else ""
    if operation.multiplications:
        size = percent(operation.multiplications / total)
    by_choice = ", by choice" if operation.by_choice else ""
    return (
        "",  # indents the row
        " × ".join(dict.fromkeys(dtypes)),
        size,
        f"{operation.count} {operation.primitive}",
        operation.source + by_choice,
    )
