"""A traced program with its short calls inlined: the called equations replace each call.

For example, `jax.jit(lambda y: y + 1.0)(x) * 2.0` becomes an `add` and a `mul`. Loops and
branches stay single equations. No variable of the flat program is assigned twice, even
if a program is called twice.
"""

from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.lines import users_line
from optax_lossscale._programs.operations import CALLS
from optax_lossscale._programs.values import shape_in
from optax_lossscale._programs.versions import (
    AnyJaxpr,
    constants,
    name_of,
    open_jaxpr,
)
from optax_lossscale._programs.walk import has_shardings, programs_in

# A program of more equations stays a call. A heuristic: the bound is far above the
# length of helpers such as `jax.nn.softmax`, which has about ten equations.
_MAX_INLINED = 100


class Flat(NamedTuple):
    """A program with its short calls inlined.

    Attributes:
      eqns: the equations, in the order in which they run.
      ins: the arguments.
      outs: the results: variables, and literals of shape ().
      consts: the arrays that the program closes over, by the variables that stand for
        them.
    """

    eqns: list[JaxprEqn]
    ins: list[Var]
    outs: list[Any]
    consts: dict[Var, Any]


@cached_by_program
def flat(program: AnyJaxpr) -> Flat:
    """Inlines the short calls of a program.

    Long `jit`s, `jit`s with shardings, checkpoints, and functions with custom
    derivatives stay single equations.
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
            callee = _short_callee(eqn)
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
    return Flat(eqns, ins, outs, consts)


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


def _short_callee(eqn: JaxprEqn) -> AnyJaxpr | None:
    """Returns the program of a `jit` or similar call if it is short, or None.

    Without this limit, the flat program could grow exponentially: if `f` calls `g`
    twice, `g` calls `h` twice, and so on, then each level doubles its length.
    """
    if name_of(eqn) not in CALLS or has_shardings(eqn):
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
