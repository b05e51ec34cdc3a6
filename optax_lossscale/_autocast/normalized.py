"""Recognizes a value minus its mean or over its norm by how it is computed.

A value minus its mean keeps about its magnitude, and a value over its norm is of order
1, so 16 bits can hold either. But this is true only of the value's own mean and norm.
Divided by the norm of another value, or by a mean, which may be 0, a value may be of
any magnitude.

The result of each equation is therefore matched against the formulas of means and
norms. A result that may be part of a formula has a *role* in it and a *source*: the
value that may be normalized. In `x * rsqrt(sum(x * x) / 8 + 1e-6)`, the source of all
results is `x`, and their roles are, in order:

    x * x            "squares"
    sum(_)           "power"
    _ / 8            "power"
    _ + 1e-6         "power"
    rsqrt(_)         "inverse norm"
    x * _            "normalized"

If the mean of the source was subtracted first, the roles are *centered*: a centered
power is the variance of `x`. To recognize another formula, add its operations to
`_RULES`.

The axes of a mean or a norm are not checked, nor is the order of the elements, so rows
that are divided by the norms of other rows count as normalized, though they may be of
any magnitude. We know of no model that does this. In such a model, float16 may
overflow, so that steps are skipped, and bfloat16 may lose digits, which `diagnose`
shows but training does not.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from optax_lossscale._programs.operations import Formula, Trait, row_of, traits
from optax_lossscale._programs.values import is_inexact
from optax_lossscale._programs.work import count_terms


class Role(NamedTuple):
    """The part that a result plays in the normalization of its source.

    Attributes:
      source: a variable; None for a number computed from literals alone.
      name: a value of `_RULES`, or "number" if computed from literals alone.
      is_centered: whether the mean was subtracted from the source.
      terms: the number of summed terms over the divisor: 1 for a mean, 8 for a sum of 8
        terms.
      value: the value of a literal. A number computed from literals counts as 1.
    """

    source: Any
    name: str
    is_centered: bool = False
    terms: float = 1
    value: Any = 1


# Which role an operation computes from the roles of its operands, which all have the
# same source. The first word is the cell `formula` in the operation's row: "choice"
# stands for `select_n`, and "sum" for a reduction.
_RULES: dict[tuple[Formula | None, *tuple[str, ...]], str] = {
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
    ("plus or max", "power"): "power",
    ("choice", "power"): "power",
    ("minus", "power", "squared sum"): "power",
    ("root", "power"): "norm",
    ("over", "norm"): "norm",
    ("plus or max", "norm"): "norm",
    ("choice", "norm"): "norm",
    ("inverse root", "power"): "inverse norm",
    ("times", "inverse norm"): "inverse norm",
    ("over", "value", "norm"): "normalized",
    ("times", "value", "inverse norm"): "normalized",
    ("times", "inverse norm", "value"): "normalized",
}
# For each operation, the smallest and the largest number with which it does not change
# a role. Such numbers are left out of the lookup in `_RULES`.
_NEUTRAL_NUMBERS: dict[Formula | None, tuple[float, float]] = {
    "plus or max": (0, np.inf),
    "choice": (1, np.inf),
    "minus": (0, 0),
    "over": (1, np.inf),
}
# The smallest `terms` of a power that counts as a mean. A mean over n devices has 1/n
# terms, because its sum counts as one term. A heuristic, which allows for 4096 devices.
_FEWEST_TERMS = 2**-12
_REARRANGING = Trait.MOVES | Trait.PLACES | Trait.SENDS | Trait.SPREADS


def role_of(
    eqn: JaxprEqn, are_factors: Sequence[bool], roles: Mapping[Var, Role]
) -> Role | None:
    """Returns the role of an equation's result; None if it has no role.

    If an equation has several results, none of them has a role.

    Args:
      eqn: the equation.
      are_factors: whether each operand is a parameter, a mask or a literal of order 1.
      roles: the roles of earlier results. Any other variable has the role "value" and
        is its own source.
    """
    if len(eqn.outvars) != 1:
        return None
    operands = [_role_of_operand(v, roles) for v in eqn.invars]
    if _rearranges(eqn):
        return operands[0]
    if all(role.source is None for role in operands):
        return Role(None, "number")
    formula = row_of(eqn).formula
    # A neutral number is left out below, but `1 / norm` is not a norm.
    if formula in ("minus", "over") and operands[0].source is None:
        return None
    # Of the powers that `integer_pow` computes, only the square has a role.
    if formula == "squared" and eqn.params.get("y", 2) != 2:
        return None
    parts = []
    for v, role, is_factor in zip(eqn.invars, operands, are_factors, strict=True):
        is_neutral = is_factor if formula == "times" else _is_neutral(role, formula)
        if is_inexact(v) and not is_neutral:
            parts.append(role)
    return _combined(eqn, operands, parts)


def is_normalized(role: Role) -> bool:
    """Whether this is the role of a value over its norm or minus its mean."""
    if role.name == "value":
        return role.is_centered
    return role.name == "normalized"


def _combined(
    eqn: JaxprEqn, operands: Sequence[Role], parts: Sequence[Role]
) -> Role | None:
    """Combines the `parts`, which are roles of operands, by `_RULES`.

    The result is None if no rule fits, or if the parts have different sources or only
    some are centered. The `operands` are the roles of all operands, including numbers
    and factors.
    """
    formula = row_of(eqn).formula
    name = _RULES.get((formula, *[role.name for role in parts]))
    if name is None:
        return None
    first = parts[0]
    for role in parts:
        if role.source != first.source or role.is_centered != first.is_centered:
            return None
    subtracts_mean = formula == "minus" and len(parts) == 2
    terms = max(role.terms for role in parts) * count_terms(eqn)
    divisor = operands[-1]
    if formula == "over" and divisor.source is None:
        terms /= divisor.value
    # With fewer terms, as in `x / sqrt(mean(x * x) / 1e6)`, the result may be large.
    if terms < _FEWEST_TERMS:
        return None
    # `x - sum(x)` is not `x` minus its mean.
    if subtracts_mean and terms > 1:
        return None
    return Role(
        source=first.source,
        name=name,
        is_centered=first.is_centered or subtracts_mean,
        terms=terms,
    )


def _role_of_operand(v: Var | Literal, roles: Mapping[Var, Role]) -> Role:
    if isinstance(v, Literal):
        return Role(None, "number", value=v.val)
    return roles.get(v, Role(v, "value"))


def _rearranges(eqn: JaxprEqn) -> bool:
    """Whether the result has all elements of the only operand, in another order."""
    eqn_traits = traits(eqn)
    if len(eqn.invars) != 1 or Trait.SELECTS in eqn_traits:
        return False
    return bool(eqn_traits & _REARRANGING)


def _is_neutral(role: Role, formula: Formula | None) -> bool:
    """Whether an operand is a number that does not affect the role of the result."""
    number = role.value
    is_number = role.source is None and not np.iscomplexobj(number)
    if not is_number or formula not in _NEUTRAL_NUMBERS:
        return False
    smallest, largest = _NEUTRAL_NUMBERS[formula]
    # NaN, which `jnp.var` may choose, is neutral as well: it is neither smaller nor
    # larger than any number.
    return not (number < smallest or number > largest)
