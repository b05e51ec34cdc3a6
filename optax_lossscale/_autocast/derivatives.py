"""Functions with custom derivatives, entered: their derivatives are rewritten, too.

The original equation is differentiated as JAX does it, by the user's rule. What this
computes is traced in the original's dtypes, and run by a plan of its own.
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
"""Makes a function in the dtypes of the original run in 16 bits inside."""


def custom_jvp(
    eqn: Any, operands: Sequence[Any], callee: Callee, rewrite: Rewrite
) -> list[Any]:
    """The results of a `custom_jvp`, whose derivative is the original one, rewritten."""
    dtypes = dtypes_in(eqn.invars)

    @jax.custom_jvp
    def function(*operands):
        return callee.call(operands)

    @rewrite
    def derivative(primals, tangents):
        """The results of the original, and the tangents of those that are floats."""
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
    """The results of a `custom_vjp`, whose passes are the original ones, rewritten."""
    takes = dtypes_in(operands)

    @jax.custom_vjp
    def function(*operands):
        return callee.call(operands)

    def forward(*args):
        # By these alone: the original may close over others, and refuses them.
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
    """The results that are floats, and all of them, as a function of some operands, by number."""

    def results(inputs):
        operands = [inputs.get(n, x) for n, x in enumerate(primals)]
        results = bind(eqn, operands)
        return _floats(eqn.outvars, results), results

    return results


def _floats(variables: Sequence[Any], items: Sequence[Any]) -> dict[int, Any]:
    """From one item for each variable, those for floats, by number: others have no derivative."""
    return {n: x for n, x in enumerate(items) if is_float(variables[n])}
