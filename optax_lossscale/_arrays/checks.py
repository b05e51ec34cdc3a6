"""Checks of arguments, and what errors and warnings are made of.

For example::

    integer("margin", 3, 0, 24)     # 3
    integer("margin", 99, 0, 24)
    # ValueError: margin must be an int between 0 and 24, got 99

All checks run in Python, even while a step is traced, and none reads a traced number.
"""

import inspect
import math
import reprlib
import textwrap
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

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
"""Packages to whose lines no warning points: this one, and those that call the user."""

LARGEST_INT = int(np.iinfo(np.int32).max)
"""The largest int32 number."""

# They keep an error readable, whatever was passed.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = 60
_SHORT.maxother = 100


def shown(value: Any) -> str:
    """Returns the repr of a value for an error message, in at most 300 characters."""
    return textwrap.shorten(_SHORT.repr(value), 300, placeholder="…")


def path_name(path: Any) -> str:
    """Returns a leaf's path as text: `decoder/layer_3/kernel`, or `.` for the root."""
    return keystr(path, simple=True, separator="/") or "."


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """Raises the `ValueError` "`name` must be `allowed`, got `value`"."""
    raise ValueError(f"{name} must be {allowed}, got {shown(value)}")


def warn(text: str) -> None:
    """Issues a warning that points to the innermost line outside `LIBRARIES`.

    Under `diagnose`, which reports on dtypes itself, nothing is issued.
    """
    if DIAGNOSING.value:
        return
    stack_level = 1
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in LIBRARIES:
            break
        stack_level += 1
    warnings.warn(text, stacklevel=stack_level)


def number(name: str, value: Any, least: float, most: float) -> float:
    """Checks that a number lies between two bounds; returns it as a Python float."""
    x = python_number(value)
    if x is None or not least <= x <= most:
        bounds = f"{_bound(least)} and {_bound(most)}"
        refuse(name, value, f"a number between {bounds}")
    return float(x)


def integer(name: str, value: Any, least: int, most: int = LARGEST_INT) -> int:
    """Checks that an int lies between two bounds; returns it as a Python int."""
    x = python_number(value)
    if not isinstance(x, int) or not least <= x <= most:
        refuse(name, value, f"an int between {least} and {most}")
    return x


def python_number(value: Any) -> int | float | None:
    """Converts a number, or an array of shape (), to a Python number.

    Returns None for anything else, including bools and traced arrays.
    """
    is_array = isinstance(value, (np.generic, np.ndarray, jax.Array))
    if is_array and value.shape == () and not is_traced(value):
        value = value.item()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else None


def _bound(x: float) -> str:
    """Writes a bound: as a power of two where that is shorter, else in all digits."""
    mantissa, exponent = math.frexp(x)
    if mantissa != 0.5:
        return str(x)
    return min(str(x), f"2**{exponent - 1}", key=len)


def one_of(name: str, value: Any, options: tuple[Any, ...]) -> Any:
    """Checks that an argument is one of a few options and has their type.

    Without the type, `1` would pass for `True`, which it equals.
    """
    is_of_their_type = type(value) is type(options[0])
    if not is_of_their_type or value not in options:
        refuse(name, value, f"one of {', '.join(map(repr, options))}")
    return value


def floating_dtype(name: str, value: Any) -> np.dtype:
    """Checks that an argument is a dtype of real floating-point numbers."""
    dtype = dtype_or_none(value)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        refuse(name, value, "a floating-point dtype")
    return dtype


def dtype_or_none(value: Any) -> np.dtype | None:
    """Converts a dtype or its name to a NumPy dtype; returns None for anything else."""
    try:
        return None if value is None else jnp.dtype(value)
    except TypeError:
        return None


def is_function(value: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether a value is a function rather than a tree that can be called.

    An Equinox module, for example, is a tree that can be called.
    """
    return callable(value) and jax.tree_util.all_leaves([value])


def check_function(name: str, value: Any) -> None:
    """Raises a `TypeError` unless an argument is callable."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {shown(value)}")


def is_traced(tree: Any) -> bool:
    """Whether a tree contains tracers, whose values are not known yet."""
    leaves = jax.tree.leaves(tree)
    return any(isinstance(x, jax.core.Tracer) for x in leaves)


def check_concrete(name: str, tree: Any) -> None:
    """Raises a `TypeError` if a tree contains tracers, which the host cannot read."""
    if is_traced(tree):
        raise TypeError(
            f"{name} reads numbers on the host: call it outside jit, vmap and grad, on "
            "what the compiled step returned"
        )


def check_successor(new: Any, old: Any, method: str) -> None:
    """Raises a `TypeError` unless `new` may replace `old` in the state of a step.

    A user's `method` has returned `new`. It must have the class and configuration of
    `old`, and state of the same shapes. Dtypes are not checked.
    """
    is_like_old = jax.tree.structure(new) == jax.tree.structure(old) and (
        list(map(np.shape, jax.tree.leaves(new)))
        == list(map(np.shape, jax.tree.leaves(old)))
    )
    if not is_like_old:
        raise TypeError(
            f"the {old._kind} that {type(old).__name__}.{method} returns must have the "
            "class and configuration of the old one, and state of the same shapes. "
            f"Make it with self.replace(…). Got {shown(new)}"
        )


def as_flag(flag: Any, owner: Any, method: str) -> jax.Array:
    """Converts the flag that a user's `method` of `owner` returned to a bool, shape ().

    Raises a `TypeError` if the flag has axes.
    """
    flag = jnp.asarray(flag, bool)
    if flag.shape:
        raise TypeError(
            f"{method} of {type(owner).__name__} must return one flag for the step, of "
            f"shape (), got shape {flag.shape}. Reduce it with jnp.all"
        )
    return flag
