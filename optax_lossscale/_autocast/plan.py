"""The fifth pass: the plan, which says in which dtype each step runs; print it.

Between products everything runs in float32, in islands: a product gives 16 bits, an
island reads them, computes in float32, and rounds once where the next product begins.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Casting, Facts, facts_of
from optax_lossscale._autocast.flat import Flat, Step
from optax_lossscale._autocast.partition import Dtypes, Region, partition
from optax_lossscale._autocast.products import (
    holds_products,
    is_narrowed,
    is_outer_product,
)
from optax_lossscale._autocast.shown import shown
from optax_lossscale._autocast.store import read_by, store
from optax_lossscale._autocast.uses import (
    Context,
    Entry,
    Use,
    entered,
    is_stored_low,
    uses_inside,
)
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.values import FLOAT32, dtype_in, dtypes_in
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import carried_by

Available = Mapping[int, Dtypes]
"""The values that can be read, by number."""


class Plan(NamedTuple):
    """How a program is run; print it."""

    takes: tuple[Any, ...]  # the dtypes of its arguments
    gives: tuple[Any, ...]  # the dtypes of its results
    program: Flat
    regions: tuple[Region, ...]
    casting: Casting

    def __str__(self) -> str:
        return shown(self)


def plan_for(
    jaxpr: Any,
    args: Sequence[Any],
    kinds: Sequence[Kind],
    casting: Casting,
    uses: Sequence[Use] | None = None,
) -> Plan:
    """The plan for a program that was traced in float32.

    Args:
      jaxpr: the program.
      args: its arguments, of which those in the dtype of products are taken as they
        are.
      kinds: what each of them is.
      casting: how it is rewritten.
      uses: what is done with each of its results; without it, anything.
    """
    program = open_jaxpr(jaxpr)
    takes = tuple(
        casting.dtype if dtype_in(x) == casting.dtype else dtype_in(v)
        for x, v in zip(args, program.invars, strict=True)
    )
    if uses is None:
        uses = [Use.WIDELY] * len(program.outvars)
    context = Context(tuple(kinds), (0,) * len(kinds), tuple(uses))
    return _plan(jaxpr, takes, context, casting, None)


@remembered
def _plan(
    jaxpr: Any, takes: Dtypes, context: Context, casting: Casting, gives: Dtypes | None
) -> Plan:
    """The plan for a program whose results are to have dtypes, or are to come as stored."""
    facts = facts_of(jaxpr, takes, context, casting)
    program = facts.program
    available: dict[int, Dtypes] = {}
    for i, dtype in facts.arguments.items():
        available[i] = (dtype,)
    for i, x in (program.consts | program.literals).items():
        available[i] = (dtype_in(x),)
    regions: list[Region] = []
    for region in store(facts, partition(facts)):
        planned = (_island if region.is_island else _alone)(facts, region, available)
        regions.append(planned)
        available |= planned.stores
    if gives is None:
        gives = tuple(map(facts.stored_dtype, program.outs))
    return Plan(takes, gives, program, tuple(regions), casting)


def _island(facts: Facts, region: Region, available: Available) -> Region:
    """A region of an island, with the dtypes in which its steps run."""
    here = dict(available)
    steps: list[Step] = []
    for step in region.steps:
        rounded = region.rounded.intersection(step.outs)
        is_low = any(map(facts.is_read_past, rounded))
        typed = _typed(facts, step, here, is_low)
        gives: list[Any] = []
        for i, dtype in zip(step.outs, typed.gives, strict=True):
            # Steps that read it here see what others will.
            dtype = facts.low if i in rounded else dtype
            gives.append(dtype)
            here[i] = (dtype,)
        steps.append(typed._replace(gives=tuple(gives)))
    return region._replace(steps=tuple(steps), reads=dict.fromkeys(read_by(steps)))


def _alone(facts: Facts, region: Region, available: Available) -> Region:
    """A step that runs alone, with the dtypes in which it does."""
    (step,) = region.steps
    typed = _typed(facts, step, available)
    # What is moved after being spread still has the derivative of float32.
    is_sum = traits(step.eqn) & (Is.SENDS | Is.SPREADS) != Is.SENDS
    is_wide = any(FLOAT32 in available[i] for i in step.reads)
    is_spread = facts.is_sent(step) and is_sum and is_wide
    gives: list[Any] = []
    stores: dict[int, Dtypes] = {}
    for i, dtype in zip(step.outs, typed.gives, strict=True):
        # A product gives 16 bits, whoever reads it.
        dtype = facts.low if dtype == facts.low else facts.stored_dtype(i)
        gives.append(dtype)
        for_derivative = (FLOAT32,) if is_spread else ()
        stores[i] = (dtype, *for_derivative)
    reads: dict[int, Any] = {}
    for i, dtype in zip(step.ins, typed.takes, strict=True):
        is_literal = i < 0
        if not is_literal:
            reads[i] = dtype
    return region._replace(
        steps=(typed._replace(gives=tuple(gives)),),
        stores=stores,
        reads=reads,
        is_spread=is_spread,
    )


def _typed(
    facts: Facts, step: Step, available: Available, is_low: bool = False
) -> Step:
    """A step with the dtypes in which it runs; a sum of two in 16 bits, if `is_low`."""
    eqn = step.eqn
    low = facts.low
    operands = tuple(dtypes_in(eqn.invars))
    results = tuple(dtypes_in(eqn.outvars))
    stored = tuple(available[i][0] for i in step.ins)
    as_they_come = (None,) * len(step.ins)
    if is_narrowed(eqn):
        takes = (low, low, *as_they_come[2:])
        return step._replace(takes=takes, gives=(low,))
    if is_outer_product(eqn):
        return step._replace(takes=(FLOAT32, FLOAT32), gives=results)
    if holds_products(eqn):
        return _entered(facts, step, stored)
    if facts.is_sent(step):
        takes = tuple(low if dtype == FLOAT32 else dtype for dtype in operands)
        return step._replace(takes=takes, gives=(low,) * len(results))
    if traits(eqn) & (Is.MOVES | Is.SENDS):
        # From each operand a result, or from one operand all of them.
        is_of_each = len(stored) == len(results)
        gives = stored if is_of_each else stored[:1] * len(results)
        return step._replace(takes=as_they_come, gives=gives)
    if is_low and Is.ADDS_TWO in traits(eqn) and _is_of_one_shape(eqn):
        # Of rounded numbers, so that a compiler has no float32 array to store.
        return step._replace(takes=(low, low), gives=(low,))
    return step._replace(takes=operands, gives=results)


def _is_of_one_shape(eqn: Any) -> bool:
    """Whether no operand of an equation is broadcast."""
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)}
    return len(shapes) == 1


def _entered(facts: Facts, step: Step, stored: Dtypes) -> Step:
    """A step that holds products: each program in it is run by a plan of its own."""
    eqn = step.eqn
    uses = tuple(facts.uses[i] for i in step.outs)
    entries = entered(step, facts.kinds, facts.depths, uses, facts.low)
    takes = _taken(facts, eqn, entries, stored)
    gives = [facts.stored_dtype(i) for i in step.outs]
    as_told = tuple(gives) if Is.BRANCHES in traits(eqn) else None
    casting = facts.casting
    if Is.SCANS in traits(eqn):
        casting = casting._replace(prevent_cse=False)
    if Is.KEEPS in traits(eqn):
        casting = casting._replace(recomputes=False)
    plans: list[Plan] = []
    for entry in entries:
        its_takes = tuple(takes[n] for n in entry.operands)
        plans.append(_plan(entry.program, its_takes, entry.context, casting, as_told))
    if Is.SCANS in traits(eqn):
        (each_round,) = plans
        for j, n in enumerate(carried_by(eqn)):
            if takes[n] == each_round.gives[j] == facts.low:
                gives[j] = facts.low
    return step._replace(
        takes=(None,) * len(step.ins),
        gives=tuple(gives),
        kinds=tuple(facts.kinds[i] for i in step.ins),
        uses=uses,
        plans=plans,
    )


def _taken(
    facts: Facts, eqn: Any, entries: Sequence[Entry], stored: Dtypes
) -> list[Any]:
    """The dtypes in which the programs in an equation take its operands."""
    takes = list(stored)
    carried = carried_by(eqn)
    if Is.SCANS in traits(eqn):
        # What every round reads gets a gradient from each of them: a sum of many
        # numbers.
        takes[: carried.start] = dtypes_in(eqn.invars[: carried.start])
    of_operands = uses_inside(eqn, entries, facts.low)
    for entry in entries:
        for n, kind in zip(entry.operands, entry.context.kinds, strict=True):
            if n in carried:
                is_low = is_stored_low(kind, of_operands[n])
                takes[n] = facts.low if is_low else dtype_in(eqn.invars[n])
    return takes
