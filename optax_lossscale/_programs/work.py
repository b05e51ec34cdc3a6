"""How much an equation computes: how many numbers, each from how many terms."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from optax_lossscale._programs.operations import operation


def results_of(eqn: Any) -> int:
    """How many numbers a product gives, each a sum of `terms_of`."""
    shape = eqn.outvars[0].aval.shape
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    # Each group is part of a sum
    if ragged and set(ragged.lhs_ragged_dimensions) & set(_contracted(eqn)):
        shape = shape[1:]
    # The zeros that a transposed convolution puts between its inputs are not
    # multiplied.
    dilation = math.prod(eqn.params.get("lhs_dilation", ()))
    return math.ceil(math.prod(shape) / dilation)


def terms_of(eqn: Any) -> int:
    """How many numbers each result of an equation sums; sums over devices are not counted."""
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
            # At most, if all go to one place.
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
