"""The equations of a program, those of the programs that it runs included."""

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import dtype_in, is_inexact, is_narrow_dtype
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import programs_in


@cached_by_program
def equations(program: Jaxpr | ClosedJaxpr) -> tuple[JaxprEqn, ...]:
    """All equations of a program, each once, before those in the programs it holds."""
    found: dict[JaxprEqn, None] = {}
    for eqn in open_jaxpr(program).eqns:
        found[eqn] = None
        for inner in programs_in(eqn):
            found.update(dict.fromkeys(equations(inner)))
    return tuple(found)


def keeps_numbers(eqn: JaxprEqn) -> bool:
    """Whether the result only moves, repeats or widens numbers of its one operand."""
    if len(eqn.invars) != 1:
        return False
    if Trait.CASTS not in traits(eqn):
        return bool(traits(eqn) & (Trait.MOVES | Trait.PLACES | Trait.SPREADS))
    (result,) = eqn.outvars
    is_widened = is_inexact(result) and not is_narrow_dtype(dtype_in(result))
    return is_widened and is_narrow_dtype(dtype_in(eqn.invars[0]))
