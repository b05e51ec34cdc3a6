"""The programs that an equation holds, and what values are computed from.

`programs_in` gives the programs that an equation holds, and `result_programs` those
that give its results. These take the operands of the equation from `first_inside` on.
`carried_by` gives the positions of a loop's carry. For a `scan` with 2 constants, 1
carry and 1 array to scan over, `result_programs` gives `[body]`, `first_inside` 0, and
`carried_by` `range(2, 3)`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from optax_lossscale._programs.operations import Trait, row_of, traits
from optax_lossscale._programs.values import variables
from optax_lossscale._programs.versions import (
    is_program,
    name_of,
    open_jaxpr,
    params_of,
    scan_sizes,
)


def programs_in(eqn: JaxprEqn) -> list[Any]:
    """The programs that an equation holds and runs, in the order of running.

    Raises:
      NotImplementedError: if it has none of the parameters that its row names.
    """
    params = params_of(eqn)
    names = row_of(eqn).programs
    if names is None:
        parameters = list(params.values())
    else:
        parameters = [_parameter(params, name) for name in names]
    leaves = jax.tree.leaves(parameters, is_leaf=is_program)
    programs = [leaf for leaf in leaves if is_program(leaf)]
    if names and not programs:
        raise NotImplementedError(
            f"this version of JAX holds the program of `{name_of(eqn)}` in none of "
            f"the known parameters: {', '.join(names)}"
        )
    return programs


def result_programs(eqn: JaxprEqn) -> list[Any]:
    """The programs whose results are those of the equation, which is entered.

    They are all of its programs but for the condition of a `while`.
    """
    programs = programs_in(eqn)
    return programs[1:] if Trait.WHILE in traits(eqn) else programs


def first_inside(eqn: JaxprEqn) -> int:
    """The position of the first operand that each of the `result_programs` takes.

    It takes all operands after this one, too. Before it are the index of a `cond` and
    the constants of a loop's condition.
    """
    program = result_programs(eqn)[0]
    return len(eqn.invars) - len(open_jaxpr(program).invars)


def carried_by(eqn: JaxprEqn) -> range:
    """The positions of the operands that a loop carries from round to round."""
    if Trait.SCANS in traits(eqn):
        n_consts, n_carry = scan_sizes(eqn)
        return range(n_consts, n_consts + n_carry)
    if Trait.WHILE in traits(eqn):
        n_consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return range(n_consts, len(eqn.invars))
    return range(0)


def made_by(eqns: Sequence[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """The equation that makes each result of some equations, in order."""
    return {v: eqn for eqn in eqns for v in eqn.outvars}


def needed_for(values: Iterable[Any], makers: Mapping[Var, JaxprEqn]) -> set[Var]:
    """The variables among `values`, and all from which `makers` compute them."""
    needed: set[Var] = set()
    unread = variables(values)
    while unread:
        v = unread.pop()
        if v in makers and v not in needed:
            unread += variables(makers[v].invars)
        needed.add(v)
    return needed


def has_shardings(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jit` with shardings for its arguments or results."""
    places = eqn.params.get("in_shardings"), eqn.params.get("out_shardings")
    return any(isinstance(x, jax.sharding.Sharding) for x in jax.tree.leaves(places))


def _parameter(params: dict[str, Any], name: str) -> Any:
    """A parameter by name; for `jaxprs.solve`, the attribute `solve` of one."""
    name, _, part = name.partition(".")
    return getattr(params[name], part) if part else params.get(name)
