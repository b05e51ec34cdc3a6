"""Which equations are products, and how many multiplications they take.

A *product* is a matrix product or a convolution that sums. An outer product is none, as
it sums nothing, and neither is an inner product, alone or in a batch, which multiplies
each element only once.
"""

import math
from collections.abc import Iterable, Sequence

from jax import lax
from jax.extend.core import JaxprEqn

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.operations import PRODUCTS
from optax_lossscale._programs.values import lengths_of, shape_in
from optax_lossscale._programs.versions import AnyJaxpr, name_of, open_jaxpr
from optax_lossscale._programs.walk import programs_in


def is_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a matrix product or a convolution that sums."""
    if name_of(eqn) not in PRODUCTS or _count_terms(eqn) == 1:
        return False
    if name_of(eqn) != "dot_general":
        return True
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    # In an inner product, every axis is either summed over or a batch axis.
    n_shared = len(contracted) + len(batch)
    return any(len(shape_in(v)) > n_shared for v in eqn.invars)


@cached_by_program
def holds_product(program: AnyJaxpr) -> bool:
    """Whether a program, or one in it at any depth, has a product."""
    for eqn in open_jaxpr(program).eqns:
        if is_product(eqn) or any(map(holds_product, programs_in(eqn))):
            return True
    return False


def asks_for_highest(eqn: JaxprEqn) -> bool:
    """Whether a product has HIGHEST precision or an algorithm, and so stays as it is.

    Either may come from the call or from the default precision around it. In the
    equation, JAX stores a precision as a pair, with one entry for each operand, and an
    algorithm as a single object.
    """
    precision = eqn.params.get("precision")
    if isinstance(precision, tuple):
        return lax.Precision.HIGHEST in precision
    return precision is not None


def count_multiplications(eqn: JaxprEqn) -> int:
    """Counts the multiplications of a product, without those by padding's zeros."""
    lengths = lengths_of(eqn.outvars[0].aval)
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    # If the ragged axis is contracted, each group sums over a part of it, and the first
    # axis of the result has one entry for each group.
    if ragged and set(ragged.lhs_ragged_dimensions) & set(_contracted(eqn)):
        lengths = lengths[1:]
    # A transposed convolution puts zeros between its inputs.
    dilation = math.prod(eqn.params.get("lhs_dilation") or ())
    return math.ceil(math.prod(lengths) / dilation) * _count_terms(eqn)


def _count_terms(eqn: JaxprEqn) -> int:
    """Counts the terms that each result of a product sums."""
    if name_of(eqn) == "conv_general_dilated":
        _, *summed = eqn.params["dimension_numbers"].rhs_spec
        return _size_along(eqn.invars[1].aval, summed)
    if name_of(eqn) == "scaled_matmul_wrapper":
        return _size_along(eqn.invars[0].aval, [-1])
    return _size_along(eqn.invars[0].aval, _contracted(eqn))


def _contracted(eqn: JaxprEqn) -> Sequence[int]:
    """Returns the axes of the first operand that a matrix product sums over."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = (ragged and ragged.dot_dimension_numbers) or eqn.params[
        "dimension_numbers"
    ]
    (contracted, _), _ = numbers
    return contracted


def _size_along(array: object, axes: Iterable[int]) -> int:
    lengths = lengths_of(array)
    return math.prod(lengths[axis] for axis in axes)
