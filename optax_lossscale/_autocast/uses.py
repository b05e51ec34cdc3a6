"""The second pass: what is done with each value afterwards, which says how long it is needed.

It goes backward, as kinds go forward. A value that is read again once a product has
been computed from it has to be stored until then; one that is used up before is free.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from optax_lossscale._autocast.cheap import is_cheap
from optax_lossscale._autocast.flat import Flat, Step, flat
from optax_lossscale._autocast.products import is_narrowed, is_rewritten
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.values import numbers_in
from optax_lossscale._programs.walk import arguments_of, carried_by, giving_results


class Use(enum.Flag):
    """What is done with a value; it may be both."""

    MULTIPLIED = enum.auto()
    """A product depends on it, directly or by way of others."""
    PAST = enum.auto()
    """It is read again past a product, or given a name: it has to be stored until then."""


NOTHING = Use(0)
KEPT = Use.MULTIPLIED | Use.PAST
"""What is done with what has to be stored, for a product to read it."""

Uses = tuple[Use, ...]
Entered = list[tuple[Any, Sequence[int], Uses]]
"""The programs in an equation, with the numbers of their operands, and uses of their results."""


@remembered
def uses(jaxpr: Any, results: Uses) -> Mapping[int, Use]:
    """What is done with each value of a program, by its number in `flat`."""
    program = flat(jaxpr)
    before = depths(jaxpr)
    after = dict.fromkeys(program.types, NOTHING)
    for i, use in zip(program.outs, results, strict=True):
        after[i] |= use
    for step in reversed(program.steps):
        if Is.NAMES in traits(step.eqn):
            after[step.outs[0]] |= Use.PAST
        if is_narrowed(step.eqn):
            of_operands = [Use.MULTIPLIED] * 2
        elif is_rewritten(step.eqn):
            of_results = tuple(after[i] for i in step.outs)
            of_operands = uses_inside(step.eqn, entered(step.eqn, of_results))
        else:
            of_operands = []
            for i in step.ins:
                of_operands.append(_of_operand(program, step, i, before, after))
        for i, use in zip(step.ins, of_operands, strict=False):
            after[i] |= use
    return after


def _of_operand(
    program: Flat,
    step: Step,
    i: int,
    before: Mapping[int, int],
    after: Mapping[int, Use],
) -> Use:
    """What an operation, neither a product nor entered, does with one of its operands."""
    its_traits = traits(step.eqn)
    may_be_repeated = is_cheap(step.eqn) or its_traits & (Is.MOVES | Is.SENDS)
    use = NOTHING
    for j in step.outs:
        use |= after[j] & Use.MULTIPLIED
        if before[j] > before[i]:
            use |= Use.PAST
        # It may be needed for the result to be made once more, where that is read.
        is_larger = numbers_in(program.types[i]) > numbers_in(program.types[j])
        if may_be_repeated and not is_larger:
            use |= after[j] & Use.PAST
    return use


@remembered
def depths(jaxpr: Any) -> Mapping[int, int]:
    """How many products came before each value at most, counted on from the arguments."""
    program = flat(jaxpr)
    before = dict.fromkeys(program.types, 0)
    for step in program.steps:
        deepest = max((before[i] for i in step.ins), default=0)
        for i, products in zip(step.outs, _products_in(step.eqn), strict=True):
            before[i] = deepest + products
    return before


def _products_in(eqn: Any) -> list[int]:
    """How many products an equation computes for each result, one after the other."""
    if not is_rewritten(eqn):
        return [int(is_narrowed(eqn))] * len(eqn.outvars)
    products = [0] * len(eqn.outvars)
    for program, _ in giving_results(eqn):
        before = depths(program)
        of_results = [before[i] for i in flat(program).outs]
        products = list(map(max, products, of_results))
    return products


def entered(eqn: Any, results: Uses) -> Entered:
    """The programs in an equation, with what is done with the results of each."""
    after = list(results)
    before: list[Use] | None = None
    entries: Entered = []
    while after != before:
        before = list(after)
        entries = [(*given, tuple(after)) for given in arguments_of(eqn)]
        if Is.WAITS in traits(eqn):
            condition, operands, _ = entries[0]
            entries[0] = (condition, operands, (NOTHING,))
        # What a scan carries from layer to layer is read in the next one, too. But if
        # no product depends on it in the end, it is rounded there alone: the last
        # result is not.
        inside = uses_inside(eqn, entries)
        for j, n in enumerate(carried_by(eqn)):
            if Use.MULTIPLIED in results[j]:
                after[j] |= inside[n]
    return entries


def uses_inside(eqn: Any, entries: Entered) -> list[Use]:
    """What the programs in an equation do with each of its operands."""
    of_operands = [NOTHING] * len(eqn.invars)
    for program, operands, results in entries:
        after = uses(program, results)
        for n, i in zip(operands, flat(program).ins, strict=True):
            of_operands[n] |= after[i]
    return of_operands
