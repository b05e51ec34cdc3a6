"""A traced program without its short calls: a call's equations take its place.

`all_flat` leaves no call. Loops, branches and the like stay one equation.
`jax.jit(lambda y: y + 1.0)(x) * 2.0` becomes an `add` and a `mul`. No variable of the
result is assigned twice, even if a program is called twice.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.lines import users_line
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import shape_in
from optax_lossscale._programs.versions import argument_names, constants, open_jaxpr
from optax_lossscale._programs.walk import has_shardings, programs_in

_LONG = 100  # a program of more equations stays a call


class Flat(NamedTuple):
    """A program without its short calls, or without any."""

    # Where no line of the user's made an equation, it has that of the `jit` call
    eqns: list[JaxprEqn]
    ins: list[Var]  # the arguments
    outs: list[Any]  # the results: variables, and literals of one number
    consts: dict[Var, Any]  # the arrays that the program closes over
    names: Sequence[str]  # of the arguments, in the user's code; empty if unknown


@cached_by_program
def flat(program: Any) -> Flat:
    """Flattens a program as far as `autocast` can use it.

    A `jit` stays an equation if it is long or has shardings, and so do checkpoints and
    functions with custom derivatives.
    """
    return _flattened(program, _short_jit)


@cached_by_program
def all_flat(program: Any) -> Flat:
    """Flattens a program so that no call is left, not even checkpoints and the like."""
    return _flattened(program, _called)


def _flattened(program: Any, program_to_inline: Callable[[JaxprEqn], Any]) -> Flat:
    """Flattens a program.

    `program_to_inline` gives the program that replaces an equation; None for one that
    stays.
    """
    eqns: list[JaxprEqn] = []
    consts: dict[Var, Any] = {}

    def inline(program, operands, call):
        """Adds the equations of a program; returns what stands for its results."""
        jaxpr = open_jaxpr(program)
        consts.update(zip(jaxpr.constvars, constants(program), strict=True))
        stands_for = dict(zip(jaxpr.invars, operands, strict=True))

        def read(v):
            if not isinstance(v, Literal):
                return stands_for.get(v, v)
            if shape_in(v) == ():
                return v
            # With `jax_use_simplified_jaxpr_constants`, literals may be arrays.
            constant = Var(v.aval)
            consts[constant] = v.val
            return constant

        for traced in jaxpr.eqns:
            eqn = _at(call, traced).replace(invars=list(map(read, traced.invars)))
            inner = program_to_inline(eqn)
            if inner is None:
                # New variables, as the program may be called again
                results = [Var(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(outvars=results))
            else:
                results = inline(inner, eqn.invars, _call_by(eqn))
            stands_for.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    ins = open_jaxpr(program).invars
    outs = inline(program, ins, source_info_util.new_source_info())
    return Flat(eqns, ins, outs, consts, argument_names(program))


def _call_by(eqn: JaxprEqn) -> Any:
    """The source of a call, with the name of the function that it calls."""
    source = eqn.source_info
    if "name" not in eqn.params:
        return source
    name = f"jit({eqn.params['name']})"
    return source.replace(name_stack=source.name_stack.extend(name))


def _at(call: Any, eqn: JaxprEqn) -> JaxprEqn:
    """An equation in the scopes of the call, and at its line if it has none."""
    source = eqn.source_info
    source = source.replace(name_stack=call.name_stack + source.name_stack)
    if call.traceback is not None and not users_line(eqn):
        source = source.replace(traceback=call.traceback)
    return eqn.replace(source_info=source)


def _called(eqn: JaxprEqn) -> Any:
    """The program that an equation calls, as a `jit` does; None if it calls none."""
    return programs_in(eqn)[0] if Trait.CALLS in traits(eqn) else None


def _short_jit(eqn: JaxprEqn) -> Any:
    """The program of an equation that only calls it, as a `jit`, if short; else None.

    A function that calls another twice, which calls a third twice, and so on, would
    double in length at each level. So a long program stays a call.
    """
    if Trait.INLINED not in traits(eqn) or has_shardings(eqn):
        return None
    (program,) = programs_in(eqn)
    return program if _length(program) <= _LONG else None


@cached_by_program
def _length(program: Any) -> int:
    """How many equations a program has once it is flat."""
    called = map(_short_jit, open_jaxpr(program).eqns)
    return sum(1 if inner is None else _length(inner) for inner in called)
