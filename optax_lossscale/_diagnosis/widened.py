"""The rule by which a program holds every 16-bit float in a float32."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.run import ByEquation, Records, Rule
from optax_lossscale._programs.values import (
    FLOAT32,
    HALVES,
    dtype_in,
    dtypes_in,
    in_dtype,
    in_dtypes,
)
from optax_lossscale._programs.versions import bind, is_program, open_jaxpr, params_of

_SHAPES = (jax.core.ShapedArray, jax.ShapeDtypeStruct)  # of what a foreign function returns
_SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}

Compute = Callable[[int, Any, Sequence[Any]], tuple[list[Any], Any]]


def evaluate(
    jaxpr: Any, args: Sequence[Any], compute: Compute | None = None
) -> tuple[list, Records]:
    """The results of a program, in which every 16-bit float is held in a float32.

    A jaxpr of gradients holds the backward pass too, custom derivatives as they were traced, so
    this is what the same function would compute if it had been written in float32: numbers
    overflow, vanish and are rounded where float32's do. What is drawn at random stays the same,
    as its bits are.

    Args:
      jaxpr: the program, closed or without constants, traced in whatever dtypes.
      args: its arguments. 16-bit floats may be given as float32.
      compute: computes each equation that holds no others; None for `widely`.

    Returns:
      The results, float32 for 16-bit floats, and what `compute` noted, under the numbers of
      `numbered`.
    """
    just_widely = lambda number, eqn, ins: (widely(eqn, ins), None)
    return ByEquation(jaxpr, Rule(compute or just_widely, held_dtype))(args)


def widely(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation that holds no others, in float32."""
    if not _has_halves(eqn) or Is.OF_BITS in traits_of(eqn.primitive.name):
        return rounded(eqn, ins)
    try:
        outs = _computed_widely(eqn, ins)
    except (TypeError, ValueError, NotImplementedError):  # for that it has no rule
        return rounded(eqn, ins)
    is_wide = all(
        x.dtype == held_dtype(v.aval.dtype) and x.shape == v.aval.shape
        for x, v in zip(outs, eqn.outvars, strict=True)
    )
    return outs if is_wide else rounded(eqn, ins)


def rounded(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation in the dtypes that it was traced in, held in float32."""
    traced = [dtype if dtype in HALVES else None for dtype in dtypes_in(eqn.invars)]
    return [in_dtype(held_dtype(dtype_in(x)), x) for x in bind(eqn, in_dtypes(traced, ins))]


def held_dtype(dtype: Any) -> Any:
    """The dtype in which numbers of a dtype are held."""
    return FLOAT32 if dtype in HALVES else dtype


def _computed_widely(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in _SCATTERS:
        del params["update_jaxpr"], params["update_consts"]
        operand, indices, updates = ins
        return [_SCATTERS[name](operand, indices, updates, **params)]
    if name == "reduce":
        computation = lambda x, y: evaluate(params["jaxpr"], [*x, *y])[0]
        half = len(ins) // 2
        return lax.reduce(ins[:half], ins[half:], computation, params["dimensions"])
    if any(is_program(x) or isinstance(x, _SHAPES) for x in _params(eqn)):
        return rounded(eqn, ins)  # as a kernel is, whatever it is given
    if name == "convert_element_type":
        return [in_dtype(held_dtype(params["new_dtype"]), ins[0])]
    if name == "reduce_precision" and _rounds_to(params, dtype_in(eqn.outvars[0])):
        return list(ins)  # as JAX writes where a policy of `jax.checkpoint` saves a value
    if "precision" in params and not isinstance(params["precision"], (tuple, lax.Precision)):
        params["precision"] = None  # an algorithm's, of operands in 16 bits
    is_half = lambda x: isinstance(x, (np.dtype, type)) and x in HALVES
    params = {k: FLOAT32 if is_half(x) else x for k, x in params.items()}
    return bind(eqn.replace(params=params), ins)


def _rounds_to(params: dict[str, Any], dtype: Any) -> bool:
    """Whether a precision is no less than a dtype's."""
    info = jnp.finfo(dtype)
    return params["exponent_bits"] >= info.nexp and params["mantissa_bits"] >= info.nmant


def _has_halves(eqn: Any) -> bool:
    """Whether an equation computes with 16-bit floats, itself or in what it holds."""
    if HALVES.intersection(dtypes_in([*eqn.invars, *eqn.outvars])):
        return True
    inside = (e for x in _params(eqn) if is_program(x) for e in open_jaxpr(x).eqns)
    return any(map(_has_halves, inside))


def _params(eqn: Any) -> list[Any]:
    is_leaf = lambda x: is_program(x) or isinstance(x, _SHAPES)
    return jax.tree.leaves(list(params_of(eqn).values()), is_leaf=is_leaf)
