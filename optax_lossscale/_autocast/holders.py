"""Equations that hold programs with products: each is called anew, with its programs rewritten."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from optax_lossscale._arrays.programs import (
    as_traced,
    bind,
    dtype_of,
    function_name,
    in_dtype,
    mapped_axes,
    placed,
    scan_sizes,
)
from optax_lossscale._autocast.kinds import Kind, kept_dtype, kinds_carried, kinds_of_equation

if TYPE_CHECKING:
    from optax_lossscale._autocast.run import Casting


def _placed_jit(eqn: Any, ins: list, given: list[Kind], run: "Casting") -> list[Any]:
    """A `jit` that was told where to have its arrays."""
    outs = run(eqn.params["jaxpr"], placed(eqn.params["in_shardings"], ins), given)
    return placed(eqn.params["out_shardings"], outs)


def _remat(eqn: Any, ins: list, given: list[Kind], run: "Casting") -> list[Any]:
    params, run = eqn.params, run._replace(recomputes=False)
    if params["differentiated"] and params["prevent_cse"]:
        ins = lax.optimization_barrier(ins)
    of = lambda *xs: run(params["jaxpr"], xs, given)
    return jax.checkpoint(of, prevent_cse=params["prevent_cse"], policy=params["policy"])(*ins)


def _shard_map(eqn: Any, ins: list, given: list[Kind], run: "Casting") -> list[Any]:
    params = eqn.params
    mapped = jax.shard_map(
        lambda *xs: run(params["jaxpr"], xs, given),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(mapped_axes(eqn)),
        check_vma=params["check_vma"],
    )
    return mapped(*ins)


def _scan(eqn: Any, ins: list, given: list[Kind], run: "Casting") -> list[Any]:
    params, (n_consts, n_carry) = eqn.params, scan_sizes(eqn)
    carried = kinds_carried(eqn, given, run.dtype)
    # What each round reads gets a gradient from each, and their sum is one of many numbers.
    consts = as_traced(eqn.invars[:n_consts], ins[:n_consts])
    traced = [dtype_of(v.aval) for v in eqn.invars[n_consts:][:n_carry]]
    dtypes = [kept_dtype(dtype, k, run.dtype) for dtype, k in zip(traced, carried, strict=True)]
    carry = list(map(in_dtype, dtypes, ins[n_consts:][:n_carry]))
    given = [*given[:n_consts], *carried, *given[n_consts + n_carry :]]
    run = run._replace(prevent_cse=False)

    def body(carry, xs):
        outs = run(params["jaxpr"], [*consts, *carry, *xs], given)
        return list(map(in_dtype, dtypes, outs[:n_carry])), outs[n_carry:]

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, carry, ins[n_consts + n_carry :], **how)
    return [*carry, *ys]


def _while(eqn: Any, ins: list, given: list[Kind], run: "Casting") -> list[Any]:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    carried = eqn.invars[n_cond + n_body :]
    carry = as_traced(carried, ins[n_cond + n_body :])
    of_cond, of_body = [*given[:n_cond]], [*given[n_cond:][:n_body]]
    wide = [Kind.WIDE] * len(carry)

    def goes_on(carry):
        return run(params["cond_jaxpr"], [*ins[:n_cond], *carry], [*of_cond, *wide])[0]

    def body(carry):
        outs = run(params["body_jaxpr"], [*ins[n_cond:][:n_body], *carry], [*of_body, *wide])
        return as_traced(carried, outs)

    return lax.while_loop(goes_on, body, carry)


def _cond(eqn: Any, ins: list, given: list[Kind], run: "Casting") -> list[Any]:
    index, *ins = ins
    dtypes = _dtypes_of_results(eqn, given, run)

    def of(branch):
        return lambda *xs: list(map(in_dtype, dtypes, run(branch, xs, given[1:])))

    return lax.switch(index, list(map(of, eqn.params["branches"])), *ins)


def _custom_jvp(eqn: Any, ins: list, given: list[Kind], run: "Casting") -> list[Any]:
    """Its derivative is that of the original, rewritten in turn."""
    dtypes = _dtypes_of_results(eqn, given, run)

    def of(*xs):
        return run(eqn.params["call_jaxpr"], xs, given)

    of.__name__ = function_name(eqn.params["call_jaxpr"])
    of = jax.custom_jvp(of)

    @of.defjvp
    def rule(primals, tangents):
        moved = [i for i, t in enumerate(tangents) if dtype_of(t) != jax.dtypes.float0]

        def derivative(primals, tangents_moved):
            full = list(tangents)
            for i, t in zip(moved, tangents_moved, strict=True):
                full[i] = t
            outs, out_tangents = jax.jvp(lambda *xs: bind(eqn, xs), tuple(primals), tuple(full))
            return outs, [t for t in out_tangents if dtype_of(t) != jax.dtypes.float0]

        traced = [eqn.invars[i] for i in moved]
        args = as_traced(eqn.invars, primals), as_traced(traced, [tangents[i] for i in moved])
        of_tangents = [max(given[i], Kind.SUM) for i in moved]
        outs, out_tangents = _rewritten(derivative, args, [*given, *of_tangents], run)
        left = iter(out_tangents)
        zeros = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        is_moved = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        outs = list(map(in_dtype, dtypes, outs))
        return outs, [in_dtype(x.dtype, next(left)) if is_moved(x) else zeros(x) for x in outs]

    return of(*map(jnp.asarray, ins))


def _custom_vjp(eqn: Any, ins: list, given: list[Kind], run: "Casting") -> list[Any]:
    """Both of its passes are those of the original, rewritten in turn.

    The backward pass begins with the forward one: a compiler that sees both computes it once.
    """
    first = eqn.params["num_consts"]

    def of(*xs):
        return run(eqn.params["call_jaxpr"], xs, given)

    of.__name__ = function_name(eqn.params["call_jaxpr"])
    of = jax.custom_vjp(of)

    def forward(*args):
        xs = [x.value for x in args]
        # By what is differentiated alone: the original refuses to be by what it closes over.
        moved = {i: () for i, x in enumerate(args) if x.perturbed and i >= first}
        return of(*xs), (xs, moved)

    def backward(saved, cotangents):
        xs, moved = saved
        zeros = lambda ct: jnp.zeros(ct.shape, ct.dtype)
        cotangents = [zeros(ct) if isinstance(ct, SymbolicZero) else ct for ct in cotangents]

        def pulled_back(xs, cotangents):
            of_moved = lambda moved: bind(eqn, [moved.get(i, x) for i, x in enumerate(xs)])
            return jax.vjp(of_moved, {i: xs[i] for i in moved})[1](cotangents)[0]

        args = as_traced(eqn.invars, xs), as_traced(eqn.outvars, cotangents)
        kinds = [*given, *[Kind.SUM] * len(cotangents)]
        grads = _rewritten(pulled_back, args, kinds, run)
        return tuple(in_dtype(x.dtype, grads.get(i)) for i, x in enumerate(xs))

    of.defvjp(forward, backward, symbolic_zeros=True)
    return of(*map(jnp.asarray, ins))


def _dtypes_of_results(eqn: Any, given: list[Kind], run: "Casting") -> list[Any]:
    kinds = kinds_of_equation(eqn, given, run.dtype)
    pairs = zip(eqn.outvars, kinds, strict=True)
    return [kept_dtype(dtype_of(v.aval), kind, run.dtype) for v, kind in pairs]


def _rewritten(function: Callable[..., Any], args: Any, given: list[Kind], run: "Casting") -> Any:
    """What a function of arguments in the dtypes of the original gives, run in turn."""
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    outs = run(jaxpr, jax.tree.leaves(args), given)
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


HOLDERS = {
    "checkpoint": _remat,
    "cond": _cond,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "jit": _placed_jit,
    "pjit": _placed_jit,
    "remat": _remat,
    "remat2": _remat,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
