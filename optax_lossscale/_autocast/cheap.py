"""What is cheap: an equation that islands may hold, repeat and recompute."""

from typing import Any

from jax.extend.core import JaxprEqn

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import programs_in
from optax_lossscale._programs.work import is_product


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation takes so little time that it may be computed more than once.

    Its operation has to be `CHEAP`. A product is not cheap, and neither is an equation
    with effects, which has to run once. For an equation that holds programs, all
    equations in the programs have to be cheap.
    """
    if eqn.effects or is_product(eqn) or Trait.CHEAP not in traits(eqn):
        return False
    return all(map(_are_all_cheap, programs_in(eqn)))


@cached_by_program
def _are_all_cheap(program: Any) -> bool:
    return all(map(is_cheap, open_jaxpr(program).eqns))
