"""An equation as it would be if the program had been written in wider floats.

`in_wide(eqn, ins, FLOAT32)` applies an equation of the program to operands that are
float32 where the program's are narrower; with `FLOAT64`, to wider ones still. Most
operations accept them; those whose parameters name a narrower dtype, such as a cast,
get the wide one there. An equation that computes in its own dtypes nevertheless, such
as a kernel written for float16, gets operands in these, and is said to have done so.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from optax_lossscale._diagnosis.equations import dtypes_of
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import (
    Array,
    dtype_in,
    dtypes_in,
    in_dtype,
    in_dtypes,
    is_inexact_dtype,
    is_narrow_dtype,
    shape_in,
)
from optax_lossscale._programs.versions import bind, is_program, name_of, params_of


@functools.cache
def wide_dtype(dtype: np.dtype, wide: np.dtype | None) -> np.dtype:
    """`wide` for narrower floats; complex64 becomes complex128 beside float64.

    All other dtypes stay as they are; and every one does if `wide` is None.
    """
    if wide is None or not is_inexact_dtype(dtype):
        return dtype
    return wide if is_narrow_dtype(dtype) else np.promote_types(dtype, wide)


def widened(x: Array, wide: np.dtype | None) -> Array:
    """The same numbers, in `wide` if their dtype was narrower."""
    return in_dtype(wide_dtype(dtype_in(x), wide), x)


def narrows(eqn: JaxprEqn, wide: np.dtype | None) -> bool:
    """Whether an equation, or one in a program that it holds, has a narrower value."""
    return any(wide_dtype(dtype, wide) != dtype for dtype in dtypes_of(eqn))


def applied(eqn: JaxprEqn, ins: Sequence[Array]) -> list[Array]:
    """Applies an equation to arrays that may differ along all axes of the mesh."""
    if Is.VARIES not in traits(eqn):
        return bind(eqn, ins)
    if Is.ADDS_MANY in traits(eqn):
        return [lax.psum(x, eqn.params["axes"]) for x in ins]
    return list(ins)


def in_wide(
    eqn: JaxprEqn, ins: Sequence[Array], wide: np.dtype | None
) -> tuple[list[Array], bool]:
    """The results of an equation for wide operands, or as it is if `wide` is None.

    Also returns whether it computed in its own dtypes all the same, as kernels do.
    """
    if not narrows(eqn, wide):
        return applied(eqn, ins), False
    # Such as the bits of a random number, which differ in another dtype
    if Is.OF_BITS in traits(eqn):
        return _as_written(eqn, ins, wide), False
    expected = [(wide_dtype(dtype_in(v), wide), shape_in(v)) for v in eqn.outvars]
    try:
        results = _rewritten(eqn, ins, wide)
    except (TypeError, ValueError, NotImplementedError):
        return _as_written(eqn, ins, wide), True
    if [(x.dtype, x.shape) for x in results] != expected:
        return _as_written(eqn, ins, wide), True
    return results, False


def _as_written(
    eqn: JaxprEqn, ins: Sequence[Array], wide: np.dtype | None
) -> list[Array]:
    """The results in the equation's own dtypes, to which operands are cast, widened."""
    results = applied(eqn, in_dtypes(dtypes_in(eqn.invars), ins))
    return [widened(x, wide) for x in results]


def _rewritten(
    eqn: JaxprEqn, ins: Sequence[Array], wide: np.dtype | None
) -> list[Array]:
    """The results of an equation whose parameters name `wide` for narrower dtypes."""
    params = dict(eqn.params)
    if "update_jaxpr" in params:  # a scatter, whose function traces that anew
        del params["update_jaxpr"], params["update_consts"]
        function = getattr(lax, name_of(eqn).replace("-", "_"))
        return [function(*ins, **params)]
    leaves = jax.tree.leaves(list(params_of(eqn).values()))
    if Is.OPAQUE in traits(eqn) or any(map(is_program, leaves)):
        raise NotImplementedError
    # `reduce_precision` to that of a narrower dtype rounds nothing in a wide one.
    if "mantissa_bits" in params and is_narrow_dtype(dtype_in(eqn.invars[0])):
        return list(ins)
    if not isinstance(params.get("precision"), (tuple, lax.Precision, type(None))):
        params["precision"] = None  # an algorithm for narrower operands
    for key, value in params.items():
        if isinstance(value, np.dtype):
            params[key] = wide_dtype(value, wide)
    return applied(eqn.replace(params=params), ins)
