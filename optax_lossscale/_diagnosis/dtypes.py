"""`dtype_report`: which products of a program compute in which dtype, by line.

It reads the traced program and runs nothing. A row collects the products of one kind on
one line, as in

    float32  50.0%  1 dot_general  model.py:12 (Block.__call__)

where half of all multiplications are in a product that is computed in float32.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from optax_lossscale._arrays import checks
from optax_lossscale._autocast.products import usual_precision
from optax_lossscale._diagnosis.text import aligned, percent
from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.call import as_program
from optax_lossscale._programs.lines import is_made_by_optax, line_of
from optax_lossscale._programs.products import (
    asks_for_highest,
    count_multiplications,
    is_product,
)
from optax_lossscale._programs.values import dtypes_in
from optax_lossscale._programs.versions import (
    AnyJaxpr,
    mapped_axes,
    name_of,
    open_jaxpr,
)
from optax_lossscale._programs.walk import programs_in


class Product(NamedTuple):
    """All products of one kind on one line, such as those of two float32 arrays.

    Attributes:
      primitive: its name in JAX, such as `dot_general` or `conv_general_dilated`.
      operands: the dtypes of the two arrays that it multiplies.
      source: the line of your source, such as `model.py:12 (Block.__call__)`.
      by_choice: whether it has its dtype on purpose: because its call sets HIGHEST
        precision or an algorithm, and that is not the default, or because Optax made
        it.
      count: how many of these products the program has.
      multiplications: how many multiplications one run computes.
    """

    primitive: str
    operands: tuple[np.dtype, ...]
    source: str
    by_choice: bool
    count: int = 1
    multiplications: int = 0

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which it computes: float32 for float16 with bfloat16."""
        return np.dtype(jnp.promote_types(*self.operands))


class DtypeReport(NamedTuple):
    """The result of `dtype_report`; print it for a table, the largest products first.

    Attributes:
      products: the matrix products and convolutions, in the order of the program.
    """

    products: tuple[Product, ...]

    @property
    def shares(self) -> dict[np.dtype, float]:
        """The share of the multiplications in each dtype, the largest first."""
        counts: Counter[np.dtype] = Counter()
        for product in self.products:
            counts[product.dtype] += product.multiplications
        total = max(counts.total(), 1)
        return {dtype: n / total for dtype, n in counts.most_common()}

    def __str__(self) -> str:
        title = "Matrix products and convolutions:"
        if not self.products:
            return f"{title} none"
        totals = [
            f"  {share:.1%} of the multiplications in {dtype}"
            for dtype, share in self.shares.items()
        ]
        return "\n".join([title, *totals, "by line:", *self.rows_of(self.products)])

    def rows_of(self, products: Iterable[Product]) -> list[str]:
        """Returns a line of the table for each of some products, the largest first."""
        by_size = attrgetter("multiplications")
        total = max(sum(map(by_size, self.products)), 1)
        rows = [
            (
                "",  # indents the row
                " × ".join(dict.fromkeys(map(str, product.operands))),
                percent(product.multiplications / total),
                f"{product.count} {product.primitive}",
                product.source + (", by choice" if product.by_choice else ""),
            )
            for product in sorted(products, key=by_size, reverse=True)
        ]
        return aligned(rows)


def dtype_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> DtypeReport:
    """Reports in which dtypes the products of a function compute, by source line.

    Use it if a model in 16 bits is no faster than in float32. JAX promotes operands to
    the widest dtype among them, and so do Flax's modules without a `dtype`. After a
    single float32 input, everything may therefore be computed in float32, and the only
    sign of it is the time that it takes. `autocast` avoids this.

    To include the backward pass, call it on the whole training step. It traces the
    function and all that it calls, but runs and compiles nothing, so shapes are
    enough. Every branch of a `cond` counts as run, and the body of a `while` as run
    once. Outer and inner products, which multiply each element once, do not count.

    Args:
      fun: a function that JAX can trace, compiled or not.
      *args: its arguments: trees and modules of arrays, or of `jax.ShapeDtypeStruct`.
        Anything else is passed on as it is.
      **kwargs: its keyword arguments, likewise.

    Returns:
      A `DtypeReport`. Print it, or read its `products` and `shares`.

    Raises:
      TypeError: if `fun` is not a function.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> weights, x = jnp.ones((4, 2), jnp.float16), jnp.ones((8, 4))
      >>> report = ols.dtype_report(lambda weights, x: x @ weights, weights, x)
      >>> report.shares
      {dtype('float32'): 1.0}
    """
    checks.check_function("fun", fun)
    with as_program(fun, args, kwargs) as call:
        return DtypeReport(products_in(call.program, usual_precision()))


@cached_by_program
def products_in(
    program: AnyJaxpr, usual: Any, outer_line: str = ""
) -> tuple[Product, ...]:
    """Returns the products in a program and in those inside it, of each kind once.

    Args:
      program: the program.
      usual: the precision of a product whose call does not set one.
      outer_line: the user's line that runs the program.
    """
    totals: dict[Product, Product] = {}
    for eqn in open_jaxpr(program).eqns:
        line = line_of(eqn, outer_line)
        products = [_product(eqn, usual, line)] if is_product(eqn) else []
        for inner in programs_in(eqn):
            for product in products_in(inner, usual, line):
                times = _times_run(eqn) * product.multiplications
                products.append(product._replace(multiplications=times))
        for product in products:
            kind = product._replace(count=0, multiplications=0)
            total = totals.get(kind, kind)
            totals[kind] = total._replace(
                count=total.count + product.count,
                multiplications=total.multiplications + product.multiplications,
            )
    return tuple(totals.values())


def _product(eqn: JaxprEqn, usual: Any, line: str) -> Product:
    is_asked_for = asks_for_highest(eqn) and eqn.params["precision"] != usual
    return Product(
        name_of(eqn),
        tuple(dtypes_in(eqn.invars[:2])),
        line,
        by_choice=is_asked_for or is_made_by_optax(eqn),
        multiplications=count_multiplications(eqn),
    )


def _times_run(eqn: JaxprEqn) -> int:
    """Returns how often an equation runs its programs; a `while` counts as once."""
    if name_of(eqn) == "scan":
        return eqn.params["length"]
    if name_of(eqn) == "shard_map":
        mesh = eqn.params["mesh"]
        return math.prod(mesh.shape[axis] for axis in mapped_axes(eqn))
    return 1
