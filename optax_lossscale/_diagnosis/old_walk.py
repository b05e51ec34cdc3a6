"""What `diagnose` alone still asks, until it is rewritten: see `walk` below.

The programs in an equation, and the values that a value depends on.

- `programs_in(eqn)` lists the programs that an equation runs, if the table of
  operations names them. For an unknown operation, it lists all that the equation holds.
- `result_programs(eqn)` lists those of them that compute the equation's results: all
  but the condition of a `while`.
- `first_inner_operand(eqn)` is the position of the first operand that the
  `result_programs` get as an argument.
- `carry_positions(eqn)` is the range of the operands that a loop carries from one
  iteration to the next.

For example, let a `while` loop carry two numbers, and let its condition read one
constant and its body none. Its operands are `const, carry, carry`, and:

    programs_in(eqn) == [condition, body]
    result_programs(eqn) == [body]
    first_inner_operand(eqn) == 1
    carry_positions(eqn) == range(1, 3)
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from optax_lossscale._diagnosis.old_operations import Trait, row_of, traits
from optax_lossscale._programs.values import variables
from optax_lossscale._programs.versions import (
    AnyJaxpr,
    is_program,
    name_of,
    open_jaxpr,
    params_of,
    scan_sizes,
)


def programs_in(eqn: JaxprEqn) -> list[AnyJaxpr]:
    """Returns the programs that an equation runs, in the order in which they run.

    Programs that the table of operations does not name, such as the `update_jaxpr` of a
    `scatter`, are left out. Of an unknown operation, all programs are returned.

    Raises:
      NotImplementedError: if the equation has none of the parameters that its row in
        the table of operations names.
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


def result_programs(eqn: JaxprEqn) -> list[AnyJaxpr]:
    """Returns the programs that compute an equation's results.

    These are all of its programs, except for the condition of a `while`, which only
    decides whether the loop continues.
    """
    programs = programs_in(eqn)
    return programs[1:] if Trait.WHILE in traits(eqn) else programs


def first_inner_operand(eqn: JaxprEqn) -> int:
    """Returns the position of the first operand that the `result_programs` get.

    Each of these programs gets that operand and all after it. The operands before it
    are the index of a `cond`, or the constants of a `while` loop's condition.
    """
    n_arguments = len(open_jaxpr(result_programs(eqn)[0]).invars)
    return len(eqn.invars) - n_arguments


def carry_positions(eqn: JaxprEqn) -> range:
    """Returns the positions of a loop's carry among its operands; empty if no loop.

    The operands of a `scan` are its constants, its carry and the arrays that it scans.
    The operands of a `while` are the constants of its condition, the constants of its
    body, and its carry.
    """
    if Trait.SCANS in traits(eqn):
        n_consts, n_carry = scan_sizes(eqn)
        return range(n_consts, n_consts + n_carry)
    if Trait.WHILE in traits(eqn):
        n_consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return range(n_consts, len(eqn.invars))
    return range(0)


def producers_in(eqns: Sequence[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """Returns the producer of each result, the equation that computes it, in order."""
    return {v: eqn for eqn in eqns for v in eqn.outvars}


def needed_for(values: Iterable[Any], producers: Mapping[Var, JaxprEqn]) -> set[Var]:
    """Returns the variables among `values`, and all from which they are computed.

    Args:
      values: variables, and literals, which are ignored.
      producers: what `producers_in` returns for the equations to look through. The
        search ends at variables that have no producer there.
    """
    needed: set[Var] = set()
    unvisited = variables(values)
    while unvisited:
        v = unvisited.pop()
        if v in producers and v not in needed:
            unvisited += variables(producers[v].invars)
        needed.add(v)
    return needed


def has_shardings(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jit` with shardings for its arguments or results."""
    shardings = eqn.params.get("in_shardings"), eqn.params.get("out_shardings")
    leaves = jax.tree.leaves(shardings)
    return any(isinstance(leaf, jax.sharding.Sharding) for leaf in leaves)


def _parameter(params: dict[str, Any], name: str) -> Any:
    """Looks up a parameter; `jaxprs.solve` is the attribute `solve` of `jaxprs`."""
    name, _, attribute = name.partition(".")
    parameter = params.get(name)
    return getattr(parameter, attribute, None) if attribute else parameter
