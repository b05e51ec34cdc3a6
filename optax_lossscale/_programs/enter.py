"""Runs an equation that holds programs, such as a `scan`, with other programs in it.

Binding such an equation again would run the programs that it holds, so
`enter(eqn, operands, functions)` calls `lax.scan`, `lax.switch` or the like instead,
with a function in place of each program that computes results of the equation (see
`result_programs` in `walk.py`). For a `scan`, `autocast` passes one function, which
runs the body with its products in 16 bits.

A function may return other dtypes than its program, with two restrictions. The
functions of a `cond` must all return the same dtypes. And a loop's carry keeps the
dtypes of the operands that it starts from, so what a function returns for the carry is
cast to these dtypes.

To run another operation in this way, give it a trait and add a function to `_ENTER`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from optax_lossscale._arrays.replicas import varying_axes
from optax_lossscale._programs.operations import CALLS
from optax_lossscale._programs.values import astypes, dtypes_in
from optax_lossscale._programs.versions import mapped_axes, name_of
from optax_lossscale._programs.walk import (
    carry_positions,
    first_inner_operand,
    programs_in,
)

Arrays = Sequence[Any]
"""Arrays, traced or not, in the order of a program's arguments or results."""

Function = Callable[[Arrays], list[Any]]
"""A program as a function from all of its arguments to its results."""


def is_entered(eqn: JaxprEqn) -> bool:
    """Whether `enter` can run an equation with its programs replaced."""
    return name_of(eqn) in _ENTER


def enter(eqn: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> list[Any]:
    """Runs an equation with `functions` in place of its `result_programs`."""
    return _ENTER[name_of(eqn)](eqn, operands, *functions)


def traced_once(eqn: JaxprEqn, function: Function) -> Function:
    """Makes JAX trace a function once for all equations that hold its program.

    A call, such as a `jit`, stays a call, and a function with a custom derivative gets
    one: JAX reads it anew wherever it is bound. The body of a loop or a branch is
    inlined, because a compiler fuses less across a call.
    """

    def program(args):
        return function(args)

    program.__name__ = eqn.params.get("name", name_of(eqn))  # for profiles
    call = jax.jit(program)
    if name_of(eqn) in CALLS | {"custom_jvp_call", "custom_vjp_call"}:
        return call

    def inlined(args):
        # With `inline=True`, its equations would have the line of the loop.
        return jaxpr_as_fun(call.trace(args).jaxpr)(*args)

    return inlined


# --- One function for each operation; each returns the equation's results ---


def _call(eqn: JaxprEqn, operands: Arrays, function: Function) -> list[Any]:
    return function(operands)


def _checkpoint(eqn: JaxprEqn, operands: Arrays, function: Function) -> list[Any]:
    prevent_cse = eqn.params["prevent_cse"]
    # JAX lowers a differentiated `checkpoint` with a barrier, which keeps the compiler
    # from merging the recomputation with the forward pass. The `checkpoint` made here
    # is not marked as differentiated, so JAX would leave the barrier out.
    if eqn.params["differentiated"] and prevent_cse:
        operands = _behind_barriers(operands)
    policy = eqn.params["policy"]
    checkpointed = jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)
    return checkpointed(operands)


def _behind_barriers(arrays: Arrays) -> list[Any]:
    """Puts arrays behind a barrier, one for those that vary over the same devices.

    JAX takes all that a barrier returns to vary as much as any of them.
    """
    axes = [varying_axes(x) for x in arrays]
    behind = dict(enumerate(arrays))
    for shared in dict.fromkeys(axes):
        places = [n for n, own in enumerate(axes) if own == shared]
        barrier = lax.optimization_barrier([arrays[n] for n in places])
        behind.update(zip(places, barrier, strict=True))
    return list(behind.values())


def _scan(eqn: JaxprEqn, operands: Arrays, function: Function) -> list[Any]:
    carried = carry_positions(eqn)
    consts = operands[: carried.start]
    init = list(operands[carried.start : carried.stop])
    xs = list(operands[carried.stop :])

    def body(carry, x):
        results = function([*consts, *carry, *x])
        n_carry = len(carry)
        new_carry = astypes(results[:n_carry], dtypes_in(carry))
        return new_carry, results[n_carry:]

    # With `jax.export` the length may be symbolic. `lax.scan` then reads it from `xs`.
    length = None if xs else eqn.params["length"]
    reverse = eqn.params["reverse"]
    unroll = eqn.params["unroll"]
    carry, ys = lax.scan(body, init, xs, length, reverse, unroll)
    return [*carry, *ys]


def _while(eqn: JaxprEqn, operands: Arrays, function: Function) -> list[Any]:
    condition, _ = programs_in(eqn)
    n_cond_consts = first_inner_operand(eqn)
    n_consts = carry_positions(eqn).start
    cond_consts = operands[:n_cond_consts]
    body_consts = operands[n_cond_consts:n_consts]
    init = list(operands[n_consts:])

    def cond_fun(carry):
        (keep_going,) = jaxpr_as_fun(condition)(*cond_consts, *carry)
        return keep_going

    def body_fun(carry):
        results = function([*body_consts, *carry])
        return astypes(results, dtypes_in(carry))

    return lax.while_loop(cond_fun, body_fun, init)


def _cond(eqn: JaxprEqn, operands: Arrays, *functions: Function) -> list[Any]:
    index, *operands = operands
    shapes = [jax.eval_shape(function, operands) for function in functions]
    dtypes = []
    for v, *branches in zip(eqn.outvars, *shapes, strict=True):
        first, *others = dtypes_in(branches)
        dtypes.append(first if others.count(first) == len(others) else v.aval.dtype)
    functions = tuple(_returning(dtypes, function) for function in functions)
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, functions, operands)
    # `lax.switch` would compile every branch, even one with another platform's kernel.
    function_of_platform: dict[str, Function] = {}
    for names, function in zip(platforms, functions, strict=True):
        for name in names or ["default"]:
            function_of_platform[name] = function
    return lax.platform_dependent(operands, **function_of_platform)


def _returning(dtypes: Sequence[Any], function: Function) -> Function:
    return lambda args: astypes(function(args), dtypes)


def _shard_map(eqn: JaxprEqn, operands: Arrays, function: Function) -> list[Any]:
    params = eqn.params
    in_specs = list(params["in_specs"])
    mapped = jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=(in_specs,),
        out_specs=list(params["out_specs"]),
        axis_names=set(mapped_axes(eqn)),
        check_vma=params["check_vma"],
    )
    return mapped(list(operands))


_ENTER = {
    **dict.fromkeys(CALLS, _call),
    "cond": _cond,
    "remat2": _checkpoint,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
