"""Errors and warnings in the user's words: names, values and the line of the call.

An argument may change its name before it is checked: a preset that has an argument
`init_scale` passes it on as `initial_scale`. An error should still name `init_scale`,
which is what the user wrote. So the preset is decorated with
`user_names(init_scale="initial_scale")`, and `refuse` looks up the user's name.
"""

import contextlib
import inspect
import reprlib
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NoReturn

from optax_lossscale._arrays.contexts import DIAGNOSING

# Frames of these packages are never the user's line: the user's functions call these
# packages, and are called by them.
LIBRARIES = (
    "einops",
    "equinox",
    "flax",
    "haiku",
    "haliax",
    "jax",
    "jaxtyping",
    "keras",
    "optax",
    "optax_lossscale",
)

# The user's name for an argument, by the name under which it was passed on
_USER_NAMES: ContextVar[Mapping[str, str]] = ContextVar(
    "user_names", default=MappingProxyType({})
)

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = 60
_SHORT.maxother = 100


def shown(value: Any) -> str:
    """The repr of a value for an error message, shortened to at most 300 characters."""
    text = _SHORT.repr(value)
    return textwrap.shorten(text, 300, placeholder="…")


def warn(text: str) -> None:
    """Issues a warning that points to the line of the user's code that led here.

    Does nothing while `diagnose` traces the function, as the report has the warning.
    """
    if DIAGNOSING.value:
        return
    stack_level = 1
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package not in LIBRARIES:
            break
        stack_level += 1
    warnings.warn(text, stacklevel=stack_level)


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """Raises the `ValueError` "`name` must be `allowed`, got `value`"."""
    raise ValueError(f"{user_name(name)} must be {allowed}, got {shown(value)}")


def user_name(name: str) -> str:
    """Returns the user's name for an argument, as set by `user_names`.

    By default, it is the same name.
    """
    return _USER_NAMES.get().get(name, name)


@contextlib.contextmanager
def user_names(**arguments: str) -> Iterator[None]:
    """Makes errors call arguments by the names that the caller has for them.

    Use it as a context manager, or to decorate the caller. Each keyword is an argument
    of the caller, and its value the name under which the argument is passed on, as in
    `user_names(init_scale="initial_scale")`.
    """
    names = dict(_USER_NAMES.get())
    for argument, passed_name in arguments.items():
        names[passed_name] = user_name(argument)
    token = _USER_NAMES.set(names)
    try:
        yield
    finally:
        _USER_NAMES.reset(token)
