"""The plan, which joins the passes: the dtypes of each step, and what is stored.

A product takes and gives 16 bits. The island after it reads its result, computes in
float32, and rounds where the next product reads, or where a stream is stored. A step
that holds products, such as a `scan`, has a plan for each of its programs; the kinds
and uses of its operands and results are the arguments from which these plans are made.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from optax_lossscale._autocast.classify import Kind, kinds_inside
from optax_lossscale._autocast.facts import Casting, Facts, facts_of, stored_dtype
from optax_lossscale._autocast.flat import Flat, Step, TypedStep
from optax_lossscale._autocast.products import holds_products, is_narrowed
from optax_lossscale._autocast.shown import shown
from optax_lossscale._autocast.store import Region, store
from optax_lossscale._autocast.uses import NOTHING, Uses, results_inside, uses_inside
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.values import FLOAT32, dtype_in, dtypes_in
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import arguments_of, carried_by


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a program is run; printed, it has a line for each region."""

    takes: tuple[Any, ...]  # the dtypes of its arguments
    gives: tuple[Any, ...]  # the dtypes of its results
    program: Flat
    regions: tuple[Region, ...]
    casting: Casting

    def __str__(self) -> str:
        return shown(self)


def plan_for(
    jaxpr: Any, args: Sequence[Any], kinds: Sequence[Kind], casting: Casting
) -> Plan:
    """The plan for a program that was traced in float32.

    Args:
      jaxpr: the program.
      args: its arguments; the plan takes those in the low dtype as they are.
      kinds: their kinds.
      casting: how it is rewritten.
    """
    program = open_jaxpr(jaxpr)
    takes = tuple(
        dtype_in(x if dtype_in(x) == casting.dtype else v)
        for x, v in zip(args, program.invars, strict=True)
    )
    nothing = (NOTHING,) * len(program.outvars)  # nothing is done with results
    return _plan(jaxpr, takes, tuple(kinds), nothing, casting)


@remembered
def _plan(
    jaxpr: Any,
    takes: tuple[Any, ...],
    kinds: tuple[Kind, ...],
    results: Uses,
    casting: Casting,
) -> Plan:
    """The plan for a program, from the same arguments as `facts_of`."""
    facts = facts_of(jaxpr, takes, kinds, results, casting)
    program = facts.program
    regions = store(facts, [_typed(facts, step) for step in program.steps])
    gives = tuple(facts.dtypes[i] for i in program.outs)
    return Plan(takes, gives, program, regions, casting)


def _typed(facts: Facts, step: Step) -> TypedStep:
    """A step with its dtypes, and with a plan for each program that it holds."""
    plans = _plans_inside(facts, step) if holds_products(step.eqn) else []
    gives = [facts.dtypes[i] for i in step.outs]
    takes = _takes(facts, step, gives)
    return TypedStep(step.eqn, step.ins, step.outs, step.names, takes, gives, plans)


def _takes(facts: Facts, step: Step, gives: Sequence[Any]) -> list[Any]:
    """The dtype to which a step casts each operand; None for as it is stored."""
    eqn = step.eqn
    low = facts.low
    its_traits = traits(eqn)
    as_traced = dtypes_in(eqn.invars)
    if is_narrowed(eqn):
        return [low, low] + [None] * len(eqn.invars[2:])
    is_sent = not facts.sent.isdisjoint(step.outs)
    if is_sent and Is.SPREADS in its_traits:
        return as_traced  # `_spread` in `run` rounds it, as its derivative is a sum
    # A sum that is stored in 16 bits adds rounded numbers, so that the compiler need
    # not store an operand in float32. Without this, a ResNet takes 1.08 of the memory
    # and moves 1.03 of the bytes.
    is_sum = Is.ADDS_TWO in its_traits and gives == [low] and _is_of_one_shape(eqn)
    if is_sent or is_sum:
        return [low if dtype == FLOAT32 else dtype for dtype in as_traced]
    if holds_products(eqn) or its_traits & (Is.MOVES | Is.SENDS):
        return [None] * len(eqn.invars)
    return as_traced


def _is_of_one_shape(eqn: Any) -> bool:
    """Whether no operand is broadcast; the gradient of one that is would be a sum."""
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)}
    return len(shapes) == 1


def _plans_inside(facts: Facts, step: Step) -> list[Plan]:
    """A plan for each program in a step that holds products."""
    eqn = step.eqn
    kinds = kinds_inside(eqn, [facts.kinds[i] for i in step.ins])
    results = results_inside(eqn, tuple(facts.uses[i] for i in step.outs))
    of_operands = uses_inside(eqn, results)
    takes = [facts.dtypes[i] for i in step.ins]
    as_traced = dtypes_in(eqn.invars)
    casting = facts.casting
    carried = carried_by(eqn)
    if Is.SCANS in traits(eqn):
        casting = casting._replace(prevent_cse=False)
        # Every round reads the constants, so their gradients are sums over the rounds:
        # in float32, if the constants are.
        takes[: carried.start] = as_traced[: carried.start]
    if Is.KEEPS in traits(eqn):
        casting = casting._replace(recomputes=False)
    # The body takes its carry in 16 bits where the body would store it so.
    for n in carried:
        takes[n] = stored_dtype(as_traced[n], kinds[n], of_operands[n], facts.low)
    plans: list[Plan] = []
    for program, operands in arguments_of(eqn):
        its_takes = tuple(takes[n] for n in operands)
        its_kinds = tuple(kinds[n] for n in operands)
        # The condition of a `while` has one result, of whose use nothing follows.
        its_results = results[: len(open_jaxpr(program).outvars)]
        plans.append(_plan(program, its_takes, its_kinds, its_results, casting))
    return plans
