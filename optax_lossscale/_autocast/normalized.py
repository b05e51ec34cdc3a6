"""Find values minus their own mean, or over their own norm, by how they are computed.

What is minus its mean has about the size that it had, and what is over its norm about
the size 1, so that 16 bits can hold either. But mean and norm have to be its own: over
the norm of another value, or over a mean, which may be 0, a value may have any size.

So each result on the way has a *role*: what it is, and of which value. The results of
`x * rsqrt(sum(x * x) / 8 + 1e-6)` are, in order, the squares of `x`, its power (three
times: the sum, the sum over 8, and that plus the epsilon), its inverse norm, and `x`
normalized. The roles of `x` minus its mean are *centred*: their power is the variance
of `x`.

The axes of a mean or a norm are not looked at, nor is the order of its numbers. So rows
over the norms of each other count as normalized, though they may have any size. No
common model divides so; if 16 bits overflow in one that does, the loss scale shows it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._programs.operations import Trait, row_of, traits
from optax_lossscale._programs.values import is_inexact
from optax_lossscale._programs.work import terms_of


class Role(NamedTuple):
    """What a result is, in the normalization of a value."""

    of: Any  # the value, a variable; None for what is computed from literals alone
    what: str  # a word of `_MADE`, or "number" for what is computed from literals alone
    is_centred: bool = False  # whether it is that of the value minus its mean
    # The number of terms summed, divided by the divisor: 1 for a mean, 8 for a sum of 8
    terms: float = 1
    value: Any = 1  # of a literal; what is computed from several counts as 1


# What an operation makes of roles of one value. The cell `formula` in the row of the
# operation is the first word: "at least" is a sum or a maximum, a "choice" a
# `select_n`, and the other words say themselves what they are.
_MADE: dict[tuple[str | None, ...], str] = {
    ("sum", "value"): "sum",
    ("sum", "sum"): "sum",
    ("over", "sum"): "sum",
    ("minus", "value", "sum"): "value",
    ("minus", "value"): "value",
    ("squared", "value"): "squares",
    ("times", "value", "value"): "squares",
    ("squared", "sum"): "squared sum",
    ("times", "sum", "sum"): "squared sum",
    ("sum", "squares"): "power",
    ("sum", "power"): "power",
    ("over", "power"): "power",
    ("at least", "power"): "power",
    ("choice", "power"): "power",
    ("minus", "power", "squared sum"): "power",
    ("root", "power"): "norm",
    ("over", "norm"): "norm",
    ("at least", "norm"): "norm",
    ("choice", "norm"): "norm",
    ("inverse root", "power"): "inverse norm",
    ("times", "inverse norm"): "inverse norm",
    ("over", "value", "norm"): "normalized",
    ("times", "value", "inverse norm"): "normalized",
    ("times", "inverse norm", "value"): "normalized",
}
# The least and the largest number that may be beside a role, or after it, without
# changing what the result is
_LEFT_OUT = {
    "at least": (0, np.inf),
    "choice": (1, np.inf),
    "minus": (0, 0),
    "over": (1, np.inf),
}
# The least `terms` of a power that counts as a mean. Those of a mean over n devices are
# 1/n, as its sum counts as one term.
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
    formula = row_of(eqn).formula
    is_of_a_number = formula in ("minus", "over") and operands[0].of is None
    is_other_power = eqn.params.get("y", 2) != 2  # the exponent of an `integer_pow`
    if is_of_a_number or is_other_power:
        return None
    parts: list[Role] = []
    for v, role, is_factor in zip(eqn.invars, operands, are_factors, strict=True):
        is_left_out = is_factor if formula == "times" else _is_left_out(role, formula)
        if is_inexact(v) and not is_left_out:
            parts.append(role)
    return _made_of(parts, eqn, divisor=operands[-1])


def is_normalized(role: Role) -> bool:
    """Whether this is a value over its norm, or minus its mean."""
    return role.what == "normalized" or (role.is_centred and role.what == "value")


def _made_of(parts: Sequence[Role], eqn: JaxprEqn, divisor: Role) -> Role | None:
    """The role that an equation makes of roles, by the table; None if it has none.

    Roles of different values make none. The `divisor` is the last operand's role.
    """
    formula = row_of(eqn).formula
    what = _MADE.get((formula, *[role.what for role in parts]))
    sources = {(role.of, role.is_centred) for role in parts}
    if what is None or len(sources) != 1:
        return None
    ((value, is_centred),) = sources
    subtracts_mean = formula == "minus" and len(parts) == 2
    terms = max(role.terms for role in parts) * terms_of(eqn)
    if formula == "over" and divisor.of is None:
        terms /= divisor.value
    # `x / sqrt(mean(x * x) / 1e6)` would be large, and `x - sum(x)` is not `x` minus
    # its mean.
    if terms < _FEWEST or (subtracts_mean and terms > 1):
        return None
    return Role(value, what, is_centred or subtracts_mean, terms)


def _role_of_operand(v: Var | Literal, roles: Mapping[Var, Role]) -> Role:
    """The role of an operand."""
    if isinstance(v, Literal):
        return Role(None, "number", value=v.val)
    return roles.get(v, Role(v, "value"))


def _rearranges(eqn: JaxprEqn) -> bool:
    """Whether the result has all numbers of the one operand, in another order."""
    its_traits = traits(eqn)
    moves = its_traits & (Trait.MOVES | Trait.PLACES | Trait.SENDS | Trait.SPREADS)
    return bool(moves) and len(eqn.invars) == 1 and Trait.SELECTS not in its_traits


def _is_left_out(role: Role, formula: str | None) -> bool:
    """Whether a role is a number that does not change what the result is."""
    number = role.value
    if role.of is not None or formula not in _LEFT_OUT or np.iscomplexobj(number):
        return False
    least, largest = _LEFT_OUT[formula]
    # NaN, which `jnp.var` may choose, is neither less nor larger.
    return not (number < least or number > largest)
