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

_LONG = 100  # equations


class Flat(NamedTuple):
    """A program without its short calls, or without any."""

    # Where no line of the user's made an equation, it has that of the `jit` call
    eqns: list[JaxprEqn]
    ins: list[Var]  # the arguments
    outs: list[Any]  # the results: variables, and literals of one number
    consts: dict[Var, Any]  # the arrays that the program closes over
    names: Sequence[str]  # of the arguments, in the user's code; empty if unknown


class _Call(NamedTuple):
    """What the equations of a called program take over from the call."""

    scope: Any  # the stack of names around the program
    caller: Any  # the traceback of the call; None around the whole program


class _Body(NamedTuple):
    """What a program adds to the flat one where it is called."""

    eqns: list[JaxprEqn]
    outs: list[Any]
    consts: dict[Var, Any]


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


def _flattened(program: Any, inlined: Callable[[JaxprEqn], Any]) -> Flat:
    """Flattens a program.

    `inlined` gives the program that replaces an equation; None for one that stays.
    """
    ins = open_jaxpr(program).invars
    around = _Call(source_info_util.new_name_stack(), None)
    body = _body(program, ins, around, inlined)
    return Flat(body.eqns, ins, body.outs, body.consts, argument_names(program))


def _body(
    program: Any,
    operands: Sequence[Any],
    around: _Call,
    inlined: Callable[[JaxprEqn], Any],
) -> _Body:
    """The body of a program that is called with these operands."""
    jaxpr = open_jaxpr(program)
    eqns = []
    consts = dict(zip(jaxpr.constvars, constants(program), strict=True))
    of_call = dict(zip(jaxpr.invars, operands, strict=True))

    def stand_in(v):
        """What stands for a value of this program in the flat one."""
        if not isinstance(v, Literal):
            return of_call.get(v, v)
        if shape_in(v) == ():
            return v
        # With `jax_use_simplified_jaxpr_constants`, literals may be arrays.
        constant = Var(v.aval)
        consts[constant] = v.val
        return constant

    for eqn in jaxpr.eqns:
        eqn = _at(around, eqn).replace(invars=list(map(stand_in, eqn.invars)))
        called = inlined(eqn)
        if called is None:
            # New variables, as the program may be called again
            results = [Var(v.aval) for v in eqn.outvars]
            eqns.append(eqn.replace(outvars=results))
        else:
            body = _body(called, eqn.invars, _call_by(eqn), inlined)
            eqns += body.eqns
            consts |= body.consts
            results = body.outs
        of_call |= zip(eqn.outvars, results, strict=True)
    return _Body(eqns, list(map(stand_in, jaxpr.outvars)), consts)


def _call_by(eqn: JaxprEqn) -> _Call:
    """The call that an equation makes, with the name of the function that it calls."""
    names = eqn.source_info.name_stack
    if "name" in eqn.params:
        names = names.extend(f"jit({eqn.params['name']})")
    return _Call(names, eqn.source_info.traceback)


def _at(around: _Call, eqn: JaxprEqn) -> JaxprEqn:
    """An equation with the names around it, and the caller's line if it has none."""
    source = eqn.source_info
    source = source.replace(name_stack=around.scope + source.name_stack)
    if around.caller is not None and not users_line(eqn):
        source = source.replace(traceback=around.caller)
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
