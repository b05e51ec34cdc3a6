"""A traced program as one flat list of steps, in which every value has a number.

The program that a `jit` calls is put in the place of the call, so that an island can
extend over both. Loops, branches and other equations that hold programs stay one step.
Arguments come first and count from 0; each literal has a number of its own below 0. So
`jax.jit(lambda y: y + 1.0)(x) * 2.0` gives the steps `add (0, -1) -> 1` and
`mul (1, -2) -> 2`, in which 0 is `x`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import Literal

from optax_lossscale._programs.enter import is_placed
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.versions import (
    argument_names,
    constants,
    name_of,
    open_jaxpr,
)
from optax_lossscale._programs.walk import has_users_line, programs_in

_LONG = 100  # steps


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation, with numbers for its operands and results in the whole program."""

    # As JAX traced it; where no line of the user's made it, with that of the `jit` call
    eqn: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    names: Any  # the scopes around it, by which profiles name it

    @property
    def name(self) -> str:
        """The name of its operation in JAX."""
        return name_of(self.eqn)

    @property
    def reads(self) -> set[int]:
        """The numbers of its operands, without literals."""
        return {i for i in self.ins if i >= 0}

    def at_its_line(self) -> Any:
        """A context in which errors, `debug_nans` and profiles show the step's line."""
        names = source_info_util.current_name_stack() + self.names
        return source_info_util.user_context(
            self.eqn.source_info.traceback, name_stack=names
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TypedStep(Step):
    """A step with its dtypes, as `plan` decides on them."""

    # The dtype to which each operand is cast; None where it is read as it is stored
    takes: Sequence[Any]
    gives: Sequence[Any]  # the dtypes to which its results are cast at once
    plans: Sequence[Any]  # for the programs that it holds, if products are in them


class Flat(NamedTuple):
    """A program as a flat list of steps; an *aval* is a value's shape and dtype."""

    steps: list[Step]
    ins: list[int]  # the numbers of the arguments
    outs: list[int]  # the numbers of the results
    consts: dict[int, Any]  # the arrays that the program closes over, by number
    literals: dict[int, Literal]  # by number, which is negative
    types: dict[int, Any]  # the aval of each value, as it was traced, by number
    names: Sequence[str]  # of the arguments, in the user's code; empty if unknown


@remembered
def flat(jaxpr: Any) -> Flat:
    """Flattens a program; a `jit` that is long, or has shardings, stays one step."""
    program = Flat([], [], [], {}, {}, {}, argument_names(jaxpr))
    program.ins.extend(_new(program, v) for v in open_jaxpr(jaxpr).invars)
    names = source_info_util.new_name_stack()
    program.outs.extend(_add(program, jaxpr, program.ins, names, None))
    return program


def _add(
    program: Flat, jaxpr: Any, operands: Sequence[int], scope: Any, caller: Any
) -> tuple[int, ...]:
    """Adds the steps of a jaxpr to a program, and returns the numbers of its results.

    Args:
      program: the program, which is changed in place.
      jaxpr: the program itself, or one that a `jit` in it calls.
      operands: the numbers of the jaxpr's arguments.
      scope: the stack of names around it.
      caller: the traceback of that `jit`; None for the program itself.
    """
    numbers = dict(zip(open_jaxpr(jaxpr).invars, operands, strict=True))
    for v, x in zip(open_jaxpr(jaxpr).constvars, constants(jaxpr), strict=True):
        numbers[v] = _new(program, v)
        program.consts[numbers[v]] = x

    def read(variables):
        """The numbers of variables, with a new one for each literal among them."""
        return tuple(
            _new(program, v) if isinstance(v, Literal) else numbers[v]
            for v in variables
        )

    for eqn in open_jaxpr(jaxpr).eqns:
        eqn = _at_users_line(eqn, caller)
        names = scope + eqn.source_info.name_stack
        operands = read(eqn.invars)
        inner = _inlined(eqn)
        if inner is None:
            results = tuple(_new(program, v) for v in eqn.outvars)
            program.steps.append(Step(eqn, operands, results, names))
        else:
            if "name" in eqn.params:
                names = names.extend(f"jit({eqn.params['name']})")
            results = _add(program, inner, operands, names, eqn.source_info.traceback)
        numbers.update(zip(eqn.outvars, results, strict=True))
    return read(open_jaxpr(jaxpr).outvars)


def _new(program: Flat, v: Any) -> int:
    """Adds a value to a program, and returns its number, below 0 for a literal."""
    if isinstance(v, Literal):
        number = -1 - len(program.literals)
        program.literals[number] = v
    else:
        number = len(program.types) - len(program.literals)
    program.types[number] = v.aval
    return number


def _inlined(eqn: Any) -> Any:
    """The program to put in the place of an equation that only calls it; else None.

    There its steps can share islands with those around. But a function that calls
    another twice, which calls a third twice, and so on, would double in length at each
    level. So a long program stays a call.
    """
    if Is.INLINED not in traits(eqn) or is_placed(eqn):
        return None
    (program,) = programs_in(eqn)
    return program if _length(program) <= _LONG else None


@remembered
def _length(program: Any) -> int:
    """How many steps a program has once it is flat."""
    inlined = map(_inlined, open_jaxpr(program).eqns)
    return sum(1 if inner is None else _length(inner) for inner in inlined)


def _at_users_line(eqn: Any, caller: Any) -> Any:
    """The equation with `caller` as its traceback, if no line of the user's made it."""
    if caller is None or has_users_line(eqn):
        return eqn
    return eqn.replace(source_info=eqn.source_info.replace(traceback=caller))
