"""The second pass: what is done with each value afterwards, which says how long it is needed.

It goes backward, as kinds go forward. A value that is read again once a product has
been computed from it has to be stored until then; one that is used up before is free.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._autocast.cheap import is_cheap
from optax_lossscale._autocast.classify import Kind, classify, of_arguments
from optax_lossscale._autocast.flat import Step, flat
from optax_lossscale._autocast.products import is_narrowed, is_rewritten
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.values import numbers_in
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import (
    arguments_of,
    carried_by,
    giving_results,
    programs_in,
)


class Use(enum.Flag):
    """What is done with a value; it may be several of these."""

    MULTIPLIED = enum.auto()
    """A product depends on it, directly or by way of others."""
    PAST = enum.auto()
    """It is read again past a product, or given a name: it has to be stored until then."""
    WIDELY = enum.auto()
    """An operation reads it for which rounding its operand is not the same as its result."""
    ADDED = enum.auto()
    """It is added to the result of a product."""


Kinds = Mapping[int, Kind]
Depths = Mapping[int, int]

NOTHING = Use(0)
KEPT = Use.MULTIPLIED | Use.PAST
"""What is done with what a forward pass keeps for the backward pass."""


class Context(NamedTuple):
    """What is known around a program of its arguments, and of what is done with its results."""

    kinds: tuple[Kind, ...]
    depths: tuple[int, ...]  # how many products came before each
    uses: tuple[Use, ...]


class Entry(NamedTuple):
    """A program in an equation, and what is known where it is entered."""

    program: Any
    operands: Sequence[int]  # of the equation, by number, that it is given
    context: Context


def is_stored_low(kind: Kind, use: Use) -> bool:
    """Whether a float32 value of a kind is stored in 16 bits, and rounded where it is made.

    The result of a product is in 16 bits already. A sum that only products read is
    rounded by these, and so may be before. A sum that no product depends on is never
    rounded, and one that is used up before the next product is not rounded either:
    whatever holds the programs that make it and read it, its digits are the same.

    Rows of an embedding are as a sum, where they are added to a product: without this,
    a Llama with names takes 1.07 of the memory and moves 1.05 of the bytes.
    """
    if kind == Kind.ROWS:
        return KEPT | Use.ADDED in use
    if kind == Kind.SUM:
        return Use.MULTIPLIED in use and (Use.PAST in use or Use.WIDELY not in use)
    return kind == Kind.PRODUCT


@remembered
def uses(jaxpr: Any, context: Context, low: np.dtype) -> Mapping[int, Use]:
    """What is done with each value of a program, by its number in `flat`."""
    program = flat(jaxpr)
    kinds = classify(jaxpr, context.kinds, low)
    depth = depths(jaxpr, context.depths)
    after = dict.fromkeys(program.types, NOTHING)
    for i, use in zip(program.outs, context.uses, strict=True):
        after[i] |= use
    for step in reversed(program.steps):
        of_results = [after[i] for i in step.outs]
        if is_narrowed(step.eqn):
            of_operands = [NOTHING] * len(step.ins)
            of_operands[:2] = [Use.MULTIPLIED, Use.MULTIPLIED]
        elif is_rewritten(step.eqn):
            entries = entered(step, kinds, depth, of_results, low)
            of_operands = uses_inside(step.eqn, entries, low)
        else:
            of_operands = _of_operands(step, kinds, depth, of_results)
        for i, use in zip(step.ins, of_operands, strict=True):
            after[i] |= use
    return after


def _of_operands(
    step: Step,
    kinds: Kinds,
    depths: Depths,
    results: Sequence[Use],
) -> list[Use]:
    """What an operation, neither a product nor entered, does with each of its operands."""
    its_traits = traits(step.eqn)
    after = NOTHING
    for use in results:
        after |= use
    if _commutes_with_rounding(its_traits):
        every = after & (Use.MULTIPLIED | Use.WIDELY | Use.ADDED)
    else:
        every = (after & Use.MULTIPLIED) | Use.WIDELY
    if Is.ADDS_TWO in its_traits and kinds[step.outs[0]] == Kind.SUM:
        every |= Use.ADDED
    if Is.NAMES in its_traits:
        every |= Use.PAST
    of_operands = [every] * len(step.ins)
    for n in range(len(step.ins)):
        if _is_read_past(step, n, kinds, depths, results):
            of_operands[n] |= Use.PAST
    return of_operands


def _is_read_past(
    step: Step,
    n: int,
    kinds: Kinds,
    depths: Depths,
    results: Sequence[Use],
) -> bool:
    """Whether the operand with a number is needed past a product, here or to repeat a result."""
    depth = depths[step.ins[n]]
    if any(depths[i] > depth for i in step.outs):
        return True
    size = numbers_in(step.eqn.invars[n].aval)
    for i, v, use in zip(step.outs, step.eqn.outvars, results, strict=True):
        is_repeated = Use.PAST in use and _is_repeated(step, kinds[i], use)
        if is_repeated and numbers_in(v.aval) >= size:
            return True
    return False


def _is_repeated(step: Step, kind: Kind, use: Use) -> bool:
    """Whether a result may be made once more where it is read, and not be stored itself."""
    if _commutes_with_rounding(traits(step.eqn)):
        return True
    return is_cheap(step.eqn) and not is_stored_low(kind, use)


def _commutes_with_rounding(its_traits: Is) -> bool:
    """Whether an operation on rounded operands gives the same as rounding its results."""
    if its_traits & (Is.ADDS_MANY | Is.CASTS):
        return False
    if its_traits & (Is.MOVES | Is.SENDS):
        return True
    # Sorting does not: with numbers that become equal, indices change.
    return Is.CHOOSES | Is.CHEAP in its_traits


# --- how many products came before ---


@remembered
def depths(jaxpr: Any, arguments: tuple[int, ...]) -> Depths:
    """How many products came before each value at most, counted on from the arguments."""
    program = flat(jaxpr)
    before = dict.fromkeys((*program.consts, *program.literals), 0)
    before |= zip(program.ins, arguments, strict=True)
    for step in program.steps:
        operands = [before[i] for i in step.ins]
        if is_rewritten(step.eqn):
            results = _depths_of_results(step.eqn, operands)
        else:
            deepest = max(operands, default=0) + is_narrowed(step.eqn)
            results = [deepest] * len(step.outs)
        before |= zip(step.outs, results, strict=True)
    return before


def _depths_of_results(eqn: Any, operands: Sequence[int]) -> list[int]:
    """How many products came before the results of an equation that is entered."""
    places = _places(eqn, operands)
    of_programs = []
    for program, numbers in giving_results(eqn):
        inside = depths(program, tuple(places[operands[n]] for n in numbers))
        results = [inside[i] for i in flat(program).outs]
        of_programs.append([_depth_at(place, places) for place in results])
    return list(map(max, zip(*of_programs, strict=True)))


def _places(eqn: Any, depths: Sequence[int]) -> dict[int, int]:
    """The depths of operands as the programs in an equation see them: from 0 on, and close."""
    # Whether a value comes before another is all that is asked of depths. So a gap that
    # is wider than all products in a program can bridge is as good as any other, and a
    # function that is called from many depths is read a few times.
    widest_gap = 1 + max(map(_products_in, programs_in(eqn)), default=0)
    places: dict[int, int] = {}
    place = 0
    before = None
    for depth in sorted(set(depths)):
        if before is not None:
            place += min(depth - before, widest_gap)
        places[depth] = place
        before = depth
    return places


def _depth_at(place: int, places: Mapping[int, int]) -> int:
    """The depth outside of an equation of a value inside."""
    below = [(start, depth) for depth, start in places.items() if start <= place]
    start, depth = max(below, default=(0, 0))
    return place - start + depth


@remembered
def _products_in(program: Any) -> int:
    """How many products a program has, with those in the programs that it holds."""
    return sum(
        is_narrowed(eqn) + sum(map(_products_in, programs_in(eqn)))
        for eqn in open_jaxpr(program).eqns
    )


# --- what holds programs ---


def entered(
    step: Step,
    kinds: Kinds,
    depths: Depths,
    results: Sequence[Use],
    low: np.dtype,
) -> list[Entry]:
    """What is known where a step enters the programs that it holds."""
    eqn = step.eqn
    inside = of_arguments(eqn, [kinds[i] for i in step.ins], low)
    outside = [depths[i] for i in step.ins]
    places = _places(eqn, outside)  # so that layers that are alike are read once
    carried = carried_by(eqn)
    after = list(results)
    while True:
        entries = []
        for n, (program, numbers) in enumerate(arguments_of(eqn)):
            is_condition = Is.WAITS in traits(eqn) and n == 0
            context = Context(
                tuple(inside[n] for n in numbers),
                tuple(places[outside[n]] for n in numbers),
                (Use.WIDELY,) if is_condition else tuple(after),
            )
            entries.append(Entry(program, numbers, context))
        # What a scan carries from layer to layer is read in the next one, too. But if
        # no product depends on it in the end, it is rounded there alone: the last
        # result is not.
        of_operands = uses_inside(eqn, entries, low)
        joined = list(after)
        for j, n in enumerate(carried):
            if inside[n] != Kind.FLOAT32 and Use.MULTIPLIED in results[j]:
                joined[j] |= of_operands[n]
        if joined == after:
            return entries
        after = joined


def uses_inside(eqn: Any, entries: Sequence[Entry], low: np.dtype) -> list[Use]:
    """What the programs in an equation do with each of its operands."""
    of_operands = [NOTHING] * len(eqn.invars)
    for entry in entries:
        after = uses(entry.program, entry.context, low)
        arguments = flat(entry.program).ins
        for n, i in zip(entry.operands, arguments, strict=True):
            of_operands[n] |= after[i]
    return of_operands
