"""Regions: lists of equations that run as one, with what they cast, read and store.

For `exp(x @ w) @ w`, the region between the two products reads the result of `x @ w` in
16 bits, casts it to float32 for `exp`, and stores the result of `exp` in 16 bits.

`region_of_island` and `region_of_equation` build a region from its equations and the
values that later regions read. They decide two things.

First, the dtype to which each equation casts its operands:

- A narrowed product *rounds* its operands: it casts them to 16 bits.
- Some sums that are stored in 16 bits round their operands as well. So does an equation
  that moves elements and is not cheap, such as a transfer between devices, if all that
  read its result need 16 bits, as products do.
- Any other equation that moves elements, and any sum over devices, casts nothing and
  runs in the dtype in which its operands are stored.
- All other equations cast their operands to the dtypes in which they were traced.

Second, the dtype in which the region reads a value from outside. It has 16 bits if
every equation that reads the value rounds it or only moves it to readers that need 16
bits. Otherwise it is the dtype that `facts` has for the value.

What this file says of memory, traffic and bytes sent was read from programs compiled
for an H100 (not timed): see `store`.
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
class PlannedEquation:
    """An equation in a region, with the dtypes to which it casts its operands.

    Attributes:
      eqn: the equation.
      operand_dtypes: the dtype to which each operand is cast; None if it is read in the
        dtype in which it is stored.
      plans: the plans of the programs in a rewritten equation; empty for any other.
    """

    eqn: JaxprEqn
    operand_dtypes: Sequence[Any]
    plans: Sequence["Plan"] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """An island, a part of an island, or a single equation such as a product.

    Attributes:
      equations: the equations, in the order in which they run.
      reads: the values from outside, with the dtypes in which the region needs them. If
        a value is stored in another dtype, the equations that read it cast it.
      stores: the values for later regions, with their dtypes.
      is_recomputed: whether the backward pass recomputes the region.
      kept_reductions: the results that `jax.checkpoint` saves as residuals.
    """

    equations: Sequence[PlannedEquation]
    reads: Dtypes
    stores: Dtypes
    is_recomputed: bool = False
    kept_reductions: frozenset[Var] = frozenset()


def region_of_island(facts: Facts, eqns: Sequence[JaxprEqn], stores: Dtypes) -> Region:
    """Builds the region for the given equations of an island.

    Args:
      facts: the facts about the program.
      eqns: the equations, in order.
      stores: the results that the region stores, with their dtypes.
    """
    rounding_sums = _rounding_sums(facts, eqns, stores)
    equations = []
    for eqn in eqns:
        rounds_operands = eqn in rounding_sums
        operand_dtypes = _operand_dtypes(eqn, facts.low, rounds_operands)
        equations.append(PlannedEquation(eqn, operand_dtypes))
    casting = facts.casting
    is_recomputed = casting.recomputes and is_worth_recomputing(eqns)
    kept = frozenset()
    if is_recomputed and casting.keeps_reductions:
        kept = kept_reductions(eqns, stores)
    return Region(
        equations=equations,
        reads=_reads(facts, equations, stores),
        stores=stores,
        is_recomputed=is_recomputed,
        kept_reductions=kept,
    )


def region_of_equation(
    facts: Facts, eqn: JaxprEqn, rewritten: PlannedEquation | None, live: Dtypes
) -> Region:
    """Builds the region for an equation outside islands; it stores all results.

    An equation that sends its operand to other devices, names it, or holds it behind a
    barrier rounds it first if all that read the result need 16 bits, as products do.
    Devices then send each other 16 bits instead of float32, as in a model cast by hand.
    A cheap move, such as a transpose, does not round, because a compiler can fuse it
    with the cast after it.

    Args:
      facts: the facts about the program.
      eqn: the equation.
      rewritten: the equation with plans for its programs; None if the equation is not
        rewritten.
      live: the values that are read later, with the dtypes in which to store them.
    """
    low = facts.low
    results = {v: live[v] for v in eqn.outvars if v in live}
    is_cheap = Trait.CHEAP in traits(eqn)
    rounds_operands = _moves_rounded(eqn, results, low) and not is_cheap
    planned = rewritten
    if planned is None:
        operand_dtypes = _operand_dtypes(eqn, low, rounds_operands)
        planned = PlannedEquation(eqn, operand_dtypes)
    stores = {v: _dtype_needed(facts, v, rounds_operands) for v in eqn.outvars}
    return Region(
        equations=[planned],
        reads=_reads(facts, [planned], results),
        stores=stores,
    )


def add_need(facts: Facts, needed: dict[Var, Any], v: Var, dtype: Any) -> None:
    """Adds to `needed` that some reader needs the value `v` in `dtype`.

    If the readers of a value need different dtypes, `needed` has the dtype that `facts`
    has for the value, and each reader casts it.
    """
    if needed.setdefault(v, dtype) != dtype:
        needed[v] = facts.dtypes[v]


def _rounding_sums(
    facts: Facts, eqns: Sequence[JaxprEqn], stores: Dtypes
) -> set[JaxprEqn]:
    """Finds the sums in an island that round their operands.

    These are the sums that are stored in 16 bits, and those that lead through SUMs
    alone to a value that is. For example, if `relu(x @ w + tanh(x @ w))` is stored in
    16 bits, then the sum inside `relu` rounds the `tanh`. A sum that broadcasts an
    operand does not round.

    Without this rule, the compiler may store the operands in float32. The rule saves
    memory and traffic in a ResNet, and traffic in transformers.
    """
    leads_to_stored = {v for v in stores if facts.dtypes[v] == facts.low}
    sums = set()
    for eqn in reversed(eqns):
        if leads_to_stored.isdisjoint(eqn.outvars):
            continue
        for v in variables(eqn.invars):
            if facts.kinds[v] == Kind.SUM:
                leads_to_stored.add(v)
        if Trait.ADDS_TWO in traits(eqn) and _is_of_one_shape(eqn):
            sums.add(eqn)
    return sums


def _is_of_one_shape(eqn: JaxprEqn) -> bool:
    """Whether an equation broadcasts no operand.

    The gradient of a broadcast operand is a sum, which needs float32.
    """
    atoms = [*eqn.invars, *eqn.outvars]
    return len(set(map(shape_in, atoms))) == 1


def _operand_dtypes(eqn: JaxprEqn, low: np.dtype, rounds_operands: bool) -> list[Any]:
    """Returns the dtype to which an equation casts each operand; None for no cast.

    Narrowed products always round. With `rounds_operands`, any other equation also runs
    in 16 bits and returns 16 bits.
    """
    traced = dtypes_in(eqn.invars)
    if rounds_operands:
        # The derivative of spreading an array over devices is a sum over the devices,
        # which must run in float32. The cast is therefore left to `run`, which casts in
        # a function with a custom derivative.
        if Trait.SPREADS in traits(eqn):
            return traced
        return [low if dtype == FLOAT32 else dtype for dtype in traced]
    if is_narrowed(eqn):
        group_sizes = eqn.invars[2:]  # of a ragged product
        return [low, low] + [None] * len(group_sizes)
    if traits(eqn) & RUNS_AS_STORED:
        return [None] * len(traced)
    return traced


def _reads(
    facts: Facts, equations: Sequence[PlannedEquation], results: Dtypes
) -> Dtypes:
    """Finds the values that a region reads, with the dtypes in which it needs them.

    Args:
      facts: the facts about the program.
      equations: the equations of the region, in order.
      results: their results that later regions need, with the dtypes needed there.
    """
    low = facts.low
    needed = dict(results)
    for planned in reversed(equations):
        eqn = planned.eqn
        readers_round = _moves_rounded(eqn, needed, low)
        for v, cast_to in zip(eqn.invars, planned.operand_dtypes, strict=True):
            if isinstance(v, Var):
                is_rounded = readers_round or cast_to == low
                dtype = _dtype_needed(facts, v, is_rounded)
                add_need(facts, needed, v, dtype)
    computed = producers_in([planned.eqn for planned in equations])
    return {v: dtype for v, dtype in needed.items() if v not in computed}


def _dtype_needed(facts: Facts, v: Var, is_rounded: bool) -> Any:
    """Returns the dtype in which a reader needs a value, by whether it rounds it."""
    if is_rounded and dtype_in(v) == FLOAT32:
        return facts.low
    return facts.dtypes[v]


def _moves_rounded(eqn: JaxprEqn, needed: Dtypes, low: np.dtype) -> bool:
    """Whether an equation only moves elements, to readers that need them in 16 bits.

    `needed` has the dtypes in which the equation's results are needed. A result that is
    not in `needed` has no readers.
    """
    eqn_traits = traits(eqn)
    if not eqn_traits & (RUNS_AS_STORED | Trait.SPREADS):
        return False
    if Trait.ADDS_MANY in eqn_traits:
        return False
    return all(needed.get(v, low) == low for v in eqn.outvars)
