"""What `diagnose` alone still asks, until it is rewritten: see `work` below.

Which equations are products, which are cheap, and how much they compute.

A *product* in this package is a matrix product or a convolution that sums. An outer
product does not count, because it sums nothing. Nor does an inner product or a batch of
them: every axis of the operands is summed over or is a batch axis, so each element is
multiplied only once.

The work of a product is the number of its results times the number of terms that each
result sums. A product of matrices of shapes (8, 4) and (4, 2) has 16 results of 4 terms
each, so its work is 64 multiplications. How terms are counted differs between
operations: the cells `axes` and `terms` in an operation's row in `operations.py` say
how.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from optax_lossscale._diagnosis.old_operations import Trait, row_of, traits
from optax_lossscale._diagnosis.old_walk import programs_in
from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.values import Atom, lengths_of, shape_in
from optax_lossscale._programs.versions import AnyJaxpr, open_jaxpr


def is_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a matrix product or a convolution that sums.

    An inner product does not count, whether it returns a single number or one number
    for each index of a batch.
    """
    if Trait.PRODUCT not in traits(eqn):
        return False
    if count_terms(eqn) == 1:  # it sums nothing
        return False
    if Trait.MAY_BE_OUTER not in traits(eqn):
        return True
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    # In an inner product, every axis is either summed over or a batch axis.
    n_shared = len(contracted) + len(batch)
    return any(len(shape_in(v)) > n_shared for v in eqn.invars)


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation's results may be computed again instead of being stored.

    Its operation must be `CHEAP`, and all equations in the programs that it holds must
    be cheap in turn. A product is not cheap, and neither is an equation with effects,
    which must run exactly once.
    """
    if eqn.effects or is_product(eqn) or Trait.CHEAP not in traits(eqn):
        return False
    return all(map(_is_cheap_program, programs_in(eqn)))


@cached_by_program
def _is_cheap_program(program: AnyJaxpr) -> bool:
    return all(map(is_cheap, open_jaxpr(program).eqns))


def asks_for_highest(eqn: JaxprEqn) -> bool:
    """Whether a product has HIGHEST precision or an algorithm and must stay as it is.

    Either may come from the call or from the default precision around it. In the
    equation, JAX stores a precision as a pair, with one entry per operand, and an
    algorithm as a single object.
    """
    precision = eqn.params.get("precision")
    if isinstance(precision, tuple):
        return lax.Precision.HIGHEST in precision
    return precision is not None


def count_results(eqn: JaxprEqn) -> int:
    """Counts the results that a product computes, each a sum of `count_terms` terms.

    If some terms need no multiplication, it counts fewer results. The number of results
    times the number of terms is then still about the number of multiplications needed.
    """
    lengths = lengths_of(eqn.outvars[0].aval)
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    # If the ragged axis is contracted, each group sums over a part of it, and the first
    # axis of the result has one entry per group. All groups together do only as many
    # multiplications as a product without that axis.
    if ragged and set(ragged.lhs_ragged_dimensions) & set(_contracted(eqn)):
        lengths = lengths[1:]
    # A transposed convolution puts zeros between its inputs. Their terms do not count.
    dilation = math.prod(eqn.params.get("lhs_dilation", ()))
    return math.ceil(math.prod(lengths) / dilation)


def count_terms(eqn: JaxprEqn) -> int:
    """Counts the terms of each result of an equation; 1 if it is not a sum.

    Sums over devices count as 1, because no shape tells how many devices there are.
    """
    row = row_of(eqn)
    params = eqn.params
    if row.axes is not None:
        summed = np.atleast_1d(params[row.axes])
        return _size_along(eqn.invars[0], summed)
    match row.terms:
        case None:
            return 1
        case "contracted":
            return _size_along(eqn.invars[0], _contracted(eqn))
        case "kernel":
            _out_features, *summed = params["dimension_numbers"].rhs_spec
            return _size_along(eqn.invars[1], summed)
        case "last":
            return _size_along(eqn.invars[0], [-1])
        case "updates":
            updates = eqn.invars[2]
            # An upper bound: a result sums all updates if all have the same index.
            window = params["dimension_numbers"].update_window_dims
            axes = range(len(shape_in(updates)))
            summed = set(axes).difference(window)
            return _size_along(updates, summed)
        case "window":
            return math.prod(params["window_dimensions"])


def _size_along(operand: Atom, axes: Iterable[int]) -> int:
    """Returns the product of the lengths of an operand's `axes`."""
    lengths = lengths_of(operand.aval)
    return math.prod(lengths[axis] for axis in axes)


def _contracted(eqn: JaxprEqn) -> Sequence[int]:
    """Returns the axes of the first operand that a matrix product sums over."""
    params = eqn.params
    ragged = params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]
    (contracted, _), _ = numbers
    return contracted
