"""Regions: the equations that run as one, what they cast, read and store.

`region_of_island` and `region_of_equation` make a region from its equations and from
what it stores. A step of an island casts its operands to the dtypes in which they were
traced, unless it only moves numbers: then it takes them as they are stored. Some sums
that are stored in 16 bits cast their operands to 16 bits instead. A region reads a
value from outside in 16 bits if each step that reads the value casts it to 16 bits, or
only moves it, to readers that need 16 bits. It reads any other value in the dtype that
`facts` has for the value.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.products import is_narrowed
from optax_lossscale._autocast.recomputed import is_worth_recomputing, kept_reductions
from optax_lossscale._programs.operations import RUNS_AS_STORED, Trait, traits
from optax_lossscale._programs.values import (
    FLOAT32,
    dtype_in,
    dtypes_in,
    shape_in,
    variables,
)
from optax_lossscale._programs.walk import producers_in

if TYPE_CHECKING:
    from optax_lossscale._autocast.plan import Plan

Dtypes = Mapping[Var, Any]
"""Values with the dtypes in which they are stored or read."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation in a region, with the dtypes in which it takes its operands."""

    eqn: JaxprEqn
    # The dtype to which each operand is cast; None where it is read as it is stored
    takes: Sequence[Any]
    plans: Sequence["Plan"] = ()  # for the programs that it holds


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """An island or a part of one, or a step that runs by itself, such as a product."""

    steps: Sequence[Step]
    # The values from outside, each with the dtype in which the region would have it
    # stored; if it is stored in another, the steps that need a cast make it
    reads: Dtypes
    stores: Dtypes  # the values for outside, with their dtypes
    is_recomputed: bool = False  # whether the backward pass recomputes its steps
    # The results of its steps that `jax.checkpoint` keeps as residuals
    kept_reductions: frozenset[Var] = frozenset()


def region_of_island(facts: Facts, eqns: Sequence[JaxprEqn], stores: Dtypes) -> Region:
    """The region with the given equations of an island.

    Args:
      facts: the facts about the program.
      eqns: the equations, in order.
      stores: those of their results that the region stores, with the dtypes for them.
    """
    rounding = _rounding_sums(facts, eqns, stores)
    steps: list[Step] = []
    for eqn in eqns:
        casts = _rounding_casts if eqn in rounding else _usual_casts
        steps.append(Step(eqn, casts(eqn, facts.low)))
    reads = _reads(facts, steps, stores)
    if not facts.casting.recomputes or not is_worth_recomputing(eqns):
        return Region(steps, reads, stores)
    kept: frozenset[Var] = frozenset()
    if facts.casting.keeps_reductions:
        kept = kept_reductions(eqns, stores)
    return Region(steps, reads, stores, is_recomputed=True, kept_reductions=kept)


def region_of_equation(
    facts: Facts, eqn: JaxprEqn, rewritten: Step | None, wanted: Dtypes
) -> Region:
    """The region of an equation that runs by itself, which stores all of its results.

    What is sent, gets a name or is held by a barrier is in 16 bits if only products
    read it. So devices send each other 16 bits, as in a model cast by hand, and not
    float32. A cheap move, such as a transpose, is not cast first: a compiler fuses it
    with the cast after it.

    Args:
      facts: the facts about the program.
      eqn: the equation.
      rewritten: its step with the plans for its programs, if it is rewritten.
      wanted: the values that are read later, with the dtypes for storing them.
    """
    low = facts.low
    results = {v: wanted.get(v, low) for v in eqn.outvars}
    rounds_first = _moves_rounded(eqn, results, low) and Trait.CHEAP not in traits(eqn)
    casts = _rounding_casts if rounds_first else _usual_casts
    steps = [rewritten or Step(eqn, casts(eqn, low))]
    stores = {
        v: _rounded(facts, v) if rounds_first else facts.dtypes[v] for v in results
    }
    return Region(steps, _reads(facts, steps, results), stores)


def joined_dtype(facts: Facts, v: Var, one: Any, other: Any) -> Any:
    """The dtype in which to store a value for two readers, each of which needs a dtype.

    If the two dtypes differ, it is the one that `facts` has for the value.
    """
    return one if one == other else facts.dtypes[v]


def _rounding_sums(
    facts: Facts, eqns: Sequence[JaxprEqn], stores: Dtypes
) -> set[JaxprEqn]:
    """The sums of an island that cast their operands to 16 bits.

    They are the sums that are stored in 16 bits, and the sums from which one of those
    is computed by way of SUMs alone, but for sums that broadcast an operand. So the
    compiler need not store their operands in float32. This saves bytes in a ResNet and
    in transformers, and in a ResNet memory as well.
    """
    low = facts.low
    rounded = {v for v, dtype in stores.items() if dtype == facts.dtypes[v] == low}
    found: set[JaxprEqn] = set()
    for eqn in reversed(eqns):
        if rounded.isdisjoint(eqn.outvars):
            continue
        operands = variables(eqn.invars)
        rounded.update(v for v in operands if facts.kinds[v] == Kind.SUM)
        if Trait.ADDS_TWO in traits(eqn) and _is_of_one_shape(eqn):
            found.add(eqn)
    return found


def _is_of_one_shape(eqn: JaxprEqn) -> bool:
    """Whether no operand is broadcast; the gradient of one that is would be a sum."""
    return len(set(map(shape_in, (*eqn.invars, *eqn.outvars)))) == 1


def _usual_casts(eqn: JaxprEqn, low: np.dtype) -> list[Any]:
    """The dtype to which an equation casts each operand; None for as it is stored."""
    if is_narrowed(eqn):
        others = eqn.invars[2:]
        return [low, low] + [None] * len(others)
    if traits(eqn) & RUNS_AS_STORED:
        return [None] * len(eqn.invars)
    return dtypes_in(eqn.invars)


def _rounding_casts(eqn: JaxprEqn, low: np.dtype) -> list[Any]:
    """The dtypes to which an equation casts its operands so that it gives 16 bits."""
    as_traced = dtypes_in(eqn.invars)
    # The derivative of an operation that spreads is a sum over devices, in float32. So
    # `run` casts the operand in a function with a derivative of its own.
    if Trait.SPREADS in traits(eqn):
        return as_traced
    return [low if dtype == FLOAT32 else dtype for dtype in as_traced]


def _reads(facts: Facts, steps: Sequence[Step], results: Dtypes) -> Dtypes:
    """The values that steps read from outside, each with the dtype that they need."""
    low = facts.low
    needed = dict(results)
    for step in reversed(steps):
        is_low = _moves_rounded(step.eqn, needed, low)
        for v, taken in zip(step.eqn.invars, step.takes, strict=True):
            if isinstance(v, Var):
                is_rounded = is_low or taken == low
                dtype = _rounded(facts, v) if is_rounded else facts.dtypes[v]
                needed[v] = joined_dtype(facts, v, dtype, needed.get(v, dtype))
    made = producers_in([step.eqn for step in steps])
    return {v: dtype for v, dtype in needed.items() if v not in made}


def _rounded(facts: Facts, v: Var) -> Any:
    """The dtype in which products need a value."""
    return facts.low if dtype_in(v) == FLOAT32 else facts.dtypes[v]


def _moves_rounded(eqn: JaxprEqn, needed: Dtypes, low: np.dtype) -> bool:
    """Whether an equation moves numbers that are all needed in 16 bits."""
    its_traits = traits(eqn)
    moves = its_traits & (RUNS_AS_STORED | Trait.SPREADS)
    if not moves or Trait.ADDS_MANY in its_traits:
        return False
    return all(needed.get(v, low) == low for v in eqn.outvars)
