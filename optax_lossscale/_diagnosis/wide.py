"""An equation as it would be if the program had been written in wider floats.

`in_wide(eqn, ins, FLOAT32)` applies an equation of the program to operands that are
float32 where the program's are narrower; with `FLOAT64`, to wider ones still. Most
operations accept them; those whose parameters name a narrower dtype, such as a cast,
get the wide one there. An equation that computes in its own dtypes nevertheless, such
as a kernel written for float16, raises `NotWidenedError`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import (
    dtype_in,
    dtypes_in,
    in_dtype,
    in_dtypes,
    is_narrow,
)
from optax_lossscale._programs.versions import bind, is_program, name_of, params_of
from optax_lossscale._programs.walk import dtypes_of


class NotWidenedError(Exception):
    """An equation computes in its own dtypes whatever those of its operands are."""


@functools.cache
def wide_dtype(dtype: Any, wide: Any) -> Any:
    """`wide` for narrower floats; complex64 becomes complex128 beside float64.

    All other dtypes stay as they are; and every one does if `wide` is None.
    """
    if dtype is None or wide is None or not jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return wide if is_narrow(dtype) else np.promote_types(dtype, wide)


def widened(x: Any, wide: Any) -> Any:
    """The same numbers, in `wide` if their dtype was narrower."""
    return in_dtype(wide_dtype(dtype_in(x), wide), x)


def narrows(eqn: Any, wide: Any) -> bool:
    """Whether an equation, or one in a program that it holds, has a narrower value."""
    return any(wide_dtype(dtype, wide) != dtype for dtype in dtypes_of(eqn))


def applied(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """Applies an equation to arrays that may differ along all axes of the mesh."""
    if Is.VARIES not in traits(eqn):
        return bind(eqn, ins)
    if Is.ADDS_MANY in traits(eqn):
        return [lax.psum(x, eqn.params["axes"]) for x in ins]
    return list(ins)


def as_written(eqn: Any, ins: Sequence[Any], wide: Any) -> list[Any]:
    """The results of an equation in its own dtypes, for wide operands.

    The operands are cast to the program's dtypes, and the results are widened.
    """
    results = applied(eqn, in_dtypes(dtypes_in(eqn.invars), ins))
    return [widened(x, wide) for x in results]


def in_wide(eqn: Any, ins: Sequence[Any], wide: Any) -> list[Any]:
    """The results of an equation for wide operands.

    Raises:
      NotWidenedError: if it computes in its own dtypes all the same, as kernels do.
    """
    if not narrows(eqn, wide):
        return applied(eqn, ins)
    # Such as the bits of a random number, which differ in another dtype
    if Is.OF_BITS in traits(eqn):
        return as_written(eqn, ins, wide)
    expected = [(wide_dtype(v.aval.dtype, wide), v.aval.shape) for v in eqn.outvars]
    try:
        results = _rewritten(eqn, ins, wide)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise NotWidenedError from error
    if [(x.dtype, x.shape) for x in results] != expected:
        raise NotWidenedError
    return results


def _rewritten(eqn: Any, ins: Sequence[Any], wide: Any) -> list[Any]:
    """The results of an equation whose parameters name `wide` for narrower dtypes."""
    params = dict(eqn.params)
    if "update_jaxpr" in params:  # a scatter, whose function traces that anew
        del params["update_jaxpr"], params["update_consts"]
        function = getattr(lax, name_of(eqn).replace("-", "_"))
        return [function(*ins, **params)]
    leaves = jax.tree.leaves(list(params_of(eqn).values()))
    if Is.OPAQUE in traits(eqn) or any(map(is_program, leaves)):
        raise NotWidenedError
    if "mantissa_bits" in params and is_narrow(dtype_in(eqn.invars[0])):
        return list(ins)
    if not isinstance(params.get("precision"), (tuple, lax.Precision, type(None))):
        params["precision"] = None  # an algorithm for narrower operands
    for key, value in params.items():
        if isinstance(value, np.dtype):
            params[key] = wide_dtype(value, wide)
    return applied(eqn.replace(params=params), ins)
