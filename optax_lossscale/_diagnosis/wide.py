"""An equation as it would be if the program had been written in float32.

`in_float32(eqn, ins)` applies an equation of the program to operands that are float32
where the program's are narrow. Most operations accept them; those whose parameters name
a narrow dtype, such as a cast, get float32 there. An equation that computes in 16 bits
nevertheless, such as a kernel written for float16, raises `NotWidenedError`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.values import FLOAT32, dtype_in, in_dtype, in_dtypes
from optax_lossscale._programs.versions import bind, is_program, open_jaxpr, params_of

# The types of a foreign function's results, among an equation's parameters
_SHAPES = (jax.core.ShapedArray, jax.ShapeDtypeStruct)
_SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


class NotWidenedError(Exception):
    """An equation computes in 16 bits whatever dtypes its operands have."""


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a floating-point one of 16 bits or fewer."""
    return (
        dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    )


def wide_dtype(dtype: Any) -> Any:
    """float32 for floating-point dtypes of 16 bits and fewer; others as they are."""
    return FLOAT32 if is_narrow(dtype) else dtype


def widened(x: Any) -> Any:
    """The same numbers, in float32 if they were in 16 bits or fewer."""
    return in_dtype(wide_dtype(dtype_in(x)), x)


def narrows(eqn: Any) -> bool:
    """Whether an equation, or one in a program that it holds, has a narrow value."""
    own = map(dtype_in, (*eqn.invars, *eqn.outvars))
    inside = (e for x in _leaves(eqn) if is_program(x) for e in open_jaxpr(x).eqns)
    return any(map(is_narrow, own)) or any(map(narrows, inside))


def as_written(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation in its own dtypes, for operands in float32.

    The operands are cast to the program's dtypes, and narrow results to float32.
    """
    return list(
        map(widened, bind(eqn, in_dtypes(list(map(dtype_in, eqn.invars)), ins)))
    )


def in_float32(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation for operands in float32.

    Raises:
      NotWidenedError: if it computes in 16 bits all the same, as kernels do.
    """
    if not narrows(eqn):
        return bind(eqn, ins)
    # Such as the bits of a random number, which differ in another dtype
    if Is.OF_BITS in traits_of(eqn.primitive.name):
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
    name = eqn.primitive.name
    params = dict(eqn.params)
    if name in _SCATTERS:
        del params["update_jaxpr"], params["update_consts"]
        return [_SCATTERS[name](*ins, **params)]
    if any(map(_is_whole, _leaves(eqn))):
        raise NotWidenedError
    if name == "convert_element_type":
        return [in_dtype(wide_dtype(params["new_dtype"]), ins[0])]
    if name == "reduce_precision":
        return list(ins)
    if "precision" in params and not isinstance(
        params["precision"], (tuple, lax.Precision)
    ):
        params["precision"] = None  # an algorithm for operands in 16 bits
    for key, value in params.items():
        if isinstance(value, (np.dtype, type)) and is_narrow(_dtype(value)):
            params[key] = FLOAT32
    return bind(eqn.replace(params=params), ins)


def _dtype(x: Any) -> Any:
    try:
        return jnp.dtype(x)
    except TypeError:  # a class that is no dtype
        return None


def _leaves(eqn: Any) -> list[Any]:
    """The leaves of an equation's parameters, where a program or a type is one."""
    return jax.tree.leaves(list(params_of(eqn).values()), is_leaf=_is_whole)


def _is_whole(x: Any) -> bool:
    """Whether `x` is a program, or the type of a foreign function's result."""
    return is_program(x) or isinstance(x, _SHAPES)
