"""What a program computes in which dtype."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._autocast.products import SCOPE, is_narrowed, why_left
from optax_lossscale._programs.operations import TABLE, Is, traits_of
from optax_lossscale._programs.values import FLOAT32, is_float, is_product
from optax_lossscale._programs.walk import (
    Equation,
    equations,
    is_of_a_decomposition,
    is_of_the_optimizer,
    is_opaque,
    traced,
)
from optax_lossscale._programs.work import results_of, terms_of
from optax_lossscale._scales import validation

_SHOWN = 20
# The algorithms that round what they multiply, whatever its dtype.
_ROUNDING = {
    "BF16_BF16_BF16": jnp.dtype(jnp.bfloat16),
    "BF16_BF16_F32": jnp.dtype(jnp.bfloat16),
    "F16_F16_F16": jnp.dtype(jnp.float16),
    "F16_F16_F32": jnp.dtype(jnp.float16),
}


class Operation(NamedTuple):
    """What one line makes of one kind: its matrix products of float32 with float32, say.

    Attributes:
      primitive: what JAX calls it: `dot_general`, `conv_general_dilated`, `reduce_sum`, `exp`.
      operands: the dtypes of what it takes: of a product, of the two that it multiplies.
      before: the dtypes that these had before they were converted to wider ones. Of a float16
        weight and a float32 input, the weight's is float16, and the product in float32.
      result: the dtype of what it gives; None if that is nothing.
      source: the line of your source: `model.py:12 (Block.__call__)`.
      count: how many of these the program has.
      multiplications: how many of them one run takes, if they are products.
      terms: how many numbers are added to one, at most; over devices they are not counted.
      by_choice: whether a product is not the model's to narrow: it asks for its precision, by
        `precision=jax.lax.Precision.HIGHEST` or an algorithm, or Optax made it, or JAX in the
        derivative of a matrix decomposition.
      left_in: what `autocast` leaves as it is, such as a loop that waits for a number, if a
        float32 product is that or in it; else nothing.
    """

    primitive: str
    operands: tuple[np.dtype, ...]
    before: tuple[np.dtype, ...]
    result: np.dtype | None
    source: str
    count: int
    multiplications: int
    terms: int
    by_choice: bool
    left_in: str

    @property
    def dtype(self) -> np.dtype:
        """The dtype that it computes in: its widest operand's."""
        return max(self.operands, key=lambda dtype: dtype.itemsize)


class DtypeReport(NamedTuple):
    """What `dtype_report` found; print it for a table, which has the largest first.

    Attributes:
      products: the matrix products and convolutions, in the order of the program.
      narrow: sums, exponentials, logarithms and powers in 16 bits or fewer, likewise.
      opaque: kernels, callbacks and foreign calls, into which nothing can look.
      unknown: operations on floating-point numbers that this version does not know.
      while_loops: the lines of `while` loops around products, whose rounds are counted as one.
    """

    products: tuple[Operation, ...]
    narrow: tuple[Operation, ...]
    opaque: tuple[Operation, ...]
    unknown: tuple[Operation, ...]
    while_loops: tuple[str, ...]

    @property
    def multiplications(self) -> dict[np.dtype, int]:
        """Those of the products in each dtype, the most first."""
        of: dict[np.dtype, int] = {}
        for product in self.products:
            of[product.dtype] = of.get(product.dtype, 0) + product.multiplications
        return dict(sorted(of.items(), key=lambda item: -item[1]))

    @property
    def shares(self) -> dict[np.dtype, float]:
        """The share of the multiplications in each dtype, the largest first."""
        total = max(sum(self.multiplications.values()), 1)
        return {dtype: n / total for dtype, n in self.multiplications.items()}

    def __str__(self) -> str:
        lines = ["Matrix products and convolutions:", "  none"]
        if self.products:
            lines[1:] = [
                f"  {sum(p.count for p in self.products if p.dtype == dtype)} in {dtype}, "
                f"{share:.1%} of the multiplications"
                for dtype, share in self.shares.items()
            ]
            lines += ["by line:", *product_rows(self.products, self)]
        if self.narrow:
            lines += ["Sums, exponentials, logarithms and powers in 16 bits:"]
            lines += _rows(self.narrow)
        if self.opaque:
            lines += ["Not looked into:"]
            lines += _rows(self.opaque)
        if self.unknown:
            lines += ["Not known:", *_rows(self.unknown)]
        lines += [f"Counted as one round: the loop at {line}" for line in self.while_loops]
        return "\n".join(lines)


