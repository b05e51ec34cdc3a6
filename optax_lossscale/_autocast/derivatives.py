"""Functions with custom derivatives, entered: their derivatives are rewritten, too."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from optax_lossscale._autocast.classify import Kind, join
from optax_lossscale._autocast.flat import Step
from optax_lossscale._autocast.uses import KEPT, NOTHING, Use
from optax_lossscale._programs.enter import Callee, Callees
from optax_lossscale._programs.values import (
    dtype_in,
    dtypes_in,
    in_dtype,
    in_dtypes,
    is_float,
)
from optax_lossscale._programs.versions import bind, function_name

Function = Callable[..., Any]

Rewritten = Callable[
    [Function, Any, Sequence[Kind], Sequence[Use], Use], tuple[Any, list[Any]]
]
"""What a function gives for a tuple of arguments of some kinds, rewritten, and its own dtypes.

Of its results it is told what is done with the first ones, and with all others.
"""


def custom_jvp(
    step: Step, operands: list[Any], callees: Callees, rewritten: Rewritten
) -> list[Any]:
    """The results of a `custom_jvp`, whose derivative is the original one, rewritten in turn."""
    eqn = step.eqn
    (callee,) = callees

    def derivative(primals, tangents):
        """The original's results and their tangents, by number."""
        function = _of_some(eqn, primals)
        perturbed = {i: primals[i] for i in tangents}
        results, tangents = jax.jvp(function, (perturbed,), (tangents,))
        return results, _but_float0(tangents)

    def rule(primals, tangents):
        dtypes = dtypes_in(eqn.invars)
        primals = in_dtypes(dtypes, primals)
        perturbed = _but_float0(tangents)
        tangents = {i: in_dtype(dtypes[i], t) for i, t in perturbed.items()}
        kinds = list(step.kinds)
        for i in perturbed:
            kinds.append(join((step.kinds[i], Kind.SUM)))
        (results, tangents), _ = rewritten(
            derivative, (primals, tangents), kinds, step.uses, NOTHING
        )
        results = in_dtypes(callee.gives, results)
        pairs = enumerate(results)
        return results, [_tangent(result, tangents.get(i)) for i, result in pairs]

    function = jax.custom_jvp(_primal(eqn, callee))
    function.defjvp(rule)
    return function(*map(jnp.asarray, operands))


def custom_vjp(
    step: Step, operands: list[Any], callees: Callees, rewritten: Rewritten
) -> list[Any]:
    """The results of a `custom_vjp`, whose passes are the original ones, rewritten in turn."""
    (callee,) = callees
    function = jax.custom_vjp(_primal(step.eqn, callee))
    function.defvjp(
        _forward(step, callee.gives, rewritten),
        _backward(step.eqn, dtypes_in(operands), rewritten),
        symbolic_zeros=True,
    )
    return function(*map(jnp.asarray, operands))


def _primal(eqn: Any, callee: Callee) -> Function:
    """The function itself, under its own name."""

    def primal(*operands):
        return callee.call(operands)

    primal.__name__ = function_name(eqn.params["call_jaxpr"])
    return primal


def _forward(step: Step, gives: Sequence[Any], rewritten: Rewritten) -> Function:
    """The forward pass of a `custom_vjp`, with results in dtypes `gives`."""
    eqn = step.eqn

    def forward(*args):
        primals = in_dtypes(dtypes_in(eqn.invars), [x.value for x in args])
        # Only with respect to what is differentiated: the original refuses what it
        # closes over.
        first = eqn.params["num_consts"]
        perturbed = [i for i, x in enumerate(args) if x.perturbed and i >= first]

        def with_pullback(*primals):
            return _vjp(eqn, primals, perturbed)

        (results, pullback), dtypes = rewritten(
            with_pullback, primals, step.kinds, step.uses, KEPT
        )
        residuals, structure = jax.tree.flatten(pullback)
        wide_dtypes = dtypes[len(results) :]

        def widened(residuals):
            """The pullback in its own dtypes."""
            return jax.tree.unflatten(structure, in_dtypes(wide_dtypes, residuals))

        return in_dtypes(gives, results), jax.tree_util.Partial(widened, residuals)

    return forward


def _backward(eqn: Any, takes: Sequence[Any], rewritten: Rewritten) -> Function:
    """The backward pass of a `custom_vjp`, whose operands come in dtypes `takes`."""

    def backward(widened, cotangents):
        pullback = widened()
        cotangents = _cotangents(eqn, cotangents)
        kinds = []
        residuals = jax.tree.leaves(widened)
        for x, wide in zip(residuals, jax.tree.leaves(pullback), strict=True):
            kinds.append(Kind.FLOAT32 if x.dtype == wide.dtype else Kind.SUM)
        kinds += [Kind.SUM] * len(cotangents)

        def pulled_back(pullback, cotangents):
            (gradients,) = pullback(cotangents)
            return gradients

        inputs = (pullback, cotangents)
        gradients, _ = rewritten(pulled_back, inputs, kinds, (), NOTHING)
        of_operands = [gradients.get(i) for i in range(len(takes))]
        return tuple(in_dtypes(takes, of_operands))

    return backward


def _vjp(
    eqn: Any, primals: Sequence[Any], perturbed: Iterable[int]
) -> tuple[list[Any], Any]:
    """The results of a `custom_vjp`, and the function that pulls cotangents of floats back."""
    function = _of_some(eqn, primals)

    def floats_and_all(some):
        results = function(some)
        return _of_floats(eqn, results), results

    some = {i: primals[i] for i in perturbed}
    _, pullback, results = jax.vjp(floats_and_all, some, has_aux=True)
    return results, pullback


def _of_some(
    eqn: Any, primals: Sequence[Any]
) -> Callable[[Mapping[int, Any]], list[Any]]:
    """The results of an equation as a function of some of its operands, by number."""

    def results(some):
        operands = [some.get(i, x) for i, x in enumerate(primals)]
        return bind(eqn, operands)

    return results


def _cotangents(eqn: Any, cotangents: Sequence[Any]) -> list[Any]:
    """The cotangents of floats, in their dtypes: masks, indices and keys have none."""
    dtypes = dtypes_in(_of_floats(eqn, eqn.outvars))
    instantiated = []
    for ct, dtype in zip(_of_floats(eqn, cotangents), dtypes, strict=True):
        is_zero = isinstance(ct, SymbolicZero)
        instantiated.append(jnp.zeros(ct.shape, dtype) if is_zero else ct)
    return in_dtypes(dtypes, instantiated)


def _of_floats(eqn: Any, items: Sequence[Any]) -> list[Any]:
    """From one item for each result of an equation, those for floats."""
    return [item for v, item in zip(eqn.outvars, items, strict=True) if is_float(v)]


def _tangent(result: Any, tangent: Any) -> Any:
    """The tangent of a result in its dtype; of an integer, there is none."""
    if tangent is None:
        return np.zeros(result.shape, jax.dtypes.float0)
    return in_dtype(result.dtype, tangent)


def _but_float0(tangents: Sequence[Any]) -> dict[int, Any]:
    """The tangents that there are, by number: an integer has none."""
    there = {}
    for i, tangent in enumerate(tangents):
        if dtype_in(tangent) != jax.dtypes.float0:
            there[i] = tangent
    return there
