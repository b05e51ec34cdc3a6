"""The fifth pass: the plan, which says in which dtype each instruction runs; print it.

Between products everything runs in float32, in islands: a product gives 16 bits, an
island reads them, computes in float32, and rounds once where the next product begins.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.flat import Flat, Instruction
from optax_lossscale._autocast.keep import Portion, keep, read_by
from optax_lossscale._autocast.known import Casting, Known, known
from optax_lossscale._autocast.partition import partition
from optax_lossscale._autocast.products import (
    holds_products,
    is_narrowed,
    is_outer_product,
)
from optax_lossscale._autocast.shown import shown
from optax_lossscale._autocast.uses import (
    Arguments,
    Entry,
    Use,
    entered,
    is_kept_low,
    uses_inside,
)
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.values import FLOAT32, dtype_in, dtypes_in
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import carried_by

Available = Mapping[int, tuple[Any, ...]]
"""The dtypes in which values can be read, beginning with the one each is kept in."""


class Part(NamedTuple):
    """A portion of an island; or an instruction by itself, such as a product."""

    steps: tuple[Instruction, ...]
    repeated: int  # how many leading steps repeat what other parts computed before
    # From other parts, each in its dtype, or None for as it is kept
    reads: dict[int, Any]
    # What other parts read, in all dtypes in which they do, beginning with the one it
    # is kept in.
    writes: Mapping[int, tuple[Any, ...]]
    is_recomputed: bool = False  # in the backward pass
    is_spread: bool = False  # whether it sends 16 bits, with the derivative of float32
    # What is kept for the backward pass, and not recomputed
    saved: frozenset[int] = frozenset()


class Plan(NamedTuple):
    """How a program is run; print it."""

    takes: tuple[Any, ...]  # the dtypes of its arguments
    gives: tuple[Any, ...]  # the dtypes of its results
    program: Flat
    parts: tuple[Part, ...]
    how: Casting

    def __str__(self) -> str:
        return shown(self)


def plan(
    jaxpr: Any,
    args: Sequence[Any],
    kinds: Sequence[Kind],
    how: Casting,
    uses: Sequence[Use] | None = None,
) -> Plan:
    """The plan for a program that was traced in float32.

    Args:
      jaxpr: the program.
      args: its arguments, of which those in the dtype of products are taken as they
        are.
      kinds: what each of them is.
      how: how it is narrowed.
      uses: what is done with each of its results; without it, anything.
    """
    program = open_jaxpr(jaxpr)
    takes = tuple(
        how.dtype if dtype_in(x) == how.dtype else dtype_in(v)
        for x, v in zip(args, program.invars, strict=True)
    )
    if uses is None:
        uses = [Use.WIDELY] * len(program.outvars)
    arguments = Arguments(tuple(kinds), (0,) * len(kinds), tuple(uses))
    return _plan(jaxpr, takes, arguments, how, None)


@remembered
def _plan(
    jaxpr: Any, takes: Sequence[Any], arguments: Arguments, how: Casting, gives: Any
) -> Plan:
    """The plan for a program whose results are to have dtypes, or those in which they are kept."""
    facts = known(jaxpr, takes, arguments, how)
    program = facts.program
    portions = keep(facts, partition(facts))
    available = {i: (dtype,) for i, dtype in facts.arguments.items()}
    available |= {i: (dtype_in(x),) for i, x in program.consts.items()}
    available |= {i: (dtype_in(x),) for i, x in program.literals.items()}
    parts: list[Part] = []
    for portion in portions:
        part = (_island if portion.is_island else _alone)(facts, portion, available)
        parts.append(part)
        available |= part.writes
    if gives is None:
        gives = tuple(map(facts.kept_dtype, program.outs))
    return Plan(tuple(takes), gives, program, tuple(parts), how)


def _island(facts: Known, portion: Portion, available: Available) -> Part:
    """A portion of an island, with the dtypes in which its instructions run."""
    here = ChainMap[int, tuple[Any, ...]]({}, dict(available))
    steps: list[Instruction] = []
    for step in portion.steps:
        rounded = portion.rounded.intersection(step.outs)
        typed = _typed(facts, step, here, is_low=any(map(facts.is_read_past, rounded)))
        # Steps that read it here see what others will.
        pairs = zip(step.outs, typed.gives, strict=True)
        typed = typed._replace(
            gives=tuple(facts.low if i in rounded else d for i, d in pairs)
        )
        here |= {i: (dtype,) for i, dtype in zip(step.outs, typed.gives, strict=True)}
        steps.append(typed)
    reads = dict.fromkeys(read_by(steps))
    return Part(
        tuple(steps),
        portion.repeated,
        reads,
        portion.writes,
        portion.is_recomputed,
        saved=portion.saved,
    )


def _alone(facts: Known, portion: Portion, available: Available) -> Part:
    """An instruction that runs alone."""
    (step,) = portion.steps
    typed = _typed(facts, step, available)
    # A product gives 16 bits, whoever reads it.
    gives = tuple(
        facts.low if dtype == facts.low else facts.kept_dtype(i)
        for i, dtype in zip(step.outs, typed.gives, strict=True)
    )
    # What is moved after being spread still has the derivative of float32.
    is_sum = traits(step.eqn) & (Is.SENDS | Is.SPREADS) != Is.SENDS
    is_wide = any(FLOAT32 in available[i] for i in step.reads)
    is_spread = facts.is_sent(step) and is_sum and is_wide
    beside = (FLOAT32,) if is_spread else ()  # for its derivative
    writes = {i: (dtype, *beside) for i, dtype in zip(step.outs, gives, strict=True)}
    reads = {i: dtype for i, dtype in zip(step.ins, typed.takes, strict=True) if i >= 0}
    return Part((typed._replace(gives=gives),), 0, reads, writes, is_spread=is_spread)


def _typed(
    facts: Known, step: Instruction, available: Available, is_low: bool = False
) -> Instruction:
    """An instruction with the dtypes in which it runs; a sum of two in 16 bits, if `is_low`."""
    eqn = step.eqn
    low = facts.low
    there = tuple(available[i][0] for i in step.ins)
    results = tuple(dtypes_in(eqn.outvars))
    as_they_come = (None,) * len(step.ins)
    if is_narrowed(eqn):
        return step._replace(takes=(low, low, *as_they_come[2:]), gives=(low,))
    if is_outer_product(eqn):
        return step._replace(takes=(FLOAT32, FLOAT32), gives=results)
    if holds_products(eqn):
        return _entered(facts, step, there)
    if facts.is_sent(step):
        takes = tuple(
            low if dtype == FLOAT32 else dtype for dtype in dtypes_in(eqn.invars)
        )
        return step._replace(takes=takes, gives=(low,) * len(results))
    if traits(eqn) & (Is.MOVES | Is.SENDS):
        gives = there if len(there) == len(results) else there[:1] * len(results)
        return step._replace(takes=as_they_come, gives=gives)
    is_sum = is_low and Is.ADDS_TWO in traits(eqn)
    if is_sum and len({v.aval.shape for v in (*eqn.invars, *eqn.outvars)}) == 1:
        # Of rounded numbers, so that a compiler has no float32 array to keep.
        return step._replace(takes=(low,) * len(step.ins), gives=(low,))
    return step._replace(takes=tuple(dtypes_in(eqn.invars)), gives=results)


def _entered(facts: Known, step: Instruction, there: Sequence[Any]) -> Instruction:
    """An instruction that holds products: each program in it is run by a plan of its own."""
    eqn = step.eqn
    uses = tuple(facts.uses[i] for i in step.outs)
    entries = entered(step, facts.kinds, facts.depths, uses, facts.low)
    takes = _taken(facts, eqn, entries, there)
    how = facts.how
    if Is.SCANS in traits(eqn):
        how = how._replace(prevent_cse=False)
    if Is.KEEPS in traits(eqn):
        how = how._replace(recomputes=False)
    gives = [facts.kept_dtype(i) for i in step.outs]
    as_told = tuple(gives) if Is.BRANCHES in traits(eqn) else None
    plans = [
        _plan(
            entry.program,
            tuple(takes[n] for n in entry.operands),
            entry.known,
            how,
            as_told,
        )
        for entry in entries
    ]
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
    facts: Known, eqn: Any, entries: Sequence[Entry], there: Sequence[Any]
) -> list[Any]:
    """The dtypes in which the programs in an equation take its operands."""
    takes = list(there)
    carried = carried_by(eqn)
    if Is.SCANS in traits(eqn):
        # What every round reads gets a gradient from each of them: a sum of many
        # numbers.
        takes[: carried.start] = dtypes_in(eqn.invars[: carried.start])
    of_operands = uses_inside(eqn, entries, facts.low)
    for entry in entries:
        for n, kind in zip(entry.operands, entry.known.kinds, strict=True):
            if n in carried:
                is_low = is_kept_low(kind, of_operands[n])
                takes[n] = facts.low if is_low else dtype_in(eqn.invars[n])
    return takes
