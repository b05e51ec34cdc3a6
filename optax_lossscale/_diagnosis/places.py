"""Where an equation is: its line, and the names of the scopes that it is in.

The names come from the stack that JAX keeps for profiles, without what JAX and autocast
add to it: `transpose(jvp(ols.autocast))/jvp(block_3)` becomes `block_3`.
"""

import re
from typing import Any

from optax_lossscale._autocast.products import SCOPE
from optax_lossscale._diagnosis.notes import Place
from optax_lossscale._diagnosis.wide import is_narrow
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in, is_float
from optax_lossscale._programs.walk import has_users_line, line_of
from optax_lossscale._programs.work import terms_of

_SAME_NUMBERS = ("broadcast_in_dim", "pvary", "pcast")
_SELECTS = ("slice", "dynamic_slice")


def place_of(eqn: Any, number: int, around: Place) -> Place:
    """The place of an equation.

    Args:
      eqn: the equation.
      number: its place in the order of running.
      around: the place of the equation that holds its program.
    """
    stack = str(eqn.source_info.name_stack)
    sums = traits(eqn) & (Is.PRODUCT | Is.ADDS_MANY)
    return Place(
        eqn.primitive.name,
        line_of(eqn) if has_users_line(eqn) or not around.source else around.source,
        "/".join(filter(None, (around.scope, _scope(stack)))),
        is_derivative=around.is_derivative or "transpose(" in stack,
        terms=terms_of(eqn) if sums else 1,
        number=number,
    )


def keeps_numbers(eqn: Any) -> bool:
    """Whether the result has the operand's numbers, moved, repeated or widened.

    Its note is then that of the operand.
    """
    name = eqn.primitive.name
    if name == "convert_element_type":
        (x,) = eqn.invars
        (y,) = eqn.outvars
        return is_narrow(dtype_in(x)) and is_float(y) and not is_narrow(dtype_in(y))
    moves = Is.MOVES in traits(eqn) and name not in _SELECTS
    return len(eqn.invars) == 1 and (moves or name in _SAME_NUMBERS)


def _scope(stack: str) -> str:
    """The names in a stack that the user gave, with slashes between them."""
    without_jit = re.sub(r"p?jit\([^()]*\)", "", stack)
    plain = re.sub(r"\w+\(|\)", "", without_jit)
    names = [name for name in plain.split("/") if re.fullmatch(r"[\w.-]+", name)]
    ours = (SCOPE, "rematted_computation", "checkpoint", "while", "body", "cond")
    return "/".join(name for name in names if name not in ours)
