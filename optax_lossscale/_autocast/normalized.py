"""Find values minus their own mean, or over their own norm, by how they are computed.

What is minus its mean has about the size that it had, and what is over its norm about
the size 1, so that 16 bits can hold either. But mean and norm have to be its own: over
the norm of another value, or over a mean, which may be 0, a value may have any size.

So each result on the way has a *role*: what it is, and of which value. The results of
`x * rsqrt(sum(x * x) / 8 + 1e-6)` are, in order, the squares of `x`, its power thrice
over (the sum, the sum over 8, and that plus the epsilon), its inverse norm, and `x`
normalized. The roles of `x` minus its mean are *centred*: their power is the variance
of `x`.

The axes of a mean or a norm are not looked at, nor is the order of its numbers. So rows
over the norms of each other count as normalized, though they may have any size.
"""

import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.dtypes import float0
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._programs.operations import Formula, Trait, row_of, traits
from optax_lossscale._programs.values import dtype_in, is_inexact
from optax_lossscale._programs.work import terms_of

What = typing.Literal[
    "epsilon",
    "factor",
    "inverse norm",
    "norm",
    "normalized",
    "number",
    "other",
    "power",
    "squared sum",
    "squares",
    "sum",
    "value",
    "zero",
]
"""What a result or a literal is, or what it is taken for.

A literal is "zero", an "epsilon" if it is less than 1, a "number" if it is not, or
"other" if it is negative or complex. A "factor" is a number, a parameter or a mask.
"""


class Role(NamedTuple):
    """What a result is, in the normalization of a value."""

    of: Any  # the value, a variable; None for what is computed from literals alone
    what: What
    is_centred: bool = False  # whether it is that of the value minus its mean
    # The number of terms summed, divided by the divisor: 1 for a mean, 8 for a sum of 8
    terms: float = 1


# What an operation makes of roles of one value. The cell `formula` in the row of the
# operation is the first word: a "bound" is the sum of two numbers or the larger one, a
# "choice" one of them, and the other words say themselves what they are.
_MADE: dict[tuple[Formula | What, ...], What] = {
    ("sum", "value"): "sum",
    ("sum", "sum"): "sum",
    ("over", "sum", "number"): "sum",
    ("minus", "value", "sum"): "value",
    ("minus", "value", "zero"): "value",
    ("squared", "value"): "squares",
    ("times", "value", "value"): "squares",
    ("squared", "sum"): "squared sum",
    ("times", "sum", "sum"): "squared sum",
    ("sum", "squares"): "power",
    ("sum", "power"): "power",
    ("over", "power", "number"): "power",
    ("bound", "power"): "power",
    ("choice", "power"): "power",
    ("minus", "power", "squared sum"): "power",
    ("root", "power"): "norm",
    ("over", "norm", "number"): "norm",
    ("bound", "norm"): "norm",
    ("choice", "norm"): "norm",
    ("inverse root", "power"): "inverse norm",
    ("times", "inverse norm"): "inverse norm",
    ("over", "value", "norm"): "normalized",
    ("times", "value", "inverse norm"): "normalized",
    ("times", "inverse norm", "value"): "normalized",
}
# What may be beside a role without changing what the result is
_LEFT_OUT: dict[Formula, tuple[What, ...]] = {
    "bound": ("zero", "epsilon", "number"),
    "choice": ("number",),
    "times": ("factor",),
}
# The least terms of a mean. A mean over devices has fewer than 1: its sum counts as one
# term, and is divided by the number of devices.
_FEWEST = 2**-12


def role_of(
    eqn: JaxprEqn, are_factors: Sequence[bool], roles: Mapping[Var, Role]
) -> Role | None:
    """The role of the result of an equation; None if it has none, or several results.

    Args:
      eqn: the equation.
      are_factors: whether each operand is a parameter, a mask or a literal of about
        the size 1.
      roles: the roles of earlier results; any other variable is a value of its own.
    """
    if len(eqn.outvars) != 1:
        return None
    operands = [_role_of_operand(v, roles) for v in eqn.invars]
    if _rearranges(eqn):
        return operands[0]
    if all(role.of is None for role in operands):
        return Role(None, "number")
    if Trait.MULTIPLIES in traits(eqn) and True in are_factors:
        operands[are_factors.index(True)] = Role(None, "factor")
    formula = _formula(eqn)
    if formula is None:
        return None
    left_out = _LEFT_OUT.get(formula, ())
    pairs = zip(eqn.invars, operands, strict=True)
    combined = [
        role for v, role in pairs if is_inexact(v) and role.what not in left_out
    ]
    return _made_of(combined, eqn, formula)


def is_normalized(role: Role) -> bool:
    """Whether this is a value over its norm, or minus its mean."""
    return role.what == "normalized" or (role.is_centred and role.what == "value")


def _made_of(roles: Sequence[Role], eqn: JaxprEqn, formula: Formula) -> Role | None:
    """The role that an equation makes of roles, by the table; None if it has none.

    Parts of different values make none.
    """
    what = _MADE.get((formula, *[role.what for role in roles]))
    of_values = [role for role in roles if role.of is not None]
    sources = {(role.of, role.is_centred) for role in of_values}
    if what is None or len(sources) != 1:
        return None
    ((value, is_centred),) = sources
    subtracts_mean = formula == "minus" and len(of_values) == 2
    terms = max(role.terms for role in of_values) * _terms(eqn, formula)
    # A power that was divided by more than it sums is small; a sum is larger than a
    # mean.
    if terms < _FEWEST or (subtracts_mean and terms > 1):
        return None
    return Role(value, what, is_centred or subtracts_mean, terms)


def _role_of_operand(v: Var | Literal, roles: Mapping[Var, Role]) -> Role:
    """The role of an operand."""
    if isinstance(v, Var):
        return roles.get(v, Role(v, "value"))
    # A float0, the cotangent of an integer, cannot even be compared.
    if dtype_in(v) == float0:
        return Role(None, "other")
    number = v.val
    if number == 0:
        return Role(None, "zero")
    if np.iscomplexobj(number) or number < 0:
        return Role(None, "other")
    return Role(None, "epsilon" if number < 1 else "number")


def _rearranges(eqn: JaxprEqn) -> bool:
    """Whether the result has all numbers of the first operand, in another order."""
    its_traits = traits(eqn)
    if Trait.PLACES in its_traits:
        return len(eqn.invars) == 1
    moves = its_traits & (Trait.MOVES | Trait.SENDS | Trait.SPREADS)
    return bool(moves) and Trait.SELECTS not in its_traits


def _formula(eqn: JaxprEqn) -> Formula | None:
    """The word for an equation's operation; None for a power other than the square."""
    formula = row_of(eqn).formula
    if formula != "raised":
        return formula
    return "squared" if eqn.params["y"] == 2 else None


def _terms(eqn: JaxprEqn, formula: Formula) -> float:
    """By what an equation multiplies the terms of a role."""
    divisor = eqn.invars[-1]
    if Trait.DIVIDES in traits(eqn) and isinstance(divisor, Literal):
        return 1 / divisor.val
    return terms_of(eqn) if formula == "sum" else 1
