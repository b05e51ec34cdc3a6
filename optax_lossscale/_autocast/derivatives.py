"""Runs a function with a custom derivative and rewrites its rule as well.

A new `custom_jvp` or `custom_vjp` replaces the equation. It is built from two functions
with the same results, up to rounding:

- `narrowed` runs the program in the equation with its products in 16 bits. The new
  `custom_jvp` or `custom_vjp` calls it where no derivative is taken.
- `original` casts the operands to the dtypes in which the equation was traced, runs the
  equation, and casts the results to the dtypes that `narrowed` returns. The new rule
  differentiates `original`, so JAX calls the user's rule in the traced dtypes and casts
  tangents and cotangents.

The products in the user's rule are narrowed as well, by `rewrite`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from optax_lossscale._programs.enter import Arrays, Function
from optax_lossscale._programs.values import dtype_in, is_inexact

Rewrite = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a function narrow its products, with the dtypes of its results unchanged."""


def custom_jvp(
    narrowed: Function,
    original: Callable[..., list[Any]],
    operands: Arrays,
    rewrite: Rewrite,
) -> list[Any]:
    """Runs a `custom_jvp` with its rule rewritten."""

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
    """Runs a `custom_vjp` with its forward and backward passes rewritten."""

    @jax.custom_vjp
    def function(*operands):
        return narrowed(operands)

    # Because of `symbolic_zeros=True`, JAX passes two things for each operand: its
    # `value`, and whether it is `perturbed`, that is, part of the differentiation.
    def forward(*args):
        primals = [arg.value for arg in args]
        perturbed = [n for n, arg in enumerate(args) if arg.perturbed]
        call = rewrite(functools.partial(_with_pullback, original, perturbed))
        return call(primals)

    def backward(pullback, cotangents):
        float_cotangents = filter(is_inexact, cotangents)
        arrays = list(map(_instantiate, float_cotangents))
        # `pullback` is a pytree of arrays, so a traced function can take it.
        call = rewrite(lambda pullback, arrays: pullback(arrays))
        (gradients,) = call(pullback, arrays)
        # An operand that is not perturbed has None for its gradient.
        positions = range(len(operands))
        return tuple(map(gradients.get, positions))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(*map(jnp.asarray, operands))


def _with_pullback(
    original: Callable[..., list[Any]], perturbed: Sequence[int], primals: Arrays
) -> tuple[list[Any], Any]:
    """Runs `original`; returns its results and the pullback of those that are floats.

    Some operands are values that the user's function closes over. `jax.vjp` refuses to
    differentiate these, so it is applied to the `perturbed` operands alone.
    """

    def float_results(inputs):
        merged = [inputs.get(n, x) for n, x in enumerate(primals)]
        results = original(*merged)
        return list(filter(is_inexact, results)), results

    inputs = {n: primals[n] for n in perturbed}
    _, pullback, results = jax.vjp(float_results, inputs, has_aux=True)
    return results, pullback


def _instantiate(cotangent: Any) -> Any:
    """Converts a cotangent to an array of zeros if it is a symbolic zero."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, dtype_in(cotangent))
    return cotangent
