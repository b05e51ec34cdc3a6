"""How much an equation computes: how many numbers, each a sum of how many terms.

A product of matrices of shapes (8, 4) and (4, 2) gives 16 numbers of 4 terms each. The
cell `terms` in the row of the operation says how its terms are counted.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from optax_lossscale._programs.operations import operation


def results_of(eqn: Any) -> int:
    """How many numbers a product computes, each a sum of `terms_of` terms."""
    shape = eqn.outvars[0].aval.shape
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    # The first axis of the result is then that of the groups, and the contracted axis
    # is divided among these: together, they take the multiplications of one product.
    if ragged and set(ragged.lhs_ragged_dimensions) & set(_contracted(eqn)):
        shape = shape[1:]
    # A transposed convolution puts zeros between its inputs, which are not counted.
    dilation = math.prod(eqn.params.get("lhs_dilation", ()))
    return math.ceil(math.prod(shape) / dilation)


def terms_of(eqn: Any) -> int:
    """How many terms each result of an equation sums; 1 for one that is not a sum.

    A sum over devices counts as none.
    """
    terms = operation(eqn).terms
    if not terms:
        return 1
    params = eqn.params
    shape = eqn.invars[0].aval.shape
    match terms:
        case "contracted":
            summed = _contracted(eqn)
        case "last":
            summed = [-1]
        case "kernel":
            shape = eqn.invars[1].aval.shape
            _features, *summed = params["dimension_numbers"].rhs_spec
        case "updates":
            # This many at most: those of all updates, if all have the same index.
            shape = eqn.invars[2].aval.shape
            window = params["dimension_numbers"].update_window_dims
            summed = set(range(len(shape))).difference(window)
        case "window_dimensions":
            return math.prod(params[terms])
        case _:
            summed = np.atleast_1d(params[terms])
    return math.prod(shape[axis] for axis in summed)


def _contracted(eqn: Any) -> Sequence[int]:
    """The axes of the first operand that a matrix product sums over."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = (
        ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
    )
    (contracted, _), _ = numbers
    return contracted
