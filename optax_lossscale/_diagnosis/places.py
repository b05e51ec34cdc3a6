"""Where an equation is: its line, and the names of the scopes that it is in.

The names come from the stack that JAX keeps for profiles, without what JAX and autocast
add to it: `transpose(jvp(ols.autocast))/jvp(block_3)` becomes `block_3`.
"""

import re
from typing import Any

from optax_lossscale._autocast.products import SCOPE
from optax_lossscale._diagnosis.notes import Place
from optax_lossscale._programs.versions import name_of
from optax_lossscale._programs.walk import line_of
from optax_lossscale._programs.work import terms_of

# Scopes that JAX and autocast make
_NOT_THE_USERS = f"{SCOPE}|rematted_computation|checkpoint|while|body|cond"


def place_of(eqn: Any, number: int, around: Place) -> Place:
    """The place of an equation.

    Args:
      eqn: the equation.
      number: its place in the order of running.
      around: the place of the equation that holds its program.
    """
    stack = str(eqn.source_info.name_stack)
    return Place(
        name_of(eqn),
        line_of(eqn, around.source),
        "/".join(filter(None, (around.scope, _scope(stack)))),
        is_derivative=around.is_derivative or "transpose(" in stack,
        terms=terms_of(eqn),
        number=number,
    )


def _scope(stack: str) -> str:
    """The names in a stack that the user gave, with slashes between them."""
    without_jit = re.sub(r"p?jit\([^()]*\)", "", stack)
    plain = re.sub(r"\w+\(|\)", "", without_jit)
    return "/".join(
        name
        for name in plain.split("/")
        if re.fullmatch(r"[\w.-]+", name) and not re.fullmatch(_NOT_THE_USERS, name)
    )
