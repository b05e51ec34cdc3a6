"""Errors and warnings that name what the user wrote: arguments, values and lines.

An argument may change its name before it is checked: `with_loss_scale(tx, -1)` passes
the number on as `scale`. The error should still say "loss_scale must be …, got -1", so
the call is made under `user_names(loss_scale="scale")`, and `refuse` then replaces
`scale` with `loss_scale`.
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
"""Packages to whose lines no warning points: this one and frameworks.

Frameworks call the user's functions, so their frames may lie between the user's line
and ours.
"""

# The user's name for an argument, by the name under which it was passed on
_USER_NAMES: ContextVar[Mapping[str, str]] = ContextVar(
    "user_names", default=MappingProxyType({})
)

# These limits and that of 300 characters in `shown` keep an error readable, whatever
# was passed.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = 60
_SHORT.maxother = 100


def shown(value: Any) -> str:
    """Returns the repr of a value for an error message, in at most 300 characters."""
    text = _SHORT.repr(value)
    return textwrap.shorten(text, 300, placeholder="…")


def warn(text: str) -> None:
    """Issues a warning that points to the innermost line outside `LIBRARIES`.

    Does nothing while `diagnose` traces the function, because `diagnose` reports on
    dtypes itself.
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
    """Returns the name that `user_names` has set for an argument, or `name` itself."""
    return _USER_NAMES.get().get(name, name)


@contextlib.contextmanager
def user_names(**arguments: str) -> Iterator[None]:
    """Makes `refuse` replace the names of arguments with the user's names for them.

    Use it as a context manager or as a decorator of the function that passes arguments
    on. Each keyword is an argument of that function, and its value is the name under
    which the argument is passed on: `user_names(init_scale="initial_scale")`. Nested
    uses combine.
    """
    names = dict(_USER_NAMES.get())
    for argument, passed_name in arguments.items():
        names[passed_name] = user_name(argument)
    token = _USER_NAMES.set(names)
    try:
        yield
    finally:
        _USER_NAMES.reset(token)
