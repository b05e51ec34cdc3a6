"""Run a function with a custom derivative, whose rule is rewritten as well.

A new `custom_jvp` or `custom_vjp` takes the place of the equation. Its function is
`narrowed`, which runs the program in the equation by its plan. Its rule differentiates
the `original`: the equation as it was traced, with results in the dtypes of the plan.
So JAX calls the user's rule, and casts tangents and cotangents. What the rule computes
is traced and run by a plan as well, which is what `rewrite` does with a function.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from optax_lossscale._programs.enter import Arrays, Function
from optax_lossscale._programs.values import dtype_in, is_inexact

Rewrite = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives a function whose products are narrowed, and whose dtypes are the original's."""


def custom_jvp(
    narrowed: Function,
    original: Callable[..., list[Any]],
    operands: Arrays,
    rewrite: Rewrite,
) -> list[Any]:
    """The results of a `custom_jvp`, whose derivative is the original's, rewritten."""

    @jax.custom_jvp
    def function(*operands):
        return narrowed(operands)

    @function.defjvp
    @rewrite
    def rule(primals, tangents):
        return jax.jvp(original, primals, tangents)

    return function(*map(jnp.asarray, operands))


def custom_vjp(
    narrowed: Function,
    original: Callable[..., list[Any]],
    operands: Arrays,
    rewrite: Rewrite,
) -> list[Any]:
    """The results of a `custom_vjp`, whose two passes are the original's, rewritten."""

    @jax.custom_vjp
    def function(*operands):
        return narrowed(operands)

    def forward(*args):
        primals = [x.value for x in args]
        # `jax.vjp` differentiates these operands alone: it refuses to differentiate
        # values that the user's function closes over, which are operands as well.
        perturbed = [n for n, x in enumerate(args) if x.perturbed]

        @rewrite
        def with_pullback(primals):
            def floats(inputs):
                results = original(*[inputs.get(n, x) for n, x in enumerate(primals)])
                return list(filter(is_inexact, results)), results

            inputs = {n: primals[n] for n in perturbed}
            _, pullback, results = jax.vjp(floats, inputs, has_aux=True)
            return results, pullback

        return with_pullback(primals)

    def backward(pullback, cotangents):
        of_floats = list(map(_as_array, filter(is_inexact, cotangents)))
        (gradients,) = rewrite(operator.call)(pullback, of_floats)
        # None for an operand that is not differentiated
        return tuple(map(gradients.get, range(len(operands))))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(*map(jnp.asarray, operands))


def _as_array(cotangent: Any) -> Any:
    """A cotangent, as an array of zeros if JAX knows it to be zero."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, dtype_in(cotangent))
    return cotangent
