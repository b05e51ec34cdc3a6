"""A traced program as a flat list of steps, with what `jit` compiles put in its place."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import Literal

from optax_lossscale._programs.enter import is_placed
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.versions import (
    argument_names,
    constants,
    open_jaxpr,
)
from optax_lossscale._programs.walk import has_users_line, programs_in

_LONG = 100  # steps


class Step(NamedTuple):
    """An equation, whose operands and results are numbered over the whole program."""

    # As JAX traced it, but for its line: that of the call around, if it is JAX's own
    eqn: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    names: Any  # the scopes around it, by which profiles name it
    # Once it is planned:
    # the dtype to which each operand is cast, or None for as it comes
    takes: Sequence[Any] = ()
    gives: Sequence[Any] = ()  # the dtypes to which its results are rounded at once
    kinds: Sequence[Any] = ()  # those of its operands, if it holds products
    uses: Sequence[Any] = ()  # what is done with its results, likewise
    plans: Sequence[Any] = ()  # for the programs that it holds, likewise

    @property
    def name(self) -> str:
        """What JAX calls its operation."""
        return self.eqn.primitive.name

    @property
    def reads(self) -> set[int]:
        """The numbers of its operands, without literals."""
        return {i for i in self.ins if i >= 0}

    def at_its_line(self) -> Any:
        """A context in which errors, `debug_nans` and profiles point at the line that made it."""
        names = source_info_util.current_name_stack() + self.names
        return source_info_util.user_context(
            self.eqn.source_info.traceback, name_stack=names
        )


class Flat(NamedTuple):
    """A program as a flat list of steps."""

    steps: list[Step]
    ins: list[int]  # the numbers of the arguments
    outs: list[int]  # the numbers of the results
    consts: dict[int, Any]  # what the program closes over, under its numbers
    literals: dict[int, Literal]  # the literals in the program, under negative numbers
    types: dict[int, Any]  # the type of each value, as it was traced
    names: Sequence[str]  # what the user's code calls the arguments, if it is known


@remembered
def flat(jaxpr: Any) -> Flat:
    """The steps of a program; a `jit` that is placed, or long and repeated, stays one step."""
    called = _called(jaxpr)
    program = Flat([], [], [], {}, {}, {}, argument_names(jaxpr))

    def add(jaxpr, operands, scope, caller):
        """Adds the steps of a jaxpr, and returns the numbers of its results."""
        numbers = dict(zip(open_jaxpr(jaxpr).invars, operands, strict=True))
        for v, x in zip(open_jaxpr(jaxpr).constvars, constants(jaxpr), strict=True):
            numbers[v] = _new(program, jax.typeof(x))
            program.consts[numbers[v]] = x
        for eqn in open_jaxpr(jaxpr).eqns:
            read = _numbers(program, numbers, eqn.invars)
            results = add_one(_at_users_line(eqn, caller), read, scope)
            numbers.update(zip(eqn.outvars, results, strict=True))
        return _numbers(program, numbers, open_jaxpr(jaxpr).outvars)

    def add_one(eqn, operands, scope):
        """Adds the steps of an equation, and returns the numbers of its results."""
        scope += eqn.source_info.name_stack
        inner = _inlined(eqn)
        if inner is None or id(inner) in called:
            results = tuple(_new(program, v.aval) for v in eqn.outvars)
            program.steps.append(Step(eqn, operands, results, scope))
            return results
        if "name" in eqn.params:
            scope = scope.extend(f"jit({eqn.params['name']})")
        return add(inner, operands, scope, eqn.source_info.traceback)

    program.ins.extend(_new(program, v.aval) for v in open_jaxpr(jaxpr).invars)
    program.outs.extend(
        add(jaxpr, program.ins, source_info_util.new_name_stack(), None)
    )
    return program


def _new(program: Flat, aval: Any) -> int:
    """Notes the type of a new value, and returns its number."""
    number = len(program.types) - len(program.literals)
    program.types[number] = aval
    return number


def _numbers(
    program: Flat, numbered: Mapping[Any, int], variables: Any
) -> tuple[int, ...]:
    """The numbers of variables; each literal among them gets one of its own, below 0."""
    numbers = []
    for v in variables:
        if isinstance(v, Literal):
            number = -1 - len(program.literals)
            program.literals[number] = v
            program.types[number] = v.aval
        else:
            number = numbered[v]
        numbers.append(number)
    return tuple(numbers)


def _inlined(eqn: Any) -> Any:
    """The program that an equation is no more than a call of; None for any other equation."""
    if Is.INLINED not in traits(eqn) or is_placed(eqn):
        return None
    (program,) = programs_in(eqn)
    return program


def _called(jaxpr: Any) -> set[int]:
    """The programs, by `id`, that stay calls: long ones that are called more than once."""
    # In the place of its call, a program can share islands with what is around it. But
    # a function that calls another twice, which calls another twice, and so on, would
    # double at each of them.
    calls = collections.Counter[int]()
    long: set[int] = set()
    unread = [jaxpr]
    while unread:
        for program in filter(None, map(_inlined, open_jaxpr(unread.pop()).eqns)):
            calls[id(program)] += 1
            if calls[id(program)] == 1:
                unread.append(program)
            elif _length(program) > _LONG:
                long.add(id(program))
    return long


@remembered
def _length(program: Any) -> int:
    """How many steps a program has with all that it calls in place."""
    inlined = map(_inlined, open_jaxpr(program).eqns)
    return sum(1 if inner is None else _length(inner) for inner in inlined)


def _at_users_line(eqn: Any, caller: Any) -> Any:
    """An equation at a line of the user's: at that of the call around, if it is JAX's own."""
    if caller is None or has_users_line(eqn):
        return eqn
    return eqn.replace(source_info=eqn.source_info.replace(traceback=caller))
