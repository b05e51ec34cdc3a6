"""Running an equation that holds programs, as `scan` does, with each of these run in another way.

Each of the programs comes as a `Callee`: which dtypes it takes, which it gives, and how it
is called. Where two meet, as at the end of a loop's body and its beginning, the wider
dtype is carried.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import in_dtypes
from optax_lossscale._programs.versions import mapped_axes
from optax_lossscale._programs.walk import carried_by

Arrays = Sequence[Any]


class Callee(NamedTuple):
    """How a program is run."""

    takes: Sequence[Any]  # the dtypes in which it is to be given its arguments
    gives: Sequence[Any]  # the dtypes of its results
    call: Callable[[Arrays], list[Any]]


Callees = Sequence[Callee]
"""The programs that an equation holds, in the order of running."""


def is_entered(eqn: Any) -> bool:
    """Whether the programs that an equation holds can be run in another way."""
    return bool(traits(eqn) & ENTERED)


def enter(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    """The results of an equation that holds programs, each of which is run as `callees` says."""
    return _ENTER[traits(eqn) & ENTERED](eqn, operands, callees)


def is_placed(eqn: Any) -> bool:
    """Whether a `jit` was told where to place its arguments or results."""
    places = eqn.params.get("in_shardings"), eqn.params.get("out_shardings")
    return any(isinstance(x, jax.sharding.Sharding) for x in jax.tree.leaves(places))


# --- one function for each kind of equation ---


def _inlined(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    (callee,) = callees
    return callee.call(operands)


def _checkpoint(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    (callee,) = callees
    prevent_cse = eqn.params["prevent_cse"]
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
    # From round to round in the wider of two dtypes, and from there in the one that is
    # taken.
    taken = callee.takes[carried.start : carried.stop]
    wide = [_widest(dtypes) for dtypes in zip(taken, callee.gives, strict=False)]

    def body(carry, xs):
        results = callee.call([*consts, *in_dtypes(taken, carry), *xs])
        return in_dtypes(wide, results[: len(wide)]), results[len(wide) :]

    carry, ys = lax.scan(
        body,
        in_dtypes(wide, carry),
        xs,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


def _while(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    condition, body = callees
    n_condition = eqn.params["cond_nconsts"]
    n_consts = carried_by(eqn).start
    of_condition = operands[:n_condition]
    of_body = operands[n_condition:n_consts]
    carried = body.takes[len(of_body) :]

    def goes_on(carry):
        (flag,) = condition.call([*of_condition, *carry])
        return flag

    def step(carry):
        return in_dtypes(carried, body.call([*of_body, *carry]))

    return lax.while_loop(goes_on, step, in_dtypes(carried, operands[n_consts:]))


def _cond(eqn: Any, operands: Arrays, callees: Callees) -> list[Any]:
    index, *operands = operands
    of_branches = [callee.gives for callee in callees]
    gives = [_widest(dtypes) for dtypes in zip(*of_branches, strict=True)]

    def branch(callee):
        """One of the branches, as a function whose results have the dtypes of all."""
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


def _widest(dtypes: Sequence[Any]) -> Any:
    return max(dtypes, key=lambda dtype: dtype.itemsize)


_ENTER = {
    Is.INLINED: _inlined,
    Is.KEEPS: _checkpoint,
    Is.SCANS: _scan,
    Is.WAITS: _while,
    Is.BRANCHES: _cond,
    Is.MAPS: _shard_map,
    Is.JVP: _inlined,  # for who does not differentiate
    Is.VJP: _inlined,
}
ENTERED = functools.reduce(Is.__or__, _ENTER)
"""What holds programs that can be run in another way; others run them as they are."""
