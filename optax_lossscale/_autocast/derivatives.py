"""Run a function with a custom derivative, whose rule is rewritten as well.

A new `custom_jvp` or `custom_vjp` takes the place of the equation. Its function is the
original's program, run by its plan. Its rule casts what it gets to the dtypes of the
original equation, and differentiates that equation, for which JAX calls the user's
rule; then it casts the results. What the user's rule computes is traced and run by a
plan as well, which is what `rewrite` does with a function.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from optax_lossscale._programs.enter import Callee
from optax_lossscale._programs.values import (
    dtype_in,
    dtypes_in,
    in_dtype,
    in_dtypes,
    is_float,
)
from optax_lossscale._programs.versions import bind

Rewrite = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives a function whose products are narrowed, and whose dtypes are the original's."""


def custom_jvp(
    eqn: Any, operands: Sequence[Any], callee: Callee, rewrite: Rewrite
) -> list[Any]:
    """The results of a `custom_jvp`, whose derivative is the original's, rewritten."""
    dtypes = dtypes_in(eqn.invars)

    @jax.custom_jvp
    def function(*operands):
        return callee.call(operands)

    @rewrite
    def derivative(primals, tangents):
        """The results of the original equation, and the tangents of its floats."""
        inputs = {n: primals[n] for n in tangents}
        function = _of_inputs(eqn, primals)
        _, tangents, results = jax.jvp(function, (inputs,), (tangents,), has_aux=True)
        return results, tangents

    @function.defjvp
    def rule(primals, tangents):
        of_floats = _floats(eqn.invars, tangents)
        tangents = {n: in_dtype(dtypes[n], t) for n, t in of_floats.items()}
        results, tangents = derivative(in_dtypes(dtypes, primals), tangents)
        results = in_dtypes(callee.gives, results)
        of_results = [np.zeros(x.shape, jax.dtypes.float0) for x in results]
        for n, t in tangents.items():
            of_results[n] = in_dtype(results[n].dtype, t)
        return results, of_results

    return function(*map(jnp.asarray, operands))


def custom_vjp(
    eqn: Any, operands: Sequence[Any], callee: Callee, rewrite: Rewrite
) -> list[Any]:
    """The results of a `custom_vjp`, whose two passes are the original's, rewritten."""
    takes = dtypes_in(operands)

    @jax.custom_vjp
    def function(*operands):
        return callee.call(operands)

    def forward(*args):
        # Only these operands are differentiated: JAX refuses others, which the user's
        # function may close over.
        perturbed = [n for n, x in enumerate(args) if x.perturbed]

        @rewrite
        def with_pullback(primals):
            inputs = {n: primals[n] for n in perturbed}
            function = _of_inputs(eqn, primals)
            _, pullback, results = jax.vjp(function, inputs, has_aux=True)
            return results, pullback

        primals = in_dtypes(dtypes_in(eqn.invars), [x.value for x in args])
        results, pullback = with_pullback(primals)
        return in_dtypes(callee.gives, results), pullback

    @rewrite
    def gradients_of(pullback, cotangents):
        (gradients,) = pullback(cotangents)
        return gradients

    def backward(pullback, cotangents):
        of_floats = {}
        for n, ct in _floats(eqn.outvars, cotangents).items():
            array = jnp.zeros(ct.shape) if isinstance(ct, SymbolicZero) else ct
            of_floats[n] = in_dtype(dtype_in(eqn.outvars[n]), array)
        gradients = gradients_of(pullback, of_floats)
        return tuple(in_dtype(dtype, gradients.get(n)) for n, dtype in enumerate(takes))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(*map(jnp.asarray, operands))


def _of_inputs(eqn: Any, primals: Sequence[Any]) -> Callable[..., Any]:
    """An equation as a function to differentiate, with the other operands fixed.

    It takes operands by position, and returns the results that are floats, by position,
    and all results as the auxiliary output of `jax.jvp` or `jax.vjp`.
    """

    def results(inputs):
        operands = [inputs.get(n, x) for n, x in enumerate(primals)]
        results = bind(eqn, operands)
        return _floats(eqn.outvars, results), results

    return results


def _floats(variables: Sequence[Any], items: Sequence[Any]) -> dict[int, Any]:
    """The items that belong to variables of floats, by position.

    Only floats have derivatives; there is one item for each variable.
    """
    return {n: x for n, x in enumerate(items) if is_float(variables[n])}
