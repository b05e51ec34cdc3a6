"""Functions with custom derivatives, entered: their derivatives are narrowed, too."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from optax_lossscale._autocast.classify import Kind, widest
from optax_lossscale._autocast.flat import Instruction
from optax_lossscale._autocast.uses import KEPT, Use
from optax_lossscale._programs.run import Run
from optax_lossscale._programs.values import dtype_in, dtypes_in, in_dtype, in_dtypes, is_float
from optax_lossscale._programs.versions import bind, function_name

UsesOf = Callable[[Any], Sequence[Use]]
"""Says what is done with a function's results, from their types."""

Narrowed = Callable[[Callable[..., Any], Any, Sequence[Kind], UsesOf], tuple[Any, list[Any]]]
"""What a function gives for a tuple of arguments of some kinds, narrowed; its own dtypes."""


def custom_jvp(
    step: Instruction, ins: list[Any], runs: Sequence[Run], narrowed: Narrowed
) -> list[Any]:
    """The results of a `custom_jvp`, whose derivative is the original one, rewritten in turn."""
    eqn = step.eqn
    (run,) = runs

    def primal(*xs):
        return run.call(xs)

    def derivative(primals, tangents):
        """The original's results and their tangents, by number."""
        perturbed = {i: primals[i] for i in tangents}
        results, moves = jax.jvp(_of_some(eqn, primals), (perturbed,), (tangents,))
        return results, {i: t for i, t in enumerate(moves) if not _is_float0(t)}

    def rule(primals, tangents):
        perturbed = [i for i, tangent in enumerate(tangents) if not _is_float0(tangent)]
        dtypes = dtypes_in(eqn.invars)
        args = in_dtypes(dtypes, primals), {i: in_dtype(dtypes[i], tangents[i]) for i in perturbed}
        kinds = [*step.kinds, *(widest((step.kinds[i], Kind.SUM)) for i in perturbed)]

        def uses(shapes):
            return [*step.uses, *(step.uses[i] for i in shapes[1])]

        (results, moves), _ = narrowed(derivative, args, kinds, uses)
        results = in_dtypes(run.gives, results)
        return results, [_tangent(x, moves.get(i)) for i, x in enumerate(results)]

    primal.__name__ = function_name(eqn.params["call_jaxpr"])
    function = jax.custom_jvp(primal)
    function.defjvp(rule)
    return function(*map(jnp.asarray, ins))


def custom_vjp(
    step: Instruction, ins: list[Any], runs: Sequence[Run], narrowed: Narrowed
) -> list[Any]:
    """The results of a `custom_vjp`, whose passes are the original ones, rewritten in turn."""
    eqn = step.eqn
    takes = dtypes_in(ins)
    gives = runs[0].gives if runs else dtypes_in(eqn.outvars)

    def primal(*xs):
        return runs[0].call(xs) if runs else bind(eqn, xs)

    def forward(*args):
        primals = in_dtypes(dtypes_in(eqn.invars), [x.value for x in args])
        # Only with respect to what is differentiated: the original refuses what it closes over.
        first = eqn.params["num_consts"]
        perturbed = [i for i, x in enumerate(args) if x.perturbed and i >= first]
        # If the forward pass has no products, neither is known.
        kinds = step.kinds or [Kind.FLOAT32] * len(primals)
        of_results = step.uses or [Use.WIDELY] * len(eqn.outvars)

        def uses(shapes):
            return [*of_results, *([KEPT] * len(jax.tree.leaves(shapes[1])))]

        def with_pullback(*primals):
            return _vjp(eqn, primals, perturbed)

        (results, pullback), dtypes = narrowed(with_pullback, primals, kinds, uses)
        residuals, structure = jax.tree.flatten(pullback)

        def widened(residuals):
            """The pullback in its own dtypes."""
            wide = in_dtypes(dtypes[len(results) :], residuals)
            return jax.tree.unflatten(structure, wide)

        return in_dtypes(gives, results), jax.tree_util.Partial(widened, residuals)

    def backward(widened, cotangents):
        pullback = widened()
        pairs = zip(jax.tree.leaves(widened), jax.tree.leaves(pullback), strict=True)
        of_residuals = [Kind.FLOAT32 if x.dtype == y.dtype else Kind.SUM for x, y in pairs]
        of_floats = _cotangents(eqn, cotangents)
        kinds = of_residuals + [Kind.SUM] * len(of_floats)

        def uses(shapes):
            dtypes = dtypes_in(eqn.invars)
            return [Use.WIDELY if takes[i] == dtypes[i] else KEPT for i in shapes]

        def pulled_back(pullback, cotangents):
            return pullback(cotangents)[0]

        gradients, _ = narrowed(pulled_back, (pullback, of_floats), kinds, uses)
        return tuple(in_dtype(dtype, gradients.get(i)) for i, dtype in enumerate(takes))

    primal.__name__ = function_name(eqn.params["call_jaxpr"])
    function = jax.custom_vjp(primal)
    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(*map(jnp.asarray, ins))


def _vjp(eqn: Any, xs: Sequence[Any], perturbed: Iterable[int]) -> tuple[list[Any], Any]:
    """The results of a `custom_vjp`, and the function that pulls cotangents of floats back."""

    def function(primals):
        results = _of_some(eqn, xs)(primals)
        return _of_floats(eqn, results), results

    _, pullback, results = jax.vjp(function, {i: xs[i] for i in perturbed}, has_aux=True)
    return results, pullback


def _of_some(eqn: Any, xs: Sequence[Any]) -> Callable[[Mapping[int, Any]], list[Any]]:
    """The results of an equation as a function of some of its operands, by number."""
    return lambda some: bind(eqn, [some.get(i, x) for i, x in enumerate(xs)])


def _cotangents(eqn: Any, cotangents: Sequence[Any]) -> list[Any]:
    """The cotangents of floats, in their dtypes: masks, indices and keys have none."""
    return [
        jnp.zeros(ct.shape, dtype_in(v))
        if isinstance(ct, SymbolicZero)
        else in_dtype(dtype_in(v), ct)
        for v, ct in zip(_of_floats(eqn, eqn.outvars), _of_floats(eqn, cotangents), strict=True)
    ]


def _of_floats(eqn: Any, xs: Sequence[Any]) -> list[Any]:
    """From one item for each result of an equation, those for floats."""
    return [x for v, x in zip(eqn.outvars, xs, strict=True) if is_float(v)]


def _tangent(result: Any, move: Any) -> Any:
    """The tangent of a result in its dtype; of an integer, there is none."""
    if move is None:
        return np.zeros(result.shape, jax.dtypes.float0)
    return in_dtype(result.dtype, move)


def _is_float0(tangent: Any) -> bool:
    return dtype_in(tangent) == jax.dtypes.float0
