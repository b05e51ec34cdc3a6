"""The line of the user's code that made an equation, for messages and reports.

JAX stores a traceback with each equation. The user's line is the innermost frame of
this traceback that is neither in JAX nor in a framework (`_arrays/checks.py` lists
the frameworks as `LIBRARIES`). For `nn.Dense(3)(x)` in line 12 of `model.py`, the
user's line is `model.py:12 (f)`, not the line of `Dense` that multiplies.
"""

import contextlib
import os
import re
import sys
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from optax_lossscale._arrays.checks import LIBRARIES


def users_line(eqn: JaxprEqn) -> str:
    """Returns the innermost line of the user's code that led to an equation, or "".

    A line is shown as in `model.py:12 (f)`. JAX traces a jitted function once for all
    calls and may not store the frames of its callers, so an equation in a jitted helper
    of JAX or Flax may have no line of the user's.
    """
    folders = map(_package_folder, LIBRARIES)
    imported = tuple(folder for folder in folders if folder)
    for frame in reversed(_frames(eqn)):
        if not frame.startswith(imported):
            return _shortened(frame)
    return ""


def line_of(eqn: JaxprEqn, outer_line: str = "") -> str:
    """Returns the `users_line` of an equation, or else `outer_line`.

    `outer_line` is the line of the equation around it. If both lines are "", the result
    is "an unknown line".
    """
    return users_line(eqn) or outer_line or "an unknown line"


def at_line_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which what is traced gets an equation's line and scopes."""
    source = eqn.source_info
    name_stack = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=name_stack)


def is_made_by_optax(eqn: JaxprEqn) -> bool:
    """Whether code of Optax, other than of its losses, made an equation."""
    optax = _package_folder("optax")
    frames = _frames(eqn)
    if not optax or not frames:
        return False
    innermost = frames[-1]
    is_loss = innermost.startswith(os.path.join(optax, "losses"))
    return innermost.startswith(optax) and not is_loss


def _frames(eqn: JaxprEqn) -> list[str]:
    """Returns the frames that led to an equation, without JAX's own, innermost last.

    At most 1000 frames are read, because this is Python's default limit on recursion.
    """
    summary = source_info_util.summarize(eqn.source_info, num_frames=1000)
    return summary.splitlines()


def _package_folder(package: str) -> str:
    """Returns the path of a package's folder, with a slash; "" if not imported."""
    module = sys.modules.get(package)
    path = getattr(module, "__file__", None)
    if not path:
        return ""
    folder = os.path.dirname(path)
    return os.path.join(folder, "")


def _shortened(frame: str) -> str:
    """Shortens a frame: `/home/me/model.py:12:8 (f)` becomes `model.py:12 (f)`.

    Here `/home/me` is the current directory. A path outside the current directory stays
    whole.
    """
    match = re.fullmatch(r"(.+?):(\d+)(?::\d+)? \((?:.*<locals>\.)?(.+)\)", frame)
    if match is None:
        return frame
    file, line, function = match.groups()
    current_folder = os.path.join(os.getcwd(), "")
    file = file.removeprefix(current_folder)
    return f"{file}:{line} ({function})"