def dtype_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> DtypeReport:
    """In which dtype a function computes what, and the lines of your source that made it so.

    Flax's modules, and JAX itself, promote to the widest of what they are given: one float32 input
    is enough to have all that follows computed in float32, whatever `grad_dtype` says, and only
    the time it takes shows that. `autocast` avoids it. This counts the matrix products and
    convolutions by the dtype of their operands, and their multiplications; and says where sums,
    exponentials, logarithms and powers are computed in 16 bits, which have few digits and a
    small range.

    It traces the function, and looks into whatever JAX traces: `jit`, `scan`, `cond`, `remat`,
    `shard_map`, custom derivatives. It runs and compiles nothing, so shapes are enough, and what
    the function donates stays. Give it the training step, and the backward pass is in it. Each
    branch of a `cond` counts as run, and the rounds of a `while` as one. A product without a
    sum, such as an outer product, is none here, nor is a sum of products to single numbers.

    Args:
      fun: a function that JAX can trace, compiled or not.
      *args: its arguments: arrays, or a `jax.ShapeDtypeStruct` in the place of each; trees and
        modules of them. What is no array is passed on as it is.
      **kwargs: its keyword arguments, likewise.

    Returns:
      A `DtypeReport`: print it, or read its `products`, `shares`, `narrow` and `opaque`.

    Raises:
      TypeError: if `fun` is no function.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> weights, x = jnp.ones((4, 2), jnp.float16), jnp.ones((8, 4))
      >>> report = ols.diagnosis.dtype_report(lambda weights, x: x @ weights, weights, x)
      >>> report.shares
      {dtype('float32'): 1.0}
      >>> report.products[0].operands
      (dtype('float32'), dtype('float16'))
    """
    validation.function("fun", fun)
    return report_of(traced(fun, args, kwargs))


def report_of(jaxpr: Any) -> DtypeReport:
    """The report of what was traced."""
    found: list[dict[Operation, Operation]] = [{}, {}, {}, {}]
    products, narrow, opaque, unknown = found
    while_loops: dict[str, None] = {}
    usual = _usual_precision()
    for at in equations(jaxpr):
        takes_floats, traits = any(map(is_float, at.eqn.invars)), traits_of(at.name)
        if is_opaque(at.eqn) and takes_floats:
            _add(opaque, _operation(at))
        elif at.name not in TABLE and takes_floats:
            _add(unknown, _operation(at))
        elif is_product(at.eqn):
            _add(products, _product(at, usual))
            whiles = [holder for holder in at.holders if holder.name == "while"]
            while_loops |= {holder.source: None for holder in whiles[:1]}
        elif _is_narrow(at.eqn):
            terms = at.summed * terms_of(at.eqn)
            if terms > 1 or Is.EXPONENTIAL in traits or Is.SENDS | Is.ADDS_MANY in traits:
                _add(narrow, _operation(at)._replace(terms=terms))
    of = lambda kind: tuple(kind.values())
    return DtypeReport(of(products), of(narrow), of(opaque), of(unknown), tuple(while_loops))


def product_rows(products: Iterable[Operation], report: DtypeReport) -> list[str]:
    """Products as lines of text, with their share of the report's multiplications."""
    return _rows(products, max(sum(p.multiplications for p in report.products), 1))


# --- an equation as an operation ---


def _operation(at: Equation) -> Operation:
    """One, with all the floating-point arrays that it takes."""
    floats = [
        (v.aval.dtype, was) for v, was in zip(at.eqn.invars, at.before, strict=True) if is_float(v)
    ]
    operands, before = zip(*floats, strict=True)
    result = at.eqn.outvars[0].aval.dtype if at.eqn.outvars else None
    return Operation(at.name, operands, before, result, at.source, 1, 0, 1, False, "")


