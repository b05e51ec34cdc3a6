"""The programs that an equation holds, and the line of the user's code that made it.

`programs_in` gives the programs that an equation holds, `arguments_of` also the
operands of each by their positions, and `carried_by` the positions of a loop's carry.
For a `scan` with 2 constants, 1 carry and 1 array to scan over, `arguments_of` gives
`[(body, range(0, 4))]`, and `carried_by` `range(2, 3)`.
"""

import os
import re
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import jax
from jax.extend import source_info_util

from optax_lossscale._programs.operations import Is, operation, traits
from optax_lossscale._programs.versions import (
    is_program,
    open_jaxpr,
    params_of,
    scan_sizes,
)

# Frames of these packages are never shown as the user's line: the user's functions call
# them, and are called by them.
_FRAMEWORKS = (
    "einops",
    "equinox",
    "flax",
    "haiku",
    "haliax",
    "keras",
    "optax",
    "optax_lossscale",
)


def programs_in(eqn: Any) -> list[Any]:
    """The programs that an equation holds and runs, in the order of running."""
    params = params_of(eqn)
    names = operation(eqn).programs
    if names is None:
        parameters = list(params.values())
    else:
        parameters = [_parameter(params, name) for name in names]
    leaves = jax.tree.leaves(parameters, is_leaf=is_program)
    return [leaf for leaf in leaves if is_program(leaf)]


def arguments_of(eqn: Any) -> list[tuple[Any, Sequence[int]]]:
    """The programs in an equation that is entered, each with its operands.

    The operands are given by their positions among those of the equation.
    """
    # A program takes the last operands, which are all but the index of a `cond`.
    end = len(eqn.invars)
    entered: list[tuple[Any, Sequence[int]]] = [
        (program, range(end - len(open_jaxpr(program).invars), end))
        for program in programs_in(eqn)
    ]
    if Is.WAITS in traits(eqn):  # but for the condition of a loop
        condition, _ = entered[0]
        of_condition = [*range(eqn.params["cond_nconsts"]), *carried_by(eqn)]
        entered[0] = (condition, of_condition)
    return entered


def giving_results(eqn: Any) -> list[tuple[Any, Sequence[int]]]:
    """The same as `arguments_of`, without the condition of a `while`.

    The results of the other programs are those of the equation.
    """
    entered = arguments_of(eqn)
    return entered[1:] if Is.WAITS in traits(eqn) else entered


def carried_by(eqn: Any) -> range:
    """The positions of the operands that a loop carries from round to round."""
    if Is.SCANS in traits(eqn):
        n_consts, n_carry = scan_sizes(eqn)
        return range(n_consts, n_consts + n_carry)
    if Is.WAITS in traits(eqn):
        n_consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return range(n_consts, len(eqn.invars))
    return range(0)


def line_of(eqn: Any, around: str = "") -> str:
    """The user's line that made an equation, as `model.py:12 (f)`.

    If no line of the user's made it, this is `around`, the line of the equation that
    holds it.
    """
    return _users_line(eqn) or around or "an unknown line"


def has_users_line(eqn: Any) -> bool:
    """Whether a line of the user's made an equation, and not only a framework's."""
    return bool(_users_line(eqn))


def is_of_optax(eqn: Any) -> bool:
    """Whether Optax made an equation, other than one of its losses."""
    optax = _folder("optax")
    calls = _calls(eqn)
    if not optax or not calls:
        return False
    is_loss = calls[-1].startswith(os.path.join(optax, "losses"))
    return calls[-1].startswith(optax) and not is_loss


def _parameter(params: dict[str, Any], name: str) -> Any:
    """A parameter by name; for `jaxprs.solve`, the attribute `solve` of one."""
    name, _, part = name.partition(".")
    return attrgetter(part)(params[name]) if part else params.get(name)


# --- lines ---


def _calls(eqn: Any) -> list[str]:
    """The frames that led to an equation, without JAX's own; the innermost is last."""
    return source_info_util.summarize(eqn.source_info, num_frames=1000).splitlines()


def _users_line(eqn: Any) -> str:
    """The innermost frame of `_calls` that is in no framework, in short; "" if none is.

    What a framework traced once and cached has no frame of the user's.
    """
    folders = tuple(filter(None, map(_folder, _FRAMEWORKS)))
    users = [call for call in _calls(eqn) if not call.startswith(folders)]
    return _short(users[-1]) if users else ""


def _folder(package: str) -> str:
    """The path of an imported package's folder, with a slash; "" if not imported."""
    path = getattr(sys.modules.get(package), "__file__", None)
    return os.path.join(os.path.dirname(path), "") if path else ""


def _short(call: str) -> str:
    """A frame in short: `model.py:12 (f)` for `/home/me/model.py:12:8 (f)`.

    Here `/home/me` is the current directory; a path outside of it stays whole.
    """
    match = re.fullmatch(r"(.+?):(\d+)(?::\d+)? \((?:.*<locals>\.)?(.+)\)", call)
    if match is None:
        return call
    file, line, function = match.groups()
    return f"{file.removeprefix(os.path.join(os.getcwd(), ''))}:{line} ({function})"
