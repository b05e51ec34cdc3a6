"""The second pass: on which values a product depends, found backward as kinds are forward.

A sum with the result of a product is rounded to 16 bits where it is made, if another
product depends on it. One that only a loss depends on keeps its digits.
"""

from collections.abc import Sequence
from typing import Any

from optax_lossscale._autocast.flat import flat
from optax_lossscale._autocast.products import is_narrowed, is_rewritten
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.walk import arguments_of

Flags = tuple[bool, ...]


@remembered
def multiplied(jaxpr: Any, results: Flags) -> frozenset[int]:
    """The values on which a product depends, by their numbers in `flat`.

    Args:
      jaxpr: the program.
      results: whether a product outside depends on each of its results.
    """
    program = flat(jaxpr)
    pairs = zip(program.outs, results, strict=True)
    found = {i for i, is_multiplied in pairs if is_multiplied}
    for step in reversed(program.steps):
        if is_narrowed(step.eqn):
            found.update(step.ins[:2])
        elif is_rewritten(step.eqn):
            of_results = tuple(i in found for i in step.outs)
            for inner, operands, flags in entered(step.eqn, of_results):
                after = multiplied(inner, flags)
                pairs = zip(operands, flat(inner).ins, strict=True)
                found.update(step.ins[n] for n, i in pairs if i in after)
        elif not found.isdisjoint(step.outs):
            found.update(step.ins)
    return frozenset(found)


def entered(eqn: Any, results: Flags) -> list[tuple[Any, Sequence[int], Flags]]:
    """The programs in an equation, with the numbers of their operands, and `results` of each."""
    programs = [(*given, results) for given in arguments_of(eqn)]
    if Is.WAITS in traits(eqn):
        condition, operands, _ = programs[0]
        programs[0] = (condition, operands, (False,))
    return programs