def _product(at: Equation, usual: str) -> Operation:
    """One that multiplies its first two operands."""
    eqn, terms = at.eqn, terms_of(at.eqn)
    precision = str(eqn.params.get("precision"))
    operands = tuple(_ROUNDING.get(precision, v.aval.dtype) for v in eqn.invars[:2])
    is_algorithm = "_" in precision and precision not in _ROUNDING  # such as F32_F32_F32
    asks = (is_algorithm or "HIGHEST" in precision) and precision != usual
    by_choice = asks or is_of_the_optimizer(eqn) or is_of_a_decomposition(eqn)
    return Operation(
        eqn.primitive.name,
        operands,
        at.before[:2],
        eqn.outvars[0].aval.dtype,
        at.source,
        count=1,
        multiplications=at.runs * results_of(eqn) * terms,
        terms=terms,
        by_choice=by_choice,
        left_in=_left_in(at) if FLOAT32 in operands and not by_choice else "",
    )


def _left_in(at: Equation) -> str:
    """What a product is that `autocast` leaves in float32, or is in."""
    around = (at, *at.holders)
    if why := next(filter(None, (why_left(e.eqn) for e in around)), ""):
        return why
    # It would have been narrowed where the program shows it.
    is_within = any(SCOPE in str(e.eqn.source_info.name_stack) for e in around)
    return "what only a derivative has" if is_within and is_narrowed(at.eqn) else ""


def _add(found: dict[Operation, Operation], one: Operation) -> None:
    """Counts it with those that differ from it in numbers alone."""
    kind = one._replace(count=0, multiplications=0, terms=0)
    old = found.get(kind, kind)
    found[kind] = one._replace(
        count=old.count + one.count,
        multiplications=old.multiplications + one.multiplications,
        terms=max(old.terms, one.terms),
    )


def _usual_precision() -> str:
    """What a product has that asks for nothing: `jax_default_matmul_precision`'s."""
    vector = jax.ShapeDtypeStruct((1,), jnp.float32)
    return str(jax.make_jaxpr(lax.dot)(vector, vector).eqns[0].params["precision"])


def _is_narrow(eqn: Any) -> bool:
    floats = [v.aval.dtype for v in eqn.invars if is_float(v)]
    return bool(floats) and all(dtype.itemsize <= 2 for dtype in floats)


# --- text ---


def _rows(operations: Iterable[Operation], total: int = 0) -> list[str]:
    """Operations as lines of text, with their share of so many multiplications: the largest."""
    share = lambda one: [f"{one.multiplications / total:.1%}"] if total else []
    by_size = lambda one: (one.multiplications, one.terms, one.count)
    found = sorted(operations, key=by_size, reverse=True)
    rows = [(_dtypes(one), *share(one), _counted(one)) for one in found[:_SHOWN]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(["", *map(str.ljust, row, widths), one.source + _why(one)])
        for row, one in zip(rows, found, strict=False)
    ]
    return lines if len(found) <= _SHOWN else [*lines, f"  and {len(found) - _SHOWN} more"]


def _why(operation: Operation) -> str:
    """Why it is in the dtype that it is in, where something says so."""
    if operation.by_choice:
        return ", by choice"
    return f", as autocast leaves {operation.left_in}" if operation.left_in else ""


def _dtypes(operation: Operation) -> str:
    """Those of the operands, and what they were: `float32 × float16→float32`."""
    named = lambda now, was: str(now) if now == was else f"{was}→{now}"
    shown = list(map(named, operation.operands, operation.before))
    return shown[0] if len(set(shown)) == 1 else " × ".join(shown)


def _counted(operation: Operation) -> str:
    is_sum = operation.terms > 1 and not operation.multiplications
    return f"{operation.count} {operation.primitive}" + f" of {operation.terms} terms" * is_sum
