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

from optax_lossscale._programs.enter import Callees
from optax_lossscale._programs.values import (
    dtypes_in,
    in_dtype,
    in_dtypes,
    is_float,
)
from optax_lossscale._programs.versions import bind, function_name

Rewritten = Callable[..., tuple[Any, Any]]
"""What a function gives for arguments in the original's dtypes, rewritten, and its own types."""


def custom_jvp(
    eqn: Any, operands: list[Any], callees: Callees, rewritten: Rewritten
) -> list[Any]:
    """The results of a `custom_jvp`, whose derivative is the original one, rewritten."""
    (callee,) = callees
    dtypes = dtypes_in(eqn.invars)

    def derivative(primals, tangents):
        """The results of the original, and the tangents of those that are floats."""
        inputs = {n: primals[n] for n in tangents}
        function = _of_inputs(eqn, primals)
        _, tangents, results = jax.jvp(function, (inputs,), (tangents,), has_aux=True)
        return results, tangents

    def rule(primals, tangents):
        primals = in_dtypes(dtypes, primals)
        floats = [n for n, v in enumerate(eqn.invars) if is_float(v)]
        tangents = {n: in_dtype(dtypes[n], tangents[n]) for n in floats}
        (results, tangents), _ = rewritten(derivative, primals, tangents)
        results = in_dtypes(callee.gives, results)
        following = iter(tangents)
        of_results = []
        for x in results:
            zero = np.zeros(x.shape, jax.dtypes.float0)
            tangent = in_dtype(x.dtype, next(following)) if is_float(x) else zero
            of_results.append(tangent)
        return results, of_results

    function = jax.custom_jvp(_primal(eqn, callees))
    function.defjvp(rule)
    return function(*map(jnp.asarray, operands))


def custom_vjp(
    eqn: Any, operands: list[Any], callees: Callees, rewritten: Rewritten
) -> list[Any]:
    """The results of a `custom_vjp`, whose passes are the original ones, rewritten."""
    takes = dtypes_in(operands)
    gives = callees[0].gives if callees else dtypes_in(eqn.outvars)
    dtypes = dtypes_in(_floats(eqn, eqn.outvars))

    def forward(*args):
        primals = in_dtypes(dtypes_in(eqn.invars), [x.value for x in args])
        # By these alone: the original may close over others, and refuses them.
        perturbed = [n for n, x in enumerate(args) if x.perturbed]

        def with_pullback(primals):
            inputs = {n: primals[n] for n in perturbed}
            function = _of_inputs(eqn, primals)
            _, pullback, results = jax.vjp(function, inputs, has_aux=True)
            return results, pullback

        (results, pullback), (_, types) = rewritten(with_pullback, primals)

        def widened(pullback):
            """The pullback with what it keeps in its own dtypes."""
            return jax.tree.map(
                lambda like, x: in_dtype(like.dtype, x), types, pullback
            )

        return in_dtypes(gives, results), jax.tree_util.Partial(widened, pullback)

    def backward(widened, cotangents):
        floats = [_instantiated(x) for x in _floats(eqn, cotangents)]
        inputs = widened(), in_dtypes(dtypes, floats)
        ((gradients,), _) = rewritten(lambda pull, cts: pull(cts), *inputs)
        return tuple(in_dtype(takes[n], gradients.get(n)) for n in range(len(takes)))

    function = jax.custom_vjp(_primal(eqn, callees))
    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(*map(jnp.asarray, operands))


def _primal(eqn: Any, callees: Callees) -> Callable[..., list[Any]]:
    """The function itself, under its own name; as it was traced, if it has no `callees`."""

    def primal(*operands):
        return callees[0].call(operands) if callees else bind(eqn, operands)

    primal.__name__ = function_name(eqn.params["call_jaxpr"])
    return primal


def _of_inputs(eqn: Any, primals: Sequence[Any]) -> Callable[..., Any]:
    """The results that are floats, and all of them, as a function of some operands, by number."""

    def results(inputs):
        operands = [inputs.get(n, x) for n, x in enumerate(primals)]
        results = bind(eqn, operands)
        return _floats(eqn, results), results

    return results


def _floats(eqn: Any, items: Sequence[Any]) -> list[Any]:
    """From one item for each result of an equation, those for floats."""
    return [item for v, item in zip(eqn.outvars, items, strict=True) if is_float(v)]


def _instantiated(cotangent: Any) -> Any:
    """A cotangent as an array, if it is a zero without one."""
    is_zero = isinstance(cotangent, SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero else cotangent
