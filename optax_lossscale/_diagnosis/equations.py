"""The equations of a program, and which of them return elements of an operand.

`equations(program)` returns the equations of a program and of the loops, branches and
calls in it. `keeps_numbers(eqn)` is true for a transpose, which only moves elements,
and for a cast from float16 to float32, which is exact. It is false for `x * 2`, and for
a cast to float16, which rounds. If an equation keeps all elements of its operand, its
result is as far off as the operand, so `diagnose` need not compare it again.
"""

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from optax_lossscale._diagnosis.old_operations import Trait, traits
from optax_lossscale._diagnosis.old_walk import programs_in
from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.values import dtype_in, is_inexact, is_narrow_dtype
from optax_lossscale._programs.versions import open_jaxpr


@cached_by_program
def equations(program: Jaxpr | ClosedJaxpr) -> tuple[JaxprEqn, ...]:
    """Lists the equations of a program, each followed by those of the programs it runs.

    An equation in a function that is called more than once is listed once.
    """
    eqns: dict[JaxprEqn, None] = {}  # an ordered set
    for eqn in open_jaxpr(program).eqns:
        eqns[eqn] = None
        for inner in programs_in(eqn):
            eqns.update(dict.fromkeys(equations(inner)))
    return tuple(eqns)


def is_one_to_one(eqn: JaxprEqn) -> bool:
    """Whether each result depends only on the operand in the same position.

    This is true for an `optimization_barrier` or a `psum` of several arrays, where the
    error of one array says nothing about the others.
    """
    moves_or_sends = bool(traits(eqn) & (Trait.MOVES | Trait.SENDS))
    return moves_or_sends and len(eqn.invars) == len(eqn.outvars)


def keeps_numbers(eqn: JaxprEqn) -> bool:
    """Whether each result consists of unchanged elements of one operand.

    Such an equation only moves, drops, repeats or widens elements.
    """
    if Trait.CASTS in traits(eqn):
        (operand,) = eqn.invars
        (result,) = eqn.outvars
        is_wide = is_inexact(result) and not is_narrow_dtype(dtype_in(result))
        return is_wide and is_narrow_dtype(dtype_in(operand))
    if len(eqn.invars) == 1:
        return bool(traits(eqn) & (Trait.MOVES | Trait.PLACES | Trait.SPREADS))
    return Trait.MOVES in traits(eqn) and is_one_to_one(eqn)
