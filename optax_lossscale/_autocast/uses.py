"""The second pass: what is done with each value after it is made.

The pass goes backward, from the results of a program to its arguments. It asks two
questions of a value: does any product depend on it, and is it read once more after a
product has been computed from it? In `y = x + tanh(x @ w)`, both are true of `x`: the
product multiplies it, and the sum reads it past the product, so it has to be stored
until then. Neither is true of the result of `x @ w`, if `y` is not multiplied later.

To tell what is past a product, each value has a depth: the length of the longest chain
before it of narrowed products, and of equations that hold them. An equation that is no
product and holds no programs reads an operand past a product if its result is deeper
than that operand.
"""

import enum
from collections.abc import Mapping
from typing import Any

from jax.extend.core import JaxprEqn, Var

from optax_lossscale._autocast.products import (
    is_narrowed,
    is_rewritten,
    may_be_rewritten,
)
from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.flat import Flat, flat
from optax_lossscale._programs.operations import RUNS_AS_STORED, Trait, traits
from optax_lossscale._programs.values import Atom, size_of, variables
from optax_lossscale._programs.walk import carried_by, first_inside, result_programs
from optax_lossscale._programs.work import is_cheap


class Use(enum.Flag):
    """What is done with a value; both may be true of it."""

    MULTIPLIED = enum.auto()
    """A product depends on it, directly or through other values."""
    PAST = enum.auto()
    """It is read past a product, or given a name: so it has to be stored."""


NOTHING = Use(0)
BOTH = Use.MULTIPLIED | Use.PAST
"""The use of a value that has to be stored, and on which a product depends."""

Uses = tuple[Use, ...]
"""What is done with each of several values."""


@cached_by_program
def uses(jaxpr: Any, results: Uses) -> Mapping[Var, Use]:
    """What is done with each value, given what is done with the results."""
    program = flat(jaxpr)
    depth = depths(program)
    after = dict.fromkeys(depth, NOTHING)
    for v, use in zip(program.outs, results, strict=True):
        if isinstance(v, Var):
            after[v] |= use
    for eqn in reversed(program.eqns):
        if Trait.NAMES in traits(eqn):
            after[eqn.outvars[0]] |= Use.PAST
        if is_narrowed(eqn):
            of_operands = [Use.MULTIPLIED] * 2  # a third has the sizes of groups
        elif may_be_rewritten(eqn):
            of_results = tuple(after[v] for v in eqn.outvars)
            of_operands = uses_inside(eqn, results_inside(eqn, of_results))
        else:
            of_operands = [_use_of_operand(eqn, v, depth, after) for v in eqn.invars]
        for v, use in zip(eqn.invars, of_operands, strict=False):
            if isinstance(v, Var):
                after[v] |= use
    return after


def _use_of_operand(
    eqn: JaxprEqn, v: Atom, depth: Mapping[Var, int], after: Mapping[Var, Use]
) -> Use:
    """What an equation, neither a product nor to be rewritten, does with an operand.

    Args:
      eqn: the equation.
      v: the operand.
      depth: the depth of each value.
      after: what is done with each value after the equation.
    """
    may_be_repeated = is_cheap(eqn) or traits(eqn) & RUNS_AS_STORED
    use = NOTHING
    for result in eqn.outvars:
        if isinstance(v, Var) and depth[result] > depth[v]:
            use |= Use.PAST
        # Where the result is read past a product, the equation may be repeated, which
        # then reads the operand there. An operand larger than the result, as that of a
        # reduction, is not kept for that: the result is.
        is_larger = size_of(v.aval) > size_of(result.aval)
        is_read_again = may_be_repeated and not is_larger
        use |= after[result] & (BOTH if is_read_again else Use.MULTIPLIED)
    return use


def depths(program: Flat) -> Mapping[Var, int]:
    """The depth of each value; that of an argument is 0."""
    depth: dict[Var, int] = dict.fromkeys((*program.ins, *program.consts), 0)
    for eqn in program.eqns:
        before = max((depth[v] for v in variables(eqn.invars)), default=0)
        adds_one = is_narrowed(eqn) or is_rewritten(eqn)
        depth |= dict.fromkeys(eqn.outvars, before + adds_one)
    return depth


def results_inside(eqn: JaxprEqn, results: Uses) -> Uses:
    """What is done with the results of the programs in an equation.

    That is what is done with the results of the equation. What a round of a loop gives
    as carry is also used by the next round, which counts only if a product depends on
    the carry after the loop. Else each round rounds what it takes, and not what it
    gives, so that the last result is not rounded.
    """
    inside = list(results)
    earlier: list[Use] = []
    while inside != earlier:
        earlier = list(inside)
        of_operands = uses_inside(eqn, tuple(inside))
        for j, n in enumerate(carried_by(eqn)):
            if Use.MULTIPLIED in results[j]:
                inside[j] |= of_operands[n]
    return tuple(inside)


def uses_inside(eqn: JaxprEqn, results: Uses) -> list[Use]:
    """What the programs in an equation do with the equation's operands.

    The condition of a `while` is left out, as it follows from integers.

    Args:
      eqn: the equation.
      results: what is done with the results of its programs: see `results_inside`.
    """
    of_operands = [NOTHING] * len(eqn.invars)
    for program in result_programs(eqn):
        after = uses(program, results)
        for n, v in enumerate(flat(program).ins, start=first_inside(eqn)):
            of_operands[n] |= after[v]
    return of_operands
