"""The programs that an equation holds, with the operands that they take.

`programs_in` gives the programs that an equation holds, `programs_with_operands` also the
operands of each by their positions, and `carried_by` the positions of a loop's carry.
For a `scan` with 2 constants, 1 carry and 1 array to scan over, `programs_with_operands` gives
`[(body, range(0, 4))]`, and `carried_by` `range(2, 3)`.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from optax_lossscale._programs.operations import Trait, row_of, traits
from optax_lossscale._programs.versions import (
    is_program,
    open_jaxpr,
    params_of,
    scan_sizes,
)


def programs_in(eqn: JaxprEqn) -> list[Any]:
    """The programs that an equation holds and runs, in the order of running."""
    params = params_of(eqn)
    names = row_of(eqn).programs
    if names is None:
        parameters = list(params.values())
    else:
        parameters = [_parameter(params, name) for name in names]
    leaves = jax.tree.leaves(parameters, is_leaf=is_program)
    return [leaf for leaf in leaves if is_program(leaf)]


def programs_with_operands(eqn: JaxprEqn) -> list[tuple[Any, Sequence[int]]]:
    """The programs in an equation that is entered, each with its operands.

    The operands are given by their positions among those of the equation.
    """
    # A program takes the last operands: all of them, but for the index of a `cond` and
    # the constants of a loop's condition.
    end = len(eqn.invars)
    entered: list[tuple[Any, Sequence[int]]] = [
        (program, range(end - len(open_jaxpr(program).invars), end))
        for program in programs_in(eqn)
    ]
    if Trait.WHILE in traits(eqn):  # its condition lacks the constants of its body
        condition, _ = entered[0]
        of_condition = [*range(eqn.params["cond_nconsts"]), *carried_by(eqn)]
        entered[0] = (condition, of_condition)
    return entered


def result_programs(eqn: JaxprEqn) -> list[tuple[Any, Sequence[int]]]:
    """The programs whose results are those of the equation, each with its operands.

    They are all that `programs_with_operands` gives but for the condition of a `while`.
    """
    entered = programs_with_operands(eqn)
    return entered[1:] if Trait.WHILE in traits(eqn) else entered


def carried_by(eqn: JaxprEqn) -> range:
    """The positions of the operands that a loop carries from round to round."""
    if Trait.SCANS in traits(eqn):
        n_consts, n_carry = scan_sizes(eqn)
        return range(n_consts, n_consts + n_carry)
    if Trait.WHILE in traits(eqn):
        n_consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return range(n_consts, len(eqn.invars))
    return range(0)


def _parameter(params: dict[str, Any], name: str) -> Any:
    """A parameter by name; for `jaxprs.solve`, the attribute `solve` of one."""
    name, _, part = name.partition(".")
    return getattr(params[name], part) if part else params.get(name)
