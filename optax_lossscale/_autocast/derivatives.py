"""Functions with custom derivatives, entered: their derivatives are narrowed, too."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from optax_lossscale._autocast.flat import Instruction
from optax_lossscale._autocast.classify import Kind, widest
from optax_lossscale._autocast.uses import KEPT, Use
from optax_lossscale._programs.run import Run
from optax_lossscale._programs.values import dtype_in, dtypes_in, in_dtype, in_dtypes, is_float
from optax_lossscale._programs.versions import bind, function_name

Kinds = Sequence[Kind]
UsesOf = Callable[[Any], Sequence[Use]]
"""Says what is done with a function's results, from their types."""

Narrowed = Callable[[Callable[..., Any], Any, Kinds, UsesOf], tuple[Any, list[Any]]]
"""What a function gives for a tuple of arguments of some kinds, narrowed; its own dtypes."""


def custom_jvp(
    eqn: Any, ins: list, runs: Sequence[Run], step: Instruction, narrowed: Narrowed
) -> list:
    """The results of a `custom_jvp`, whose derivative is the original one, rewritten in turn."""
    (run,) = runs
    given = step.kinds

    def of(*xs):
        return run.call(xs)

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
        kinds = [*given, *(widest((given[i], Kind.SUM)) for i in moved)]
        uses = lambda shapes: [*step.uses, *(step.uses[i] for i in shapes[1])]
        (outs, moves), _ = narrowed(derivative, args, kinds, uses)
        outs = in_dtypes(run.gives, outs)
        no_move = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        of_result = lambda i, x: in_dtype(x.dtype, moves[i]) if i in moves else no_move(x)
        return outs, [of_result(i, x) for i, x in enumerate(outs)]

    return of(*map(jnp.asarray, ins))


def custom_vjp(
    eqn: Any, ins: list, runs: Sequence[Run], step: Instruction, narrowed: Narrowed
) -> list:
    """The results of a `custom_vjp`, whose passes are the original ones, rewritten in turn."""
    first, taken = eqn.params["num_consts"], dtypes_in(ins)
    gives = runs[0].gives if runs else dtypes_in(eqn.outvars)
    # If the forward pass has no products, neither is known.
    kinds = step.kinds or [Kind.FLOAT32] * len(ins)
    of_results = step.uses or [Use.WIDELY] * len(eqn.outvars)

    def of(*xs):
        return runs[0].call(xs) if runs else bind(eqn, xs)

    def forward(*args):
        xs = in_dtypes(dtypes_in(eqn.invars), [x.value for x in args])
        # Only with respect to what is differentiated: the original refuses what it closes over.
        moved = [i for i, x in enumerate(args) if x.perturbed and i >= first]
        uses = lambda shapes: [*of_results, *([KEPT] * len(jax.tree.leaves(shapes[1])))]
        (ys, pull), dtypes = narrowed(lambda *xs: _vjp(eqn, xs, moved), xs, kinds, uses)
        leaves, tree = jax.tree.flatten(pull)
        widen = lambda leaves: jax.tree.unflatten(tree, in_dtypes(dtypes[len(ys) :], leaves))
        return in_dtypes(gives, ys), jax.tree_util.Partial(widen, leaves)

    def backward(saved, cotangents):
        is_zero = lambda ct: isinstance(ct, SymbolicZero)
        zeros = lambda ct: jnp.zeros(ct.shape, dtype_in(ct)) if is_zero(ct) else ct
        floats = dtypes_in(_of_floats(eqn, eqn.outvars))  # masks, indices and keys have none
        cotangents = in_dtypes(floats, list(map(zeros, _of_floats(eqn, cotangents))))
        pull = saved()
        pairs = zip(jax.tree.leaves(saved), jax.tree.leaves(pull), strict=True)
        of_saved = [Kind.FLOAT32 if x.dtype == y.dtype else Kind.SUM for x, y in pairs]
        pulled = lambda pull, cotangents: pull(cotangents)[0]
        kinds = of_saved + [Kind.SUM] * len(cotangents)
        is_wide = lambda i: taken[i] == dtype_in(eqn.invars[i])
        uses = lambda shapes: [Use.WIDELY if is_wide(i) else KEPT for i in shapes]
        grads, _ = narrowed(pulled, (pull, cotangents), kinds, uses)
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
