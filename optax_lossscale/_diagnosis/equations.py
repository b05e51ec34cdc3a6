"""All equations of a program, inner programs included, each with its line and dtypes.

`equations(jaxpr)` gives an `Equation` for each, which says how often it runs and which
line of the user's code made it.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.lines import line_of
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import dtype_in, is_inexact, is_narrow_dtype
from optax_lossscale._programs.versions import (
    is_program,
    mapped_axes,
    name_of,
    open_jaxpr,
    params_of,
)
from optax_lossscale._programs.walk import programs_in


class Equation(NamedTuple):
    """An equation, with what follows from its places in the program."""

    eqn: JaxprEqn
    # The user's line that made it, or that runs its program, as `model.py:12 (f)`
    source: str
    # The dtypes of its operands before they were widened, if that was in its own program
    # or one that calls it: float16 for what a `convert_element_type` made float32
    unwidened: tuple[np.dtype, ...]
    count: int = 1  # in how many places it is
    # How often it runs in all of them, where each branch of a `cond` counts, and the
    # body of a `while` counts once
    runs: int = 1

    @property
    def name(self) -> str:
        """The name of its operation in JAX."""
        return name_of(self.eqn)


@cached_by_program
def equations(
    jaxpr: Jaxpr, line: str = "", before: tuple[np.dtype, ...] = ()
) -> tuple[Equation, ...]:
    """All equations of an open jaxpr, each before those in the programs it holds.

    An equation of a program that runs in several places is there once for each line
    that runs it.

    Args:
      jaxpr: the program.
      line: the user's line that runs it; "" for the whole program.
      before: the dtypes of its arguments before they were widened, if a call tells.
    """
    # By the `id` of a variable
    unwidened = dict(zip(map(id, jaxpr.invars), before, strict=False))
    collected = []
    for eqn in jaxpr.eqns:
        operands = tuple(unwidened.get(id(v), dtype_in(v)) for v in eqn.invars)
        if keeps_numbers(eqn):
            unwidened.update((id(v), operands[0]) for v in eqn.outvars)
        own = Equation(eqn, line_of(eqn, line), operands)
        collected += [own, *_inside(own)]
    return _counted(collected)


def _inside(equation: Equation) -> Iterator[Equation]:
    """Those in the programs that an equation holds."""
    before = equation.unwidened if Trait.CALLS in traits(equation.eqn) else ()
    times = _times(equation.eqn)
    for program in programs_in(equation.eqn):
        for inner in equations(open_jaxpr(program), equation.source, before):
            yield inner._replace(runs=inner.runs * times)


def _counted(equations_: Iterable[Equation]) -> tuple[Equation, ...]:
    """Each equation once for each line, with its counts in all places added up."""
    counted: dict[tuple[int, str], Equation] = {}
    for equation in equations_:
        place = (id(equation.eqn), equation.source)
        if place in counted:
            earlier = counted[place]
            count = earlier.count + equation.count
            equation = equation._replace(count=count, runs=earlier.runs + equation.runs)
        counted[place] = equation
    return tuple(counted.values())


def keeps_numbers(eqn: JaxprEqn) -> bool:
    """Whether the result only moves, repeats or widens numbers of its one operand."""
    kind = traits(eqn)
    if len(eqn.invars) != 1:
        return False
    if Trait.CASTS not in kind:
        return bool(kind & (Trait.MOVES | Trait.PLACES | Trait.SPREADS))
    (result,) = eqn.outvars
    is_widened = is_inexact(result) and not is_narrow_dtype(dtype_in(result))
    return is_widened and is_narrow_dtype(dtype_in(eqn.invars[0]))


@cached_by_program
def dtypes_within(program: Jaxpr | ClosedJaxpr) -> frozenset[np.dtype]:
    """The dtypes of its results, and of all that its equations read or give."""
    jaxpr = open_jaxpr(program)
    return frozenset(map(dtype_in, jaxpr.outvars)).union(*map(dtypes_of, jaxpr.eqns))


def dtypes_of(eqn: JaxprEqn) -> frozenset[np.dtype]:
    """The dtypes of what an equation reads and gives, and those in its programs.

    The latter include programs that it holds but never runs.
    """
    own = frozenset(map(dtype_in, (*eqn.invars, *eqn.outvars)))
    leaves = jax.tree.leaves(list(params_of(eqn).values()))
    return own.union(*map(dtypes_within, filter(is_program, leaves)))


def _times(eqn: JaxprEqn) -> int:
    """How often an equation runs the programs that it holds."""
    if Trait.SCANS in traits(eqn):
        return eqn.params["length"]
    if Trait.MAPS in traits(eqn):
        mesh = eqn.params["mesh"]
        return math.prod(mesh.shape[axis] for axis in mapped_axes(eqn))
    return 1
