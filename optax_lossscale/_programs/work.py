"""How much an equation computes: how many numbers, each from how many terms."""

import math
from typing import Any

from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.versions import open_jaxpr


def results_of(eqn: Any) -> int:
    """How many numbers a product gives, each a sum of `terms_of`."""
    shape, params = eqn.outvars[0].aval.shape, eqn.params
    if eqn.primitive.name == "conv_general_dilated":
        # The zeros that a transposed convolution puts between its inputs are not multiplied.
        return math.prod(shape) // math.prod(params["lhs_dilation"])
    if numbers := params.get("ragged_dot_dimension_numbers"):
        (contracted, _), _ = numbers.dot_dimension_numbers
        if set(numbers.lhs_ragged_dimensions) & set(contracted):  # each group is a part of the sum
            return math.prod(shape[1:])
    return math.prod(shape)


def terms_of(eqn: Any) -> int:
    """How many numbers each result of an equation sums; sums over devices are not counted."""
    name, params = eqn.primitive.name, eqn.params
    shape, *others = (tuple(getattr(v.aval, "shape", ())) for v in eqn.invars)
    if name == "conv_general_dilated":
        features = others[0][params["dimension_numbers"].rhs_spec[0]]
        return math.prod(others[0]) // max(features, 1)
    if name == "scaled_matmul_wrapper":
        return shape[-1]
    if Is.PRODUCT in traits_of(name):
        ragged = params.get("ragged_dot_dimension_numbers")
        numbers = ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]
        (contracted, _), _ = numbers
        return math.prod(shape[axis] for axis in contracted)
    if Is.ADDS_MANY not in traits_of(name) or Is.SENDS in traits_of(name):
        return 1
    adds = lambda e: Is.ADDS_TWO in traits_of(e.primitive.name)
    if "jaxpr" in params and not any(map(adds, open_jaxpr(params["jaxpr"]).eqns)):
        return 1  # a reduction by a function other than a sum
    if name == "cumsum":
        return shape[params["axis"]]
    if name.startswith("scatter"):  # at most, if all go to one place
        window = params["dimension_numbers"].update_window_dims
        return math.prod(n for axis, n in enumerate(others[1]) if axis not in window)
    if "window_dimensions" in params:
        return math.prod(params["window_dimensions"])
    axes = params["axes" if name == "reduce_sum" else "dimensions"]
    return math.prod(shape[axis] for axis in axes)
