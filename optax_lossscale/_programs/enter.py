"""Run an equation that holds programs, such as a `scan`, with others in their place.

`enter(eqn, operands, callees)` does not bind the equation, but calls `lax.scan`,
`lax.switch` and so on anew, with one `Callee` for each program that the equation holds.
A callee may take and give other dtypes than the original program, as when products in
it are narrowed. The results of a `cond` then have the widest dtype that a branch gives,
the carry of a `scan` the wider of those that its body takes and gives, and that of a
`while` the one that its body takes.
"""

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
from jax import lax

from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import in_dtypes
from optax_lossscale._programs.versions import mapped_axes
from optax_lossscale._programs.walk import arguments_of, carried_by

Arrays = Sequence[Any]


class Callee(NamedTuple):
    """A function to run in the place of a program."""

    takes: Sequence[Any]  # the dtypes of its arguments
    gives: Sequence[Any]  # the dtypes of its results
    call: Callable[[Arrays], list[Any]]


Callees = Sequence[Callee]
"""What runs in the place of the programs that an equation holds, in their order."""


def is_entered(eqn: Any) -> bool:
    """Whether `enter` can run this equation."""
    return bool(traits(eqn) & ENTERED)


def enter(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    """The results of an equation that holds programs, with `callees` in their place."""
    return _ENTER[traits(eqn) & ENTERED](eqn, operands, callees)


def is_placed(eqn: Any) -> bool:
    """Whether an equation is a `jit` with shardings for its arguments or results."""
    places = eqn.params.get("in_shardings"), eqn.params.get("out_shardings")
    return any(isinstance(x, jax.sharding.Sharding) for x in jax.tree.leaves(places))


# --- one function for each kind of equation, which returns its results ---


def _inlined(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    (callee,) = callees
    return callee.call(operands)


def _checkpoint(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    (callee,) = callees
    prevent_cse = eqn.params["prevent_cse"]
    # Such an equation recomputes the forward pass in a backward pass that was traced
    # before. JAX puts a barrier there when it lowers the equation, so that the compiler
    # does not merge both passes; for a new `checkpoint` it would not.
    if eqn.params["differentiated"] and prevent_cse:
        operands = lax.optimization_barrier(operands)
    policy = eqn.params["policy"]
    call = jax.checkpoint(callee.call, prevent_cse=prevent_cse, policy=policy)
    return call(operands)


def _scan(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    (callee,) = callees
    carried = carried_by(eqn)
    operands = in_dtypes(callee.takes, operands)
    consts = operands[: carried.start]
    carry = operands[carried.start : carried.stop]
    xs = operands[carried.stop :]
    # Between two rounds, the carry is in the wider of the dtypes that the body takes
    # and gives; each round casts it to the one that the body takes.
    taken = callee.takes[carried.start : carried.stop]
    wide = _widest(taken, callee.gives[: len(taken)])

    def body(carry, xs):
        results = callee.call([*consts, *in_dtypes(taken, carry), *xs])
        return in_dtypes(wide, results[: len(wide)]), results[len(wide) :]

    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, in_dtypes(wide, carry), xs, **params)
    return [*carry, *ys]


def _while(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    condition, body = callees
    (_, of_condition), (_, of_body) = arguments_of(eqn)
    carried = carried_by(eqn)
    takes = body.takes[len(of_body) - len(carried) :]

    def inputs(positions, carry):
        """What a program takes in a round, by the positions of operands."""
        now = [*operands[: carried.start], *carry]
        return [now[n] for n in positions]

    def goes_on(carry):
        (flag,) = condition.call(inputs(of_condition, carry))
        return flag

    def step(carry):
        return in_dtypes(takes, body.call(inputs(of_body, carry)))

    return lax.while_loop(goes_on, step, in_dtypes(takes, operands[carried.start :]))


def _cond(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    index, *operands = operands
    gives = _widest(*(callee.gives for callee in callees))

    def branch(callee):
        """A branch as a function that gives the widest dtypes of all branches."""
        return lambda *operands: in_dtypes(gives, callee.call(operands))

    return lax.switch(index, list(map(branch, callees)), *operands)


def _shard_map(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    (callee,) = callees
    mapped = jax.shard_map(
        callee.call,
        mesh=eqn.params["mesh"],
        in_specs=(list(eqn.params["in_specs"]),),
        out_specs=list(eqn.params["out_specs"]),
        axis_names=set(mapped_axes(eqn)),
        check_vma=eqn.params["check_vma"],
    )
    return mapped(list(operands))


def _widest(*programs: Sequence[Any]) -> list[Any]:
    """For each value, the widest of the dtypes that programs have for it."""
    return [
        max(each, key=attrgetter("itemsize")) for each in zip(*programs, strict=True)
    ]


_ENTER = {
    Is.INLINED: _inlined,
    Is.KEEPS: _checkpoint,
    Is.SCANS: _scan,
    Is.WAITS: _while,
    Is.BRANCHES: _cond,
    Is.MAPS: _shard_map,
    # These lose the user's rule, which `autocast` keeps: see `_autocast/derivatives.py`.
    Is.JVP: _inlined,
    Is.VJP: _inlined,
}
ENTERED = functools.reduce(Is.__or__, _ENTER)
"""The traits of the operations that `enter` can run; each of these has one of them."""
