"""The line of the user's code that made an equation, for messages and reports."""

import os
import re
import sys

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

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


def users_line(eqn: JaxprEqn) -> str:
    """The innermost line of the user's that led to an equation; "" if none did.

    It looks like `model.py:12 (f)`. An equation that JAX cached while a framework
    traced it has none, such as one of a jitted helper that Flax was the first to call.
    """
    folders = tuple(filter(None, map(_folder, _FRAMEWORKS)))
    users = [call for call in _calls(eqn) if not call.startswith(folders)]
    return _short(users[-1]) if users else ""


def line_of(eqn: JaxprEqn, around: str = "") -> str:
    """The user's line that made an equation, or else `around`, or "an unknown line".

    `around` is the line of the equation that holds it; "" if there is none.
    """
    return users_line(eqn) or around or "an unknown line"


def is_of_optax(eqn: JaxprEqn) -> bool:
    """Whether Optax made an equation, other than one of its losses."""
    optax = _folder("optax")
    calls = _calls(eqn)
    if not optax or not calls:
        return False
    is_loss = calls[-1].startswith(os.path.join(optax, "losses"))
    return calls[-1].startswith(optax) and not is_loss


def _calls(eqn: JaxprEqn) -> list[str]:
    """The frames that led to an equation, without JAX's own; the innermost is last."""
    return source_info_util.summarize(eqn.source_info, num_frames=1000).splitlines()


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
