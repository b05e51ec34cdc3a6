"""The second pass: how each value is used after it has been computed.

This is a liveness analysis: it walks the program backward, from the results to the
arguments, and answers two questions about a value. Does any later product depend on it?
And is it *live across* a product, that is, still read after that product? In
`y = x + tanh(x @ w)`, both are true of `x`: the product depends on `x`, and the sum
reads `x` after the product, so `x` has to be stored until then. Neither is true of the
result of `x @ w` if no later product depends on `y`.

To find the reads across a product, the pass gives each value a *depth*: the number of
narrowed products and rewritten equations in the longest chain that leads to the value.
An equation reads an operand across a product if its result is deeper than that operand.
Two kinds of equations are exceptions: a narrowed product, whose result is always deeper
than its operands, and an equation that may be rewritten, which reads what the programs
in it read.
"""

import enum
from collections.abc import Mapping

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
from optax_lossscale._programs.versions import AnyJaxpr
from optax_lossscale._programs.walk import (
    carry_positions,
    first_inner_operand,
    result_programs,
)
from optax_lossscale._programs.work import is_cheap


class Use(enum.Flag):
    """How a value is used later; both flags may be set.

    Attributes:
      FEEDS_PRODUCT: a later product depends on the value, directly or through other
        values.
      LIVE_ACROSS: the value is read after a later product, or `checkpoint_name` names
        it, so it must be stored.
    """

    FEEDS_PRODUCT = enum.auto()
    LIVE_ACROSS = enum.auto()


NEITHER = Use(0)
BOTH = Use.FEEDS_PRODUCT | Use.LIVE_ACROSS

Uses = tuple[Use, ...]
"""The uses of several values, in order."""


@cached_by_program
def uses(jaxpr: AnyJaxpr, result_uses: Uses) -> Mapping[Var, Use]:
    """Returns the use of each value, given the uses of the program's results."""
    program = flat(jaxpr)
    depth = depths(program)
    use_of = dict.fromkeys(depth, NEITHER)
    for v, use in zip(program.outs, result_uses, strict=True):
        if isinstance(v, Var):
            use_of[v] |= use
    for eqn in reversed(program.eqns):
        if Trait.NAMES in traits(eqn):
            use_of[eqn.outvars[0]] |= Use.LIVE_ACROSS
        if is_narrowed(eqn):
            # A third operand holds the sizes of groups, which are integers.
            n_others = len(eqn.invars) - 2
            operand_uses = [Use.FEEDS_PRODUCT] * 2 + [NEITHER] * n_others
        elif may_be_rewritten(eqn):
            outer_uses = tuple(use_of[v] for v in eqn.outvars)
            inner_uses = result_uses_inside(eqn, outer_uses)
            operand_uses = operand_uses_inside(eqn, inner_uses)
        else:
            operand_uses = [_use_of_operand(eqn, v, depth, use_of) for v in eqn.invars]
        for v, use in zip(eqn.invars, operand_uses, strict=True):
            if isinstance(v, Var):
                use_of[v] |= use
    return use_of


def _use_of_operand(
    eqn: JaxprEqn,
    operand: Atom,
    depth: Mapping[Var, int],
    later_uses: Mapping[Var, Use],
) -> Use:
    """Returns how an ordinary equation uses an operand.

    An ordinary equation is not a narrowed product and may not be rewritten.

    Args:
      eqn: the equation.
      operand: one of its operands.
      depth: the depth of each value.
      later_uses: the uses of each value after the equation.
    """
    may_be_repeated = is_cheap(eqn) or traits(eqn) & RUNS_AS_STORED
    use = NEITHER
    for result in eqn.outvars:
        if isinstance(operand, Var) and depth[result] > depth[operand]:
            use |= Use.LIVE_ACROSS
        # If the result is live across a product, the equation may be repeated after
        # that product, and its operand is then live across the product, too. But if the
        # operand is larger than the result, as in a reduction, the result is stored
        # instead.
        is_larger = size_of(operand.aval) > size_of(result.aval)
        if may_be_repeated and not is_larger:
            use |= later_uses[result]
        else:
            use |= later_uses[result] & Use.FEEDS_PRODUCT
    return use


def depths(program: Flat) -> Mapping[Var, int]:
    """Returns the depth of each value; arguments and constants have the depth 0."""
    inputs = [*program.ins, *program.consts]
    depth = dict.fromkeys(inputs, 0)
    for eqn in program.eqns:
        operand_depths = [depth[v] for v in variables(eqn.invars)]
        result_depth = max(operand_depths, default=0)
        if is_narrowed(eqn) or is_rewritten(eqn):
            result_depth += 1
        depth.update(dict.fromkeys(eqn.outvars, result_depth))
    return depth


def result_uses_inside(eqn: JaxprEqn, outer_uses: Uses) -> Uses:
    """Returns how the results of the programs in an equation are used.

    All results are used as the equation's own results are, whose uses are the
    `outer_uses`. The carry of a loop is also used by the next iteration, but that
    counts only if a product after the loop depends on the carry. If none does, each
    iteration reads the carry in 16 bits but returns it in float32, so that the final
    carry is not rounded.
    """
    inner_uses = list(outer_uses)
    earlier = []
    while inner_uses != earlier:
        earlier = list(inner_uses)
        operand_uses = operand_uses_inside(eqn, tuple(inner_uses))
        for i, n in enumerate(carry_positions(eqn)):
            if Use.FEEDS_PRODUCT in outer_uses[i]:
                inner_uses[i] |= operand_uses[n]
    return tuple(inner_uses)


def operand_uses_inside(eqn: JaxprEqn, result_uses: Uses) -> list[Use]:
    """Returns how the programs in an equation use the equation's operands.

    `result_uses` has the uses of the programs' results, as `result_uses_inside` returns
    them. The condition of a `while` is not counted, because it depends on integers and
    booleans alone.
    """
    operand_uses = [NEITHER] * len(eqn.invars)
    for program in result_programs(eqn):
        use_of = uses(program, result_uses)
        arguments = flat(program).ins
        for n, v in enumerate(arguments, start=first_inner_operand(eqn)):
            operand_uses[n] |= use_of[v]
    return operand_uses
