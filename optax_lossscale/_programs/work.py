"""How much an equation computes: how many numbers, each from how many terms."""

import math
from collections.abc import Sequence
from typing import Any

from optax_lossscale._programs.operations import Is, operation, traits
from optax_lossscale._programs.versions import open_jaxpr


def results_of(eqn: Any) -> int:
    """How many numbers a product gives, each a sum of `terms_of`."""
    shape = eqn.outvars[0].aval.shape
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    if ragged:
        (contracted, _), _ = ragged.dot_dimension_numbers
        # Each group is part of a sum
        if set(ragged.lhs_ragged_dimensions) & set(contracted):
            shape = shape[1:]
    # The zeros that a transposed convolution puts between its inputs are not
    # multiplied.
    dilation = math.prod(eqn.params.get("lhs_dilation", ()))
    return math.ceil(math.prod(shape) / dilation)


def terms_of(eqn: Any) -> int:
    """How many numbers each result of an equation sums; sums over devices are not counted."""
    count = _TERMS.get(operation(eqn).terms)
    if count is None or not _adds(eqn):
        return 1
    shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]
    return count(*shapes, **eqn.params)


def _adds(eqn: Any) -> bool:
    """Whether an equation that reduces by a function of its own does so by a sum."""
    if "jaxpr" not in eqn.params:
        return True
    return any(
        Is.ADDS_TWO in traits(inner) for inner in open_jaxpr(eqn.params["jaxpr"]).eqns
    )


# --- from the shapes of operands, and parameters ---

Shape = Sequence[int]


def _of_axes(x: Shape, *_: Shape, axes: Sequence[int], **params: Any) -> int:
    return math.prod(x[axis] for axis in axes)


def _of_axis(x: Shape, *_: Shape, axis: int, **params: Any) -> int:
    return x[axis]


def _of_contracted(x: Shape, *_: Shape, **params: Any) -> int:
    ragged = params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]
    (contracted, _), _ = numbers
    return _of_axes(x, axes=contracted)


def _of_dimensions(x: Shape, *_: Shape, dimensions: Shape, **params: Any) -> int:
    return _of_axes(x, axes=dimensions)


def _of_kernel(
    _: Shape, kernel: Shape, *, dimension_numbers: Any, **params: Any
) -> int:
    _features, *summed = dimension_numbers.rhs_spec
    return _of_axes(kernel, axes=summed)


def _of_last(x: Shape, *_: Shape, **params: Any) -> int:
    return x[-1]


def _of_updates(
    _: Shape, __: Shape, updates: Shape, *, dimension_numbers: Any, **params
) -> int:
    # At most, if all go to one place.
    window = dimension_numbers.update_window_dims
    return math.prod(n for axis, n in enumerate(updates) if axis not in window)


def _of_window(*_: Shape, window_dimensions: Shape, **params: Any) -> int:
    return math.prod(window_dimensions)


_TERMS = {
    "axes": _of_axes,
    "axis": _of_axis,
    "contracted": _of_contracted,
    "dimensions": _of_dimensions,
    "kernel": _of_kernel,
    "last": _of_last,
    "updates": _of_updates,
    "window": _of_window,
}
