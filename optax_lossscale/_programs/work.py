"""What equations compute: which are products, which are cheap, and how much it is.

A *product* in this package is a matrix product or a convolution that sums; an inner
product, which gives single numbers, is none, and neither is an outer product, which
sums nothing.

A product of matrices of shapes (8, 4) and (4, 2) gives 16 numbers of 4 terms each. The
cell `terms` in the row of the operation says how its terms are counted.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.operations import Trait, row_of, traits
from optax_lossscale._programs.values import lengths_of, shape_in
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import programs_in


def is_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product: a matrix product or convolution that sums.

    An inner product, which gives a single number, or one for each index of a batch, is
    none.
    """
    if Trait.PRODUCT not in traits(eqn) or multiplies_once(eqn):
        return False
    if Trait.OUTER not in traits(eqn):
        return True
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    # An inner product has no axis that is neither summed nor of the batch.
    n_shared = len(contracted) + len(batch)
    return any(len(shape_in(v)) > n_shared for v in eqn.invars)


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation takes so little time that it may be computed more than once.

    Its operation has to be `CHEAP`. A product is not cheap, and neither is an equation
    with effects, which has to run once. For an equation that holds programs, all
    equations in the programs have to be cheap.
    """
    if eqn.effects or is_product(eqn) or Trait.CHEAP not in traits(eqn):
        return False
    return all(map(_are_all_cheap, programs_in(eqn)))


@cached_by_program
def _are_all_cheap(program: Any) -> bool:
    return all(map(is_cheap, open_jaxpr(program).eqns))


def multiplies_once(eqn: JaxprEqn) -> bool:
    """Whether each result of a product is one number times another, without a sum."""
    return terms_of(eqn) == 1


def asks_for_highest(eqn: JaxprEqn) -> bool:
    """Whether a product asks for HIGHEST precision, or for an algorithm.

    Either is asked for in the call, or by the default around it. JAX writes a precision
    into the equation as a pair, one for each operand, and an algorithm as it is.
    """
    precision = eqn.params.get("precision")
    if isinstance(precision, tuple):
        return lax.Precision.HIGHEST in precision
    return precision is not None


def results_of(eqn: JaxprEqn) -> int:
    """How many numbers a product computes, each a sum of `terms_of` terms."""
    lengths = lengths_of(eqn.outvars[0].aval)
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    # If the contracted axis is the ragged one, each group sums a part of it, and the
    # first axis of the result is that of the groups. All groups together multiply as
    # often as one product.
    if ragged and set(ragged.lhs_ragged_dimensions) & set(_contracted(eqn)):
        lengths = lengths[1:]
    # A transposed convolution puts zeros between its inputs. Their terms are left out,
    # as if there were fewer results.
    dilation = math.prod(eqn.params.get("lhs_dilation", ()))
    return math.ceil(math.prod(lengths) / dilation)


def terms_of(eqn: JaxprEqn) -> int:
    """How many terms each result of an equation sums; 1 for one that is not a sum.

    A sum over devices is taken for no sum.
    """
    terms = row_of(eqn).terms
    if not terms:
        return 1
    params = eqn.params
    lengths = lengths_of(eqn.invars[0].aval)
    match terms:
        case "contracted":
            summed = _contracted(eqn)
        case "last":
            summed = [-1]
        case "kernel":
            lengths = lengths_of(eqn.invars[1].aval)
            _features, *summed = params["dimension_numbers"].rhs_spec
        case "updates":
            # This many at most: those of all updates, if all have the same index.
            lengths = lengths_of(eqn.invars[2].aval)
            window = params["dimension_numbers"].update_window_dims
            summed = set(range(len(lengths))).difference(window)
        case "window_dimensions":
            return math.prod(params[terms])
        case _:
            summed = np.atleast_1d(params[terms])
    return math.prod(lengths[axis] for axis in summed)


def _contracted(eqn: JaxprEqn) -> Sequence[int]:
    """The axes of the first operand that a matrix product sums over."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = (
        ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
    )
    (contracted, _), _ = numbers
    return contracted
