"""A traced program as a flat list of steps, with what `jit` compiles put in its place."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import Literal

from optax_lossscale._programs.enter import is_placed
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.versions import argument_names, constants, open_jaxpr
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
    plans: Sequence[Any] = ()  # for the programs that it holds, if there are products

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
    """The steps of a program; a `jit` that is placed, or long, stays one step."""
    program = Flat([], [], [], {}, {}, {}, argument_names(jaxpr))
    program.ins.extend(_new(program, v) for v in open_jaxpr(jaxpr).invars)
    names = source_info_util.new_name_stack()
    program.outs.extend(_add(program, jaxpr, program.ins, names, None))
    return program


def _add(
    program: Flat, jaxpr: Any, operands: Sequence[int], scope: Any, caller: Any
) -> tuple[int, ...]:
    """Adds the steps of a jaxpr, and returns the numbers of its results."""
    numbers = dict(zip(open_jaxpr(jaxpr).invars, operands, strict=True))
    for v, x in zip(open_jaxpr(jaxpr).constvars, constants(jaxpr), strict=True):
        numbers[v] = _new(program, v)
        program.consts[numbers[v]] = x

    def read(variables):
        """The numbers of variables; each literal among them gets one of its own."""
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
    """Notes a new value, and returns its number; that of a literal is below 0."""
    if isinstance(v, Literal):
        number = -1 - len(program.literals)
        program.literals[number] = v
    else:
        number = len(program.types) - len(program.literals)
    program.types[number] = v.aval
    return number


def _inlined(eqn: Any) -> Any:
    """The program to put in the place of an equation that is no more than a call of it.

    In this place it can share islands with what is around. But a function that calls
    another twice, which calls another twice, and so on, would double at each of them.
    So a long one stays a call.
    """
    if Is.INLINED not in traits(eqn) or is_placed(eqn):
        return None
    (program,) = programs_in(eqn)
    return program if _length(program) <= _LONG else None


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
