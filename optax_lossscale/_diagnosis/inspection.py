"""The rule with a switch at each equation: float32, or rounded as it was written."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays.precision import is_inexact
from optax_lossscale._diagnosis.widened import Compute, rounded, widely
from optax_lossscale._programs.operations import Is, is_exact, traits_of
from optax_lossscale._programs.values import HALVES, dtype_in, in_dtype

WIDE, DIGITS, ROUNDED = range(3)
"""How a result is rounded: not at all, to as many digits but with any exponent, or as written."""

NAN_OF_INFINITY, INFINITY, NAN = range(1, 4)
"""What an equation makes, of finite numbers but for the first; in a loop the largest is noted."""


def inspecting(modes: Any, is_healed: Any) -> Compute:
    """The rule that rounds each result as told, notes what is made, and has 0 for it in some."""

    def compute(n, eqn, ins):
        outs, name = _rounded(eqn, ins, modes[n]), eqn.primitive.name
        # Of an index out of bounds, a gather makes NaN.
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


# Each is traced once for all equations of a shape, and reads it once.
@jax.jit
def _kind(x: jax.Array) -> jax.Array:
    """Whether there are NaNs, 2, or else infinities, 1."""
    return jnp.where(jnp.isnan(x), 2, jnp.isinf(x)).astype(jnp.uint8).max(initial=0)


@jax.jit
def _healed(x: jax.Array, is_healed: jax.Array) -> jax.Array:
    return jnp.where(is_healed & ~jnp.isfinite(x), 0, x)


@jax.jit
def _made(given: jax.Array, made: jax.Array) -> jax.Array:
    """What is made, of two kinds."""
    of_finite = jnp.where(given == 0, made + (INFINITY - 1), NAN_OF_INFINITY)
    return jnp.where(made > given, of_finite, 0).astype(jnp.uint8)


def _is_half(v: Any) -> bool:
    return dtype_in(v) in HALVES
