"""All equations of a program, and what the results of one have of its operands."""

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import dtype_in, is_inexact, is_narrow_dtype
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import programs_in


@cached_by_program
def equations(program: Jaxpr | ClosedJaxpr) -> tuple[JaxprEqn, ...]:
    """All equations of a program, each once, and after it those of what it runs."""
    found: dict[JaxprEqn, None] = {}
    for eqn in open_jaxpr(program).eqns:
        found[eqn] = None
        for inner in programs_in(eqn):
            found.update(dict.fromkeys(equations(inner)))
    return tuple(found)


def is_one_to_one(eqn: JaxprEqn) -> bool:
    """Whether each result is made of the operand in its place, and of no other."""
    moves = traits(eqn) & (Trait.MOVES | Trait.SENDS)
    return bool(moves) and len(eqn.invars) == len(eqn.outvars)


def keeps_numbers(eqn: JaxprEqn) -> bool:
    """Whether each result only moves, drops, repeats or widens numbers of one operand."""
    if is_one_to_one(eqn) and Trait.MOVES in traits(eqn):
        return True
    if len(eqn.invars) != 1:
        return False
    if Trait.CASTS not in traits(eqn):
        return bool(traits(eqn) & (Trait.MOVES | Trait.PLACES | Trait.SPREADS))
    (result,) = eqn.outvars
    is_widened = is_inexact(result) and not is_narrow_dtype(dtype_in(result))
    return is_widened and is_narrow_dtype(dtype_in(eqn.invars[0]))
