"""Errors and warnings in the user's words: names, values and the line of the call.

The name of an argument changes on its way. What a preset calls `init_scale`, it passes
on as `initial_scale`, where it is checked. So that an error names what the user wrote,
the preset is decorated with its names (`user_names`), and `refuse` looks them up.
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

from optax_lossscale._arrays.contexts import IS_REPORTED

_LIBRARIES = ("optax_lossscale", "jax")  # whose frames no warning names

# The user's names of arguments, by those under which they were passed on
_USER_NAMES: ContextVar[Mapping[str, str]] = ContextVar(
    "user_names", default=MappingProxyType({})
)

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = 60
_SHORT.maxother = 100


def shown(value: Any) -> str:
    """A value as text for an error message, shortened to at most 300 characters."""
    return textwrap.shorten(_SHORT.repr(value), 300, placeholder="…")


def warn(text: str) -> None:
    """Warns at the line of the user's code that led here.

    While `diagnose` traces the function, no warning is given: the report contains it.
    """
    if IS_REPORTED.value:
        return
    stack_level = 1
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package not in _LIBRARIES:
            break
        stack_level += 1
    warnings.warn(text, stacklevel=stack_level)


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """Raises the `ValueError` "`name` must be `allowed`, got `value`"."""
    raise ValueError(f"{user_name(name)} must be {allowed}, got {shown(value)}")


def user_name(name: str) -> str:
    """The name that a user knows for this one: that of `user_names`, or itself."""
    return _USER_NAMES.get().get(name, name)


@contextlib.contextmanager
def user_names(**arguments: str) -> Iterator[None]:
    """Makes the errors of what is called here name the arguments of the caller.

    It is a context, and a decorator of a function. Each keyword is an argument of the
    caller, and its value the name under which the argument is passed on, as in
    `user_names(init_scale="initial_scale")`.
    """
    names = {name: user_name(argument) for argument, name in arguments.items()}
    token = _USER_NAMES.set({**_USER_NAMES.get(), **names})
    try:
        yield
    finally:
        _USER_NAMES.reset(token)
