"""Run an equation that holds programs, such as a `scan`, with others in their place.

`enter(eqn, operands, functions)` does not bind the equation, but calls `lax.scan`,
`lax.switch` and so on anew, with a function in the place of each of its
`result_programs`. A function may give other dtypes than its program, as it does with
narrowed products. The functions of a `cond` have to give the same dtypes. A loop
carries the dtypes of its operands, to which it casts what its function gives.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import astypes, dtypes_in
from optax_lossscale._programs.versions import mapped_axes
from optax_lossscale._programs.walk import carried_by, first_inside, programs_in

Arrays = Sequence[Any]
"""Arrays, traced or not, in the order of a program's arguments or results."""

Function = Callable[[Arrays], list[Any]]
"""A program as a function, from all of its arguments to its results."""


def is_entered(eqn: JaxprEqn) -> bool:
    """Whether `enter` runs an equation with its programs replaced."""
    return bool(traits(eqn) & ENTERED)


def enter(eqn: JaxprEqn, operands: Arrays, functions: Sequence[Function]) -> list[Any]:
    """The results of an equation, with `functions` run for its `result_programs`."""
    return _ENTER[traits(eqn) & ENTERED](eqn, operands, *functions)


# --- one function for each kind of equation, which returns its results ---


def _inlined(eqn: JaxprEqn, operands: Arrays, function: Function) -> list[Any]:
    return function(operands)


def _checkpoint(eqn: JaxprEqn, operands: Arrays, function: Function) -> list[Any]:
    prevent_cse = eqn.params["prevent_cse"]
    # JAX lowers a differentiated equation with a barrier, so that the compiler does not
    # merge the recomputation with the forward pass. The new `checkpoint` is not marked
    # as differentiated, so JAX would leave the barrier out.
    if eqn.params["differentiated"] and prevent_cse:
        operands = lax.optimization_barrier(operands)
    policy = eqn.params["policy"]
    return jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)(operands)


def _scan(eqn: JaxprEqn, operands: Arrays, function: Function) -> list[Any]:
    carried = carried_by(eqn)
    consts = operands[: carried.start]
    initial = list(operands[carried.start : carried.stop])
    xs = list(operands[carried.stop :])

    def body(carry, x):
        results = function([*consts, *carry, *x])
        n_carry = len(carry)
        return astypes(results[:n_carry], dtypes_in(carry)), results[n_carry:]

    # With `jax.export` the length may be symbolic, and `lax.scan` takes it from `xs`.
    length = None if xs else eqn.params["length"]
    reverse = eqn.params["reverse"]
    unroll = eqn.params["unroll"]
    carry, ys = lax.scan(body, initial, xs, length, reverse, unroll)
    return [*carry, *ys]


def _while(eqn: JaxprEqn, operands: Arrays, function: Function) -> list[Any]:
    condition, _ = programs_in(eqn)
    carried = carried_by(eqn)
    of_condition = operands[: first_inside(eqn)]
    of_body = operands[first_inside(eqn) : carried.start]

    def goes_on(carry):
        (flag,) = jaxpr_as_fun(condition)(*of_condition, *carry)
        return flag

    def step(carry):
        return astypes(function([*of_body, *carry]), dtypes_in(carry))

    return lax.while_loop(goes_on, step, list(operands[carried.start :]))


def _cond(eqn: JaxprEqn, operands: Arrays, *functions: Function) -> list[Any]:
    index, *operands = operands
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, functions, operands)
    # `lax.switch` would compile all branches, also one with another platform's kernel.
    of_platforms: dict[str, Function] = {}
    for names, function in zip(platforms, functions, strict=True):
        of_platforms |= dict.fromkeys(names or ["default"], function)
    return lax.platform_dependent(operands, **of_platforms)


def _shard_map(eqn: JaxprEqn, operands: Arrays, function: Function) -> list[Any]:
    mapped = jax.shard_map(
        function,
        mesh=eqn.params["mesh"],
        in_specs=(list(eqn.params["in_specs"]),),
        out_specs=list(eqn.params["out_specs"]),
        axis_names=set(mapped_axes(eqn)),
        check_vma=eqn.params["check_vma"],
    )
    return mapped(list(operands))


_ENTER = {
    Trait.INLINED: _inlined,
    Trait.CHECKPOINTS: _checkpoint,
    Trait.SCANS: _scan,
    Trait.WHILE: _while,
    Trait.BRANCHES: _cond,
    Trait.MAPS: _shard_map,
}
ENTERED = functools.reduce(operator.or_, _ENTER)
"""The traits of operations that `enter` runs; no operation has two of them.

The programs of custom derivatives, `JVP` and `VJP`, are not among theirs: `enter` would
lose the rules.
"""
