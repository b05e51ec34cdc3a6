"""A traced program as a flat list of steps, with what `jit` compiles put in its place."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import Literal

from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.run import is_placed
from optax_lossscale._programs.versions import constants, open_jaxpr
from optax_lossscale._programs.walk import programs_in


class Instruction(NamedTuple):
    """An equation, whose operands and results are numbered over the whole program.

    Attributes:
      eqn: as JAX traced it.
      ins: the number of each operand, or a `Literal`.
      outs: the number of each result.
      names: the scopes around it, by which profiles name it.
    """

    eqn: Any
    ins: tuple[int | Literal, ...]
    outs: tuple[int, ...]
    names: Any

    @property
    def name(self) -> str:
        """What JAX calls its operation."""
        return self.eqn.primitive.name

    @property
    def reads(self) -> set[int]:
        """The numbers of what it takes."""
        return {i for i in self.ins if not isinstance(i, Literal)}

    def at_its_line(self) -> Any:
        """A context in which errors, `debug_nans` and profiles point at the line that made it."""
        names = source_info_util.current_name_stack() + self.names
        return source_info_util.user_context(self.eqn.source_info.traceback, name_stack=names)


class Flat(NamedTuple):
    """A program as a flat list of steps.

    Attributes:
      steps: in order.
      ins: the numbers of the arguments.
      outs: the numbers of the results, or `Literal`s.
      consts: what the program closes over, under its numbers.
      types: the type of each value, as it was traced.
    """

    steps: list[Instruction]
    ins: list[int]
    outs: list[int | Literal]
    consts: dict[int, Any]
    types: dict[int, Any]

    def readers(self) -> dict[int, list[Instruction | None]]:
        """The steps that take each value; None for the results."""
        found: dict[int, list[Instruction | None]] = {}
        for step in self.steps:
            for i in step.reads:
                found.setdefault(i, []).append(step)
        for i in self.outs:
            if not isinstance(i, Literal):
                found.setdefault(i, []).append(None)
        return found


def flat(jaxpr: Any) -> Flat:
    """The steps of a program; a `jit` that was told where to have its arrays stays one."""
    number = itertools.count()
    steps: list[Instruction] = []
    consts: dict[int, Any] = {}
    ins = [next(number) for _ in open_jaxpr(jaxpr).invars]
    outs = _add(jaxpr, ins, source_info_util.new_name_stack(), steps, consts, number.__next__)
    types = dict(zip(ins, (v.aval for v in open_jaxpr(jaxpr).invars), strict=True))
    types |= {i: jax.typeof(x) for i, x in consts.items()}
    for step in steps:
        types.update(zip(step.outs, (v.aval for v in step.eqn.outvars), strict=True))
    return Flat(steps, ins, outs, consts, types)


def _add(
    jaxpr: Any,
    ins: Sequence[int | Literal],
    names: Any,
    steps: list[Instruction],
    consts: dict[int, Any],
    new: Callable[[], int],
) -> list[int | Literal]:
    """Adds the steps of a jaxpr, and returns the numbers of its results."""
    held, jaxpr = constants(jaxpr), open_jaxpr(jaxpr)
    numbers: dict[Any, int | Literal] = dict(zip(jaxpr.invars, ins, strict=True))
    for v, x in zip(jaxpr.constvars, held, strict=True):
        consts[new_number := new()] = x
        numbers[v] = new_number
    read = lambda v: v if isinstance(v, Literal) else numbers[v]
    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        scope = names + eqn.source_info.name_stack
        if Is.INLINED in traits_of(eqn.primitive.name) and not is_placed(eqn):
            (inner,) = programs_in(eqn)
            if "name" in eqn.params:
                scope = scope.extend(f"jit({eqn.params['name']})")
            outs = _add(inner, operands, scope, steps, consts, new)
        else:
            outs = [new() for _ in eqn.outvars]
            steps.append(Instruction(eqn, tuple(operands), tuple(outs), scope))
        numbers.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))
