"""Makes the plan of a program: what each step casts, and what each region stores.

A product takes and gives 16 bits. The island after it reads its result, computes in
float32, and casts to 16 bits what the next product reads, and the sums of a stream. A
step that holds products, such as a `scan`, has a plan for each of its programs, made
from the kinds and dtypes of its operands, and the uses and dtypes of its results.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from optax_lossscale._autocast.classify import Kind, kinds_inside, kinds_of
from optax_lossscale._autocast.facts import Casting, Facts, facts_of, stored_dtype
from optax_lossscale._autocast.products import is_rewritten
from optax_lossscale._autocast.region import Region, Step
from optax_lossscale._autocast.shown import shown
from optax_lossscale._autocast.store import store
from optax_lossscale._autocast.uses import NOTHING, Uses, results_inside, uses_inside
from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.flat import Flat, flat
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import dtype_in, dtypes_in
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import carried_by, first_inside, result_programs


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
    traced = open_jaxpr(jaxpr)
    takes = tuple(
        casting.low if dtype_in(x) == casting.low else dtype_in(v)
        for x, v in zip(args, traced.invars, strict=True)
    )
    gives = tuple(dtypes_in(traced.outvars))
    nothing = (NOTHING,) * len(gives)  # nothing is done with results
    return _plan(jaxpr, takes, gives, tuple(kinds), nothing, casting)


@cached_by_program
def _plan(
    jaxpr: Any,
    takes: tuple[Any, ...],
    gives: tuple[Any, ...],
    kinds: tuple[Kind, ...],
    results: Uses,
    casting: Casting,
) -> Plan:
    """The plan for a program in an equation, or for the whole one.

    Args:
      jaxpr: the program.
      takes: the dtypes of its arguments.
      gives: the dtypes of its results.
      kinds: the kinds of its arguments.
      results: what is done with its results.
      casting: how it is rewritten.
    """
    eqns = flat(jaxpr).eqns
    # JAX adds a `reduce_precision` to what it keeps by name, and runs it in the mesh
    # around the program. If equations have different meshes, that may be the wrong one,
    # so nothing is kept by name.
    if len({eqn.ctx.cur_abstract_mesh for eqn in eqns}) > 1:
        casting = casting._replace(keeps_reductions=False)
    facts = facts_of(jaxpr, takes, kinds, results, casting)
    rewritten = {eqn: _rewritten_step(facts, eqn) for eqn in eqns if is_rewritten(eqn)}
    return Plan(takes, gives, facts.program, store(facts, rewritten), casting)


def _rewritten_step(facts: Facts, eqn: JaxprEqn) -> Step:
    """The step of an equation that is rewritten, with the plans for its programs."""
    kinds = kinds_inside(eqn, kinds_of(eqn.invars, facts.kinds))
    results = results_inside(eqn, tuple(facts.uses[v] for v in eqn.outvars))
    operands, takes, gives = _dtypes_of(facts, eqn, kinds, results)
    casting = facts.casting
    if Trait.SCANS in traits(eqn):  # whose passes no compiler merges
        casting = casting._replace(prevent_cse=False)
    if Trait.CHECKPOINTS in traits(eqn):
        casting = casting._replace(recomputes=False)
    first = first_inside(eqn)
    inside = tuple(takes[first:]), tuple(gives), tuple(kinds[first:]), results, casting
    plans = [_plan(program, *inside) for program in result_programs(eqn)]
    return Step(eqn, operands, plans)


def _dtypes_of(
    facts: Facts, eqn: JaxprEqn, kinds: Sequence[Kind], results: Uses
) -> tuple[list[Any], list[Any], list[Any]]:
    """The dtypes of an equation's operands, and those its programs take and give.

    Args:
      facts: the facts about the program around it.
      eqn: the equation.
      kinds: the kinds that its operands have inside.
      results: what is done with the results of its programs.
    """
    takes = [
        dtype_in(v) if isinstance(v, Literal) else facts.dtypes[v] for v in eqn.invars
    ]
    gives = [facts.dtypes[v] for v in eqn.outvars]
    carried = carried_by(eqn)
    if Trait.SCANS in traits(eqn):
        # Every round reads the constants, so their gradients are sums over the rounds:
        # in float32, if the constants are.
        takes[: carried.start] = dtypes_in(eqn.invars[: carried.start])
    operands = list(takes)
    # The body takes and gives its carry in 16 bits where it would store it so. If it
    # takes 16 bits but gives float32, the loop carries float32, and each round rounds
    # what it takes. So the last result is not rounded.
    of_operands = uses_inside(eqn, results)
    for j, n in enumerate(carried):
        v = eqn.invars[n]
        takes[n] = stored_dtype(v, kinds[n], of_operands[n], facts.low)
        gives[j] = stored_dtype(v, kinds[n], results[j], facts.low)
        operands[n] = takes[n] if takes[n] == gives[j] else dtype_in(v)
    return operands, takes, gives
