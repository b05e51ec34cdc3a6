"""An equation as it would be if the program had been written in float32.

`in_float32(eqn, ins)` applies an equation of the program to operands that are float32
where the program's are narrow. Most operations accept them; those whose parameters name
a narrow dtype, such as a cast, get float32 there. An equation that computes in 16 bits
nevertheless, such as a kernel written for float16, raises `NotWidenedError`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import (
    FLOAT32,
    dtype_in,
    dtypes_in,
    in_dtype,
    in_dtypes,
    is_narrow,
)
from optax_lossscale._programs.versions import bind, is_program, name_of, params_of
from optax_lossscale._programs.walk import dtypes_of


class NotWidenedError(Exception):
    """An equation computes in 16 bits whatever dtypes its operands have."""


def wide_dtype(dtype: Any) -> Any:
    """float32 for floating-point dtypes of 16 bits and fewer; others as they are."""
    return FLOAT32 if is_narrow(dtype) else dtype


def widened(x: Any) -> Any:
    """The same numbers, in float32 if they were in 16 bits or fewer."""
    return in_dtype(wide_dtype(dtype_in(x)), x)


def narrows(eqn: Any) -> bool:
    """Whether an equation, or one in a program that it holds, has a narrow value."""
    return any(map(is_narrow, dtypes_of(eqn)))


def applied(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """Applies an equation to arrays that may differ along all axes of the mesh."""
    if Is.VARIES not in traits(eqn):
        return bind(eqn, ins)
    if Is.ADDS_MANY in traits(eqn):
        return [lax.psum(x, eqn.params["axes"]) for x in ins]
    return list(ins)


def as_written(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation in its own dtypes, for operands in float32.

    The operands are cast to the program's dtypes, and narrow results to float32.
    """
    return list(map(widened, applied(eqn, in_dtypes(dtypes_in(eqn.invars), ins))))


def in_float32(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation for operands in float32.

    Raises:
      NotWidenedError: if it computes in 16 bits all the same, as kernels do.
    """
    if not narrows(eqn):
        return applied(eqn, ins)
    # Such as the bits of a random number, which differ in another dtype
    if Is.OF_BITS in traits(eqn):
        return as_written(eqn, ins)
    expected = [(wide_dtype(v.aval.dtype), v.aval.shape) for v in eqn.outvars]
    try:
        results = _rewritten(eqn, ins)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise NotWidenedError from error
    if [(x.dtype, x.shape) for x in results] != expected:
        raise NotWidenedError
    return results


def _rewritten(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation whose parameters name float32 for narrow dtypes."""
    params = dict(eqn.params)
    if "update_jaxpr" in params:  # a scatter, whose function traces that anew
        del params["update_jaxpr"], params["update_consts"]
        function = getattr(lax, name_of(eqn).replace("-", "_"))
        return [function(*ins, **params)]
    leaves = jax.tree.leaves(list(params_of(eqn).values()))
    if Is.OPAQUE in traits(eqn) or any(map(is_program, leaves)):
        raise NotWidenedError
    if "mantissa_bits" in params:
        params |= {"exponent_bits": 8, "mantissa_bits": 23}
    if not isinstance(params.get("precision"), (tuple, lax.Precision, type(None))):
        params["precision"] = None  # an algorithm for operands in 16 bits
    for key, value in params.items():
        if isinstance(value, np.dtype) and is_narrow(value):
            params[key] = FLOAT32
    return applied(eqn.replace(params=params), ins)
