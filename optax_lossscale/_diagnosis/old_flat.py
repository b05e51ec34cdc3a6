"""What `diagnose` alone still asks, until it is rewritten: see `flat` below.

A traced program with its calls inlined: the called equations replace each call.

For example, `jax.jit(lambda y: y + 1.0)(x) * 2.0` becomes an `add` and a `mul`. `flat`
inlines short `jit`s and the like, and `all_flat` inlines every call. Both keep loops
and branches as single equations. No variable of the flat program is assigned twice,
even if a program is called twice.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._diagnosis.old_operations import Trait, traits
from optax_lossscale._diagnosis.old_walk import has_shardings, programs_in
from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.lines import users_line
from optax_lossscale._programs.values import shape_in
from optax_lossscale._programs.versions import (
    AnyJaxpr,
    argument_names,
    constants,
    open_jaxpr,
)

# A program of more equations stays a call. A heuristic: the bound is far above the
# length of helpers such as `jax.nn.softmax`, which has about ten equations.
_MAX_INLINED = 100


class Flat(NamedTuple):
    """A program with its short calls, or all of its calls, inlined.

    Attributes:
      eqns: the equations, in the order in which they run.
      ins: the arguments.
      outs: the results: variables, and literals of shape ().
      consts: the arrays that the program closes over, by the variables that stand for
        them.
      names: the names of the arguments in the user's code; empty if unknown.
    """

    eqns: list[JaxprEqn]
    ins: list[Var]
    outs: list[Any]
    consts: dict[Var, Any]
    names: Sequence[str]


@cached_by_program
def flat(program: AnyJaxpr) -> Flat:
    """Inlines the short calls of a program, for `autocast`.

    Long `jit`s, `jit`s with shardings, checkpoints, and functions with custom
    derivatives stay single equations.
    """
    return _flattened(program, _short_callee)


@cached_by_program
def all_flat(program: AnyJaxpr) -> Flat:
    """Inlines every call of a program, for `diagnose`.

    For example, a function with a custom derivative is replaced by the equations of the
    function itself, and a checkpoint by the equations in it.
    """
    return _flattened(program, _callee)


def _flattened(
    program: AnyJaxpr, callee_to_inline: Callable[[JaxprEqn], AnyJaxpr | None]
) -> Flat:
    """Inlines the calls in a program.

    Args:
      program: the program.
      callee_to_inline: returns the program that replaces an equation, or None if the
        equation stays as it is.
    """
    eqns: list[JaxprEqn] = []
    consts: dict[Var, Any] = {}

    def inline(program, args, call_source):
        """Adds the equations of a program; returns its results in the flat program."""
        jaxpr = open_jaxpr(program)
        consts.update(zip(jaxpr.constvars, constants(program), strict=True))
        env = dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            operands = [_read(v, env, consts) for v in eqn.invars]
            eqn = _at_call(eqn, call_source).replace(invars=operands)
            callee = callee_to_inline(eqn)
            if callee is None:
                # The program may be called again, so each call gets new variables.
                results = [Var(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(outvars=results))
            else:
                results = inline(callee, operands, _call_source(eqn))
            env.update(zip(eqn.outvars, results, strict=True))
        return [_read(v, env, consts) for v in jaxpr.outvars]

    ins = open_jaxpr(program).invars
    outs = inline(program, ins, source_info_util.new_source_info())
    return Flat(eqns, ins, outs, consts, argument_names(program))


def _read(v: Any, env: dict[Var, Any], consts: dict[Var, Any]) -> Any:
    """Returns what `v` is called in the flat program: `env[v]`, or `v` itself.

    With `jax_use_simplified_jaxpr_constants`, a literal may be an array. Such a literal
    becomes a new variable, whose value is added to `consts`.
    """
    if not isinstance(v, Literal):
        return env.get(v, v)
    if shape_in(v) == ():
        return v
    constant = Var(v.aval)
    consts[constant] = v.val
    return constant


def _call_source(eqn: JaxprEqn) -> Any:
    """Returns the source info of a call, with the called function as a scope."""
    source = eqn.source_info
    if "name" not in eqn.params:
        return source
    name = f"jit({eqn.params['name']})"
    return source.replace(name_stack=source.name_stack.extend(name))


def _at_call(eqn: JaxprEqn, call_source: Any) -> JaxprEqn:
    """Puts an inlined equation into the scopes of the call that it was inlined from.

    An equation without a line of the user's code gets the line of the call.
    """
    source = eqn.source_info
    name_stack = call_source.name_stack + source.name_stack
    source = source.replace(name_stack=name_stack)
    if call_source.traceback is not None and not users_line(eqn):
        source = source.replace(traceback=call_source.traceback)
    return eqn.replace(source_info=source)


def _callee(eqn: JaxprEqn) -> AnyJaxpr | None:
    """Returns the program that an equation calls, such as that of a `jit`, or None."""
    if Trait.CALLS not in traits(eqn):
        return None
    return programs_in(eqn)[0]


def _short_callee(eqn: JaxprEqn) -> AnyJaxpr | None:
    """Returns the program of a `jit` or similar call if it is short, or None.

    Without this limit, the flat program could grow exponentially: if `f` calls `g`
    twice, `g` calls `h` twice, and so on, then each level doubles its length.
    """
    if Trait.INLINED not in traits(eqn) or has_shardings(eqn):
        return None
    (program,) = programs_in(eqn)
    return program if _flat_length(program) <= _MAX_INLINED else None


@cached_by_program
def _flat_length(program: AnyJaxpr) -> int:
    """Counts the equations of a program once `flat` has inlined its short calls."""
    length = 0
    for callee in map(_short_callee, open_jaxpr(program).eqns):
        length += 1 if callee is None else _flat_length(callee)
    return length
