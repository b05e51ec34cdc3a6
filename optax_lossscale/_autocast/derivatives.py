"""Functions with custom derivatives, entered: their derivatives are narrowed, too."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from optax_lossscale._autocast.cast_inputs import DTYPE
from optax_lossscale._autocast.kinds import Kind
from optax_lossscale._programs.run import Run
from optax_lossscale._programs.values import dtype_in, dtypes_in, in_dtype, in_dtypes, is_float
from optax_lossscale._programs.versions import bind, function_name

Narrowed = Callable[[Callable[..., Any], Any, Sequence[Kind]], Any]
"""What a function gives for a tuple of arguments whose arrays are of some kinds, narrowed."""


def custom_jvp(
    eqn: Any, ins: list, runs: Sequence[Run], given: Sequence[Kind], narrowed: Narrowed
) -> list[Any]:
    """The results of a `custom_jvp`, whose derivative is the original one, rewritten in turn."""
    (run,) = runs

    def of(*xs):
        return run.call(xs)[0]

    of.__name__ = function_name(eqn.params["call_jaxpr"])
    of = jax.custom_jvp(of)

    @of.defjvp
    def rule(primals, tangents):
        moved = [i for i, t in enumerate(tangents) if dtype_in(t) != jax.dtypes.float0]

        def derivative(primals, tangents):
            of = _of_some(eqn, primals)
            outs, moves = jax.jvp(of, ({i: primals[i] for i in tangents},), (tangents,))
            return outs, {i: t for i, t in enumerate(moves) if dtype_in(t) != jax.dtypes.float0}

        traced = dtypes_in(eqn.invars)
        args = in_dtypes(traced, primals), {i: in_dtype(traced[i], tangents[i]) for i in moved}
        kinds = [*given, *(max(given[i], Kind.SUM) for i in moved)]
        outs, moves = narrowed(derivative, args, kinds)
        outs = in_dtypes(run.gives, outs)
        no_move = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        of_result = lambda i, x: in_dtype(x.dtype, moves[i]) if i in moves else no_move(x)
        return outs, [of_result(i, x) for i, x in enumerate(outs)]

    return of(*map(jnp.asarray, ins))


def custom_vjp(
    eqn: Any, ins: list, runs: Sequence[Run], given: Sequence[Kind], narrowed: Narrowed, low: Any
) -> list[Any]:
    """The results of a `custom_vjp`, whose passes are the original ones, rewritten in turn."""
    # The backward pass begins with the forward one: a compiler that sees both computes it once.
    # If that has no products, there is no run, and it goes on from what the original saves.
    (run,) = runs or (None,)
    first, taken = eqn.params["num_consts"], dtypes_in(ins)

    def of(*xs):
        return bind(eqn, xs) if run is None else run.call(xs)[0]

    def forward(*args):
        xs = [x.value for x in args]
        # Only with respect to what is differentiated: the original refuses what it closes over.
        moved = {i: () for i, x in enumerate(args) if x.perturbed and i >= first}
        if run is not None:
            return of(*xs), (xs, moved)
        with DTYPE(low):
            return _vjp(eqn, xs, moved)

    def backward(saved, cotangents):
        is_zero = lambda ct: isinstance(ct, SymbolicZero)
        zeros = lambda ct: jnp.zeros(ct.shape, dtype_in(ct)) if is_zero(ct) else ct
        floats = dtypes_in(_of_floats(eqn, eqn.outvars))  # masks, indices and keys have none
        cotangents = in_dtypes(floats, list(map(zeros, _of_floats(eqn, cotangents))))
        if run is None:
            pull = lambda saved, cotangents: saved(cotangents)[0]
            of_saved = [Kind.FLOAT32] * len(jax.tree.leaves(saved))
        else:
            xs, moved = saved
            pull = lambda xs, cotangents: _vjp(eqn, xs, moved)[1](cotangents)[0]
            saved, of_saved = in_dtypes(dtypes_in(eqn.invars), xs), given
        kinds = [*of_saved, *[Kind.SUM] * len(cotangents)]
        grads = narrowed(pull, (saved, cotangents), kinds)
        return tuple(in_dtype(dtype, grads.get(i)) for i, dtype in enumerate(taken))

    of.__name__ = function_name(eqn.params["call_jaxpr"])
    of = jax.custom_vjp(of)
    of.defvjp(forward, backward, symbolic_zeros=True)
    return of(*map(jnp.asarray, ins))


def _vjp(eqn: Any, xs: Sequence[Any], moved: Iterable[int]) -> tuple[list[Any], Any]:
    """The results of a `custom_vjp`, and the function that pulls cotangents of floats back."""

    def of(those):
        ys = _of_some(eqn, xs)(those)
        return _of_floats(eqn, ys), ys

    _, pull, ys = jax.vjp(of, {i: xs[i] for i in moved}, has_aux=True)
    return ys, pull


def _of_some(eqn: Any, xs: Sequence[Any]) -> Callable[[Mapping[int, Any]], list[Any]]:
    """The results of an equation as a function of some of its operands, by number."""
    return lambda those: bind(eqn, [those.get(i, x) for i, x in enumerate(xs)])


def _of_floats(eqn: Any, xs: Sequence[Any]) -> list[Any]:
    """From one item for each result of an equation, those for floats."""
    return [x for v, x in zip(eqn.outvars, xs, strict=True) if is_float(v)]
