"""What is cheap: an equation that is no slower to compute than its results to read."""

from typing import Any

from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._programs.walk import programs_in
from optax_lossscale._programs.work import is_product


def is_cheap(eqn: Any) -> bool:
    """Whether a compiler fuses an equation into those that read its results.

    A call that only runs a program, as a `jit` does, is cheap if all equations in that
    are. One with effects is not cheap, as it must not be repeated.
    """
    if eqn.effects or is_product(eqn) or Is.CHEAP not in traits(eqn):
        return False
    return all(map(_are_all_cheap, programs_in(eqn)))


@remembered
def _are_all_cheap(program: Any) -> bool:
    return all(map(is_cheap, open_jaxpr(program).eqns))
