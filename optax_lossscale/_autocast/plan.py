"""Makes the plan of a program: what each equation casts, and what each region stores.

`facts` and `store` do most of the work. This file applies them to the program, and to
the programs in each equation that is *rewritten*, that is, runs its programs by plans
of their own. A `scan`, for example, gets a plan for its body, which depends on the
program around the scan: on the kinds and dtypes of the scan's operands and on the uses
and dtypes of its results.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from optax_lossscale._autocast.classify import Kinds, kinds_inside, kinds_of
from optax_lossscale._autocast.facts import Casting, Facts, facts_of, stored_dtype
from optax_lossscale._autocast.products import is_rewritten
from optax_lossscale._autocast.region import PlannedEquation, Region
from optax_lossscale._autocast.shown import text_of
from optax_lossscale._autocast.store import regions_of
from optax_lossscale._autocast.uses import (
    NEITHER,
    Uses,
    operand_uses_inside,
    result_uses_inside,
)
from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.flat import Flat, flat
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import dtype_in, dtypes_in
from optax_lossscale._programs.versions import AnyJaxpr, open_jaxpr
from optax_lossscale._programs.walk import (
    carry_positions,
    first_inner_operand,
    result_programs,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a program is run. Print it to see a line for each region.

    Attributes:
      in_dtypes: the dtypes to which the arguments are cast.
      out_dtypes: the dtypes to which the results are cast.
      program: the program, with its short calls inlined.
      regions: the regions, in the order in which they run.
      casting: the options of the rewrite.
    """

    in_dtypes: Sequence[Any]
    out_dtypes: Sequence[Any]
    program: Flat
    regions: Sequence[Region]
    casting: Casting

    def __str__(self) -> str:
        return text_of(self)


def plan_for(
    jaxpr: AnyJaxpr, args: Sequence[Any], kinds: Kinds, casting: Casting
) -> Plan:
    """Makes the plan for a program that was traced in float32.

    Args:
      jaxpr: the program.
      args: its arguments. An argument in the 16-bit dtype is read as it is, without a
        cast to float32.
      kinds: the kinds of its arguments.
      casting: the options of the rewrite.
    """
    traced = open_jaxpr(jaxpr)
    in_dtypes = []
    for x, v in zip(args, traced.invars, strict=True):
        is_low = dtype_in(x) == casting.low
        in_dtypes.append(casting.low if is_low else dtype_in(v))
    out_dtypes = tuple(dtypes_in(traced.outvars))
    result_uses = (NEITHER,) * len(out_dtypes)
    return _plan(jaxpr, tuple(in_dtypes), out_dtypes, kinds, result_uses, casting)


@cached_by_program
def _plan(
    jaxpr: AnyJaxpr,
    in_dtypes: tuple[Any, ...],
    out_dtypes: tuple[Any, ...],
    kinds: Kinds,
    result_uses: Uses,
    casting: Casting,
) -> Plan:
    """Makes the plan for a whole program, or for a program in an equation.

    Args:
      jaxpr: the program.
      in_dtypes: the dtypes of its arguments.
      out_dtypes: the dtypes of its results.
      kinds: the kinds of its arguments.
      result_uses: the uses of its results.
      casting: the options of the rewrite.
    """
    eqns = flat(jaxpr).eqns
    # To save a value by name, JAX adds a `reduce_precision` and runs it in the mesh
    # around the program. If equations have different meshes, that can be the wrong
    # mesh, so nothing is saved by name.
    meshes = {eqn.ctx.cur_abstract_mesh for eqn in eqns}
    if len(meshes) > 1:
        casting = casting._replace(keeps_reductions=False)
    facts = facts_of(jaxpr, in_dtypes, kinds, result_uses, casting)
    rewritten = {}
    for eqn in eqns:
        if is_rewritten(eqn):
            rewritten[eqn] = _rewritten(facts, eqn)
    regions = regions_of(facts, rewritten)
    return Plan(
        in_dtypes=in_dtypes,
        out_dtypes=out_dtypes,
        program=facts.program,
        regions=regions,
        casting=casting,
    )


def _rewritten(facts: Facts, eqn: JaxprEqn) -> PlannedEquation:
    """Plans an equation that is rewritten and the programs in it."""
    outer_kinds = kinds_of(eqn.invars, facts.kinds)
    kinds = kinds_inside(eqn, outer_kinds)
    outer_uses = tuple(facts.uses[v] for v in eqn.outvars)
    result_uses = result_uses_inside(eqn, outer_uses)
    dtypes = _dtypes_of(facts, eqn, kinds, result_uses)
    casting = facts.casting
    # Inside a scan, `prevent_cse` is unnecessary, as the documentation of
    # `jax.checkpoint` says.
    if Trait.SCANS in traits(eqn):
        casting = casting._replace(prevent_cse=False)
    if Trait.CHECKPOINTS in traits(eqn):
        casting = casting._replace(recomputes=False)
    first = first_inner_operand(eqn)
    plans = []
    for program in result_programs(eqn):
        plan = _plan(
            program,
            tuple(dtypes.inside[first:]),
            tuple(dtypes.results),
            kinds[first:],
            result_uses,
            casting,
        )
        plans.append(plan)
    return PlannedEquation(eqn, dtypes.operands, plans)


class _EquationDtypes(NamedTuple):
    """The dtypes of what a rewritten equation and its programs read and return.

    Attributes:
      operands: the dtype to which the equation casts each operand.
      inside: the dtype in which the programs read each operand. Operands before
        `first_inner_operand` have one as well, although no program reads them.
      results: the dtype in which the programs return each result.
    """

    operands: list[Any]
    inside: list[Any]
    results: list[Any]


def _dtypes_of(
    facts: Facts, eqn: JaxprEqn, kinds: Kinds, result_uses: Uses
) -> _EquationDtypes:
    """Decides in which dtypes a rewritten equation and its programs read and return.

    Args:
      facts: the facts about the program around the equation.
      eqn: the equation.
      kinds: the kinds that its operands have inside.
      result_uses: the uses of its programs' results.
    """
    operands = []
    for v in eqn.invars:
        is_literal = isinstance(v, Literal)
        operands.append(dtype_in(v) if is_literal else facts.dtypes[v])
    results = [facts.dtypes[v] for v in eqn.outvars]
    carried = carry_positions(eqn)
    if Trait.SCANS in traits(eqn):
        # Every iteration reads the constants, so their gradients are sums over the
        # iterations. For these sums, constants that were traced in float32 stay in it.
        constants = eqn.invars[: carried.start]
        operands[: carried.start] = dtypes_in(constants)
    inside = list(operands)
    # The body reads and returns its carry in 16 bits where it would store it in 16
    # bits. If it reads 16 bits but returns float32, the loop carries float32, and each
    # iteration casts the carry that it reads. The result of the last iteration is then
    # not rounded.
    operand_uses = operand_uses_inside(eqn, result_uses)
    for i, n in enumerate(carried):
        v = eqn.invars[n]
        inside[n] = stored_dtype(v, kinds[n], operand_uses[n], facts.low)
        results[i] = stored_dtype(v, kinds[n], result_uses[i], facts.low)
        is_same = inside[n] == results[i]
        operands[n] = inside[n] if is_same else dtype_in(v)
    return _EquationDtypes(operands, inside, results)
