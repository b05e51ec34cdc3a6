"""Regions: the casts of their steps, and what they read, in which dtypes.

A region is made backward, from what it stores. Each of its steps casts its operands to
the dtypes in which they were traced, or rounds them where its results are rounded
anyway. A value that only products read, or steps that move it to products, is read in
16 bits.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import JaxprEqn, Var

from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.products import is_narrowed
from optax_lossscale._autocast.recomputed import is_worth_recomputing, kept
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import (
    FLOAT32,
    dtype_in,
    dtypes_in,
    shape_in,
    variables,
)

if TYPE_CHECKING:
    from optax_lossscale._autocast.plan import Plan

Dtypes = Mapping[Var, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation in a region."""

    eqn: JaxprEqn
    # The dtype to which each operand is cast; None where it is read as it is stored
    takes: Sequence[Any]
    plans: Sequence["Plan"] = ()  # for the programs that it holds


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """An island or a part of one, or a step that runs by itself, such as a product."""

    steps: Sequence[Step]
    reads: Dtypes  # the values from outside, with the dtypes in which it needs them
    stores: Dtypes  # the values for outside, with their dtypes
    is_recomputed: bool = False  # whether the backward pass recomputes its steps
    kept: frozenset[Var] = frozenset()  # the results that it keeps nevertheless


def of_island(facts: Facts, eqns: Sequence[JaxprEqn], stores: Dtypes) -> Region:
    """The region with these equations, which stores some of their results.

    A sum that is stored in 16 bits, or from which such a value is chosen, adds rounded
    numbers, so that the compiler need not store an operand in float32. Without this, a
    ResNet takes 1.08 of the memory and moves 1.03 of the bytes.
    """
    low = facts.low
    rounded = {v for v in stores if stores[v] == facts.dtypes[v] == low}
    from_last: list[Step] = []
    for eqn in reversed(eqns):
        adds_rounded = False
        if not rounded.isdisjoint(eqn.outvars):
            operands = variables(eqn.invars)
            rounded.update(v for v in operands if facts.kinds[v] == Kind.SUM)
            adds_rounded = Is.ADDS_TWO in traits(eqn) and _is_of_one_shape(eqn)
        from_last.append(Step(eqn, _takes(eqn, low, adds_rounded)))
    steps = tuple(reversed(from_last))
    reads = _reads(facts, steps, stores)
    if not facts.casting.recomputes or not is_worth_recomputing(eqns):
        return Region(steps, reads, stores)
    keeps = kept(eqns, stores) if facts.casting.keeps else frozenset()
    return Region(steps, reads, stores, True, keeps)


def of_one(facts: Facts, eqn: JaxprEqn, held: Step | None, wanted: Dtypes) -> Region:
    """The region of an equation that runs by itself.

    What is sent, gets a name or is held by a barrier is in 16 bits if only products
    read it. So devices send each other 16 bits, as in a model cast by hand, and not
    float32.

    Args:
      facts: the facts about the program.
      eqn: the equation.
      held: its step, if it holds products.
      wanted: the values that are read later, with the dtypes for storing them.
    """
    low = facts.low
    results = {v: wanted.get(v, low) for v in eqn.outvars}
    is_sent = _only_moves(eqn, results, low) and Is.CHEAP not in traits(eqn)
    step = held or Step(eqn, _takes(eqn, low, is_sent))
    stores = {v: _rounded(facts, v) if is_sent else facts.dtypes[v] for v in results}
    return Region((step,), _reads(facts, (step,), results), stores)


def need(facts: Facts, needed: dict[Var, Any], v: Var, dtype: Any) -> None:
    """Adds a value that is needed in a dtype; one needed in two is in its own dtype."""
    needed[v] = dtype if needed.get(v, dtype) == dtype else facts.dtypes[v]


def made_by(eqns: Sequence[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """The equation that makes each result of some equations, in order."""
    return {v: eqn for eqn in eqns for v in eqn.outvars}


def _is_of_one_shape(eqn: JaxprEqn) -> bool:
    """Whether no operand is broadcast; the gradient of one that is would be a sum."""
    return len(set(map(shape_in, (*eqn.invars, *eqn.outvars)))) == 1


def _takes(eqn: JaxprEqn, low: Any, is_rounded: bool) -> list[Any]:
    """The dtype to which an equation casts each operand; None for as it is stored.

    Args:
      eqn: the equation.
      low: the dtype of products.
      is_rounded: whether its result is in 16 bits, and it rounds its operands.
    """
    its_traits = traits(eqn)
    as_traced = dtypes_in(eqn.invars)
    if is_narrowed(eqn):
        return [low, low] + [None] * len(eqn.invars[2:])
    # A sum over devices is the derivative of what spreads to them: `run` rounds inside.
    if is_rounded and Is.SPREADS not in its_traits:
        return [low if dtype == FLOAT32 else dtype for dtype in as_traced]
    if not is_rounded and its_traits & (Is.MOVES | Is.SENDS):
        return [None] * len(eqn.invars)
    return as_traced


def _reads(facts: Facts, steps: Sequence[Step], results: Dtypes) -> Dtypes:
    """The values that steps read from outside, with the dtypes they need them in."""
    low = facts.low
    needed = dict(results)
    for step in reversed(steps):
        is_low = _only_moves(step.eqn, needed, low)
        for v, taken in zip(step.eqn.invars, step.takes, strict=True):
            if isinstance(v, Var):
                is_rounded = is_low or taken == low
                dtype = _rounded(facts, v) if is_rounded else facts.dtypes[v]
                need(facts, needed, v, dtype)
    made = made_by([step.eqn for step in steps])
    return {v: dtype for v, dtype in needed.items() if v not in made}


def _rounded(facts: Facts, v: Var) -> Any:
    """The dtype in which products need a value."""
    return facts.low if dtype_in(v) == FLOAT32 else facts.dtypes[v]


def _only_moves(eqn: JaxprEqn, needed: Dtypes, low: Any) -> bool:
    """Whether an equation only moves numbers, all of which are needed in 16 bits."""
    its_traits = traits(eqn)
    moves = its_traits & (Is.MOVES | Is.SENDS | Is.SPREADS)
    if not moves or Is.ADDS_MANY in its_traits:
        return False
    return all(needed.get(v, low) == low for v in eqn.outvars)
