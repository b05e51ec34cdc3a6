"""Rules that hold every 16-bit float of a program in float32, and round it as they are told."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays.precision import is_inexact
from optax_lossscale._programs.operations import Is, is_exact, traits_of
from optax_lossscale._programs.run import Compute, Records, by_equation
from optax_lossscale._programs.values import FLOAT32, HALVES, dtype_in, in_dtype, in_dtypes
from optax_lossscale._programs.versions import bind, is_program, open_jaxpr, params_of

_SHAPES = (jax.core.ShapedArray, jax.ShapeDtypeStruct)  # what a foreign function returns
_COMBINE = ("add", "sub", "mul", "min", "max")
_SCATTERS = {f"scatter-{how}": getattr(lax, f"scatter_{how}") for how in _COMBINE}
_SCATTERS["scatter"] = lax.scatter

WIDE, DIGITS, ROUNDED = range(3)
"""How a result is rounded: not at all, to as many digits but with any exponent, or as written."""

NAN_OF_INFINITY, INFINITY, NAN = range(1, 4)
"""What an equation makes; the last two, out of finite numbers. For a loop, the largest counts."""


def evaluate(
    jaxpr: Any, args: Sequence[Any], compute: Compute | None = None
) -> tuple[list, Records]:
    """The results of a program with a float32 for every 16-bit float, and its records.

    A jaxpr of gradients holds the backward pass too, so this is what the same function would
    compute if it had been written in float32. Random numbers stay the same, as their bits do.
    Without a rule to compute equations, those that stay in 16 bits are recorded.
    """
    widening = lambda number, eqn, ins: _widened(eqn, ins)
    return by_equation(jaxpr, compute or widening, held_dtype).call(args)


def widely(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation that holds no others, in float32 wherever possible."""
    return _widened(eqn, ins)[0]


def rounded(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation in the dtypes that it was traced in, held in float32."""
    traced = [dtype if dtype in HALVES else None for dtype in map(dtype_in, eqn.invars)]
    return [in_dtype(held_dtype(dtype_in(x)), x) for x in bind(eqn, in_dtypes(traced, ins))]


def held_dtype(dtype: Any) -> Any:
    """The dtype in which numbers of a dtype are held."""
    return FLOAT32 if dtype in HALVES else dtype


def switching(modes: Any) -> Compute:
    """The rule that rounds each result as told."""
    return lambda n, eqn, ins: (_rounded(eqn, ins, modes[n]), None)


def watching(mode: int, is_healed: Any) -> Compute:
    """The rule that notes where non-finite numbers are made, and puts 0 for them where told."""

    def compute(n, eqn, ins):
        outs, name = (widely if mode == WIDE else rounded)(eqn, ins), eqn.primitive.name
        # For an index out of bounds, a gather makes NaN.
        if (is_exact(name) and name != "gather") or not any(map(is_inexact, outs)):
            return outs, None
        healed = [_healed(x, is_healed[n]) if is_inexact(x) else x for x in outs]
        return healed, _made(_kinds(ins), _kinds(outs))

    return compute


def rounds(eqn: Any) -> bool:
    """Whether an equation rounds to 16 bits."""
    return not is_exact(eqn.primitive.name) and any(map(_is_half, eqn.outvars))


def adds_many(eqn: Any) -> bool:
    """Whether it adds up many terms, and rounds inside."""
    return Is.ADDS_MANY in traits_of(eqn.primitive.name)


def _widened(eqn: Any, ins: Sequence[Any]) -> tuple[list[Any], Any]:
    """The results in float32, and None; or in 16 bits, and 1, if there is no rule for float32."""
    if not _has_halves(eqn) or Is.OF_BITS in traits_of(eqn.primitive.name):
        return rounded(eqn, ins), None
    wanted = [(held_dtype(v.aval.dtype), v.aval.shape) for v in eqn.outvars]
    try:
        outs = _in_float32(eqn, ins)
    except (TypeError, ValueError, NotImplementedError):
        return rounded(eqn, ins), jnp.uint8(1)
    is_wide = [(x.dtype, x.shape) for x in outs] == wanted
    return (outs, None) if is_wide else (rounded(eqn, ins), jnp.uint8(1))


def _in_float32(eqn: Any, ins: Sequence[Any]) -> list[Any]:
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
        raise NotImplementedError("a kernel computes in its own dtypes, whatever it is given")
    if name == "convert_element_type":
        return [in_dtype(held_dtype(params["new_dtype"]), ins[0])]
    if name == "reduce_precision":
        info = jnp.finfo(dtype_in(eqn.outvars[0]))
        if params["exponent_bits"] >= info.nexp and params["mantissa_bits"] >= info.nmant:
            return list(ins)  # JAX inserts it where a `jax.checkpoint` policy saves a value
    if "precision" in params and not isinstance(params["precision"], (tuple, lax.Precision)):
        params["precision"] = None  # it is an algorithm for 16-bit operands
    is_half = lambda x: isinstance(x, (np.dtype, type)) and x in HALVES
    params = {k: FLOAT32 if is_half(x) else x for k, x in params.items()}
    return bind(eqn.replace(params=params), ins)


def _has_halves(eqn: Any) -> bool:
    """Whether an equation computes with 16-bit floats, itself or in what it holds."""
    inside = (e for x in _params(eqn) if is_program(x) for e in open_jaxpr(x).eqns)
    own = map(dtype_in, (*eqn.invars, *eqn.outvars))
    return bool(HALVES.intersection(own)) or any(map(_has_halves, inside))


def _params(eqn: Any) -> list[Any]:
    is_leaf = lambda x: is_program(x) or isinstance(x, _SHAPES)
    return jax.tree.leaves(list(params_of(eqn).values()), is_leaf=is_leaf)


def _rounded(eqn: Any, ins: Sequence[Any], mode: Any) -> list[Any]:
    """The results of an equation, rounded as one of the modes says."""
    outs = widely(eqn, ins)
    if not rounds(eqn):
        return outs

    def chosen(v, wide, exact):
        if not _is_half(v):
            return wide
        digits = lax.reduce_precision(wide, 8, jnp.finfo(v.aval.dtype).nmant)
        exact = in_dtype(wide.dtype, in_dtype(v.aval.dtype, exact))
        return lax.select_n(mode, wide, digits, exact)

    return list(map(chosen, eqn.outvars, outs, rounded(eqn, ins) if adds_many(eqn) else outs))


def _kinds(xs: Sequence[Any]) -> Any:
    return functools.reduce(jnp.maximum, map(_kind, filter(is_inexact, xs)), np.uint8(0))


# Each of these is traced once for all equations of a shape, and reads the array once.
@jax.jit
def _kind(x: jax.Array) -> jax.Array:
    """2 if there are NaNs, else 1 if there are infinities, else 0."""
    return jnp.where(jnp.isnan(x), 2, jnp.isinf(x)).astype(jnp.uint8).max(initial=0)


@jax.jit
def _healed(x: jax.Array, is_healed: jax.Array) -> jax.Array:
    return jnp.where(is_healed & ~jnp.isfinite(x), 0, x)


@jax.jit
def _made(given: jax.Array, made: jax.Array) -> jax.Array:
    """What an equation made, from the kinds of its operands and of its results."""
    of_any = jnp.where(given == 1, NAN_OF_INFINITY, made + 1)
    return jnp.where(made > given, of_any, 0).astype(jnp.uint8)


def _is_half(v: Any) -> bool:
    return dtype_in(v) in HALVES
