"""Argument checks, which return the value or raise an error that says what is allowed.

For example::

    int_between("margin", 3, least=0, most=24)     # 3
    int_between("margin", 99, least=0, most=24)
    # ValueError: margin must be an int between 0 and 24, got 99

Such a function is a `Check`: it accepts an argument's name and value, and in some cases
keywords that say what is allowed. A check of a number also accepts a NumPy scalar or an
array of shape (), and returns a Python number, which is hashable and can be stored as
JSON.

A function whose name begins with `check_` returns nothing; it raises an error if an
argument has the wrong type or does not fit the others. All checks run in Python, even
while a step is traced, and none reads a traced number.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.messages import refuse, shown, user_name
from optax_lossscale._arrays.precision import dtype_of, is_array_leaf

LEAST_SCALE = 2.0**-60
MOST_SCALE = 2.0**60
"""The bounds of every loss scale.

Neither its reciprocal nor the square of that leaves float32.
"""

SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
"""The smallest positive normal float32 number."""

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""The largest finite float32 number."""

BELOW_ONE = 1 - 2.0**-24
"""The largest float32 number below 1."""

LARGEST_INT = int(np.iinfo(np.int32).max)
"""The largest int32 number."""

Check = Callable[..., Any]
"""A function that checks an argument, called as `check(name, value, **allowed)`."""


def python_number(value: Any) -> int | float | None:
    """Converts a number, or an array of shape (), to a Python number.

    Returns None for anything else, including bools and traced arrays.
    """
    is_array = isinstance(value, (np.generic, np.ndarray, jax.Array))
    if is_array and value.shape == () and not is_traced(value):
        value = value.item()
    is_bool = isinstance(value, bool)
    is_number = isinstance(value, (int, float)) and not is_bool
    return value if is_number else None


def is_real(value: Any) -> bool:
    """Whether a value is a real number or an array of them; bools do not count."""
    if not is_array_leaf(value):
        return False
    dtype = dtype_of(value)
    is_int = jnp.issubdtype(dtype, jnp.integer)
    return is_int or jnp.issubdtype(dtype, jnp.floating)


def number_between(
    name: str, value: Any, *, least: float, most: float, allowed: str | None = None
) -> float:
    """Checks that a number is between `least` and `most`, inclusive; returns a float.

    `allowed` describes the range in the error message.
    """
    if allowed is None:
        allowed = f"a number between {_exact_text(least)} and {_exact_text(most)}"
    x = python_number(value)
    if x is None or not least <= x <= most:
        refuse(name, value, allowed)
    return float(x)


def _exact_text(bound: float) -> str:
    """Returns all digits of a bound, or `2**-126` and the like if that is shorter."""
    digits = str(bound)
    mantissa, exponent = math.frexp(bound)
    if mantissa != 0.5:
        return digits
    power = f"2**{exponent - 1}"
    return min(digits, power, key=len)


def int_between(name: str, value: Any, *, least: int, most: int) -> int:
    """Checks that an int is between `least` and `most`, inclusive."""
    x = python_number(value)
    if not isinstance(x, int) or not least <= x <= most:
        refuse(name, value, f"an int between {least} and {most}")
    return x


# Checks of a number that differ only in its type and range

count = partial(int_between, least=0, most=LARGEST_INT)
positive_int = partial(int_between, least=1, most=LARGEST_INT)
scale = partial(number_between, least=LEAST_SCALE, most=MOST_SCALE)
finite = partial(
    number_between,
    least=-LARGEST_FLOAT32,
    most=LARGEST_FLOAT32,
    allowed="a finite number in float32's range",
)
positive = partial(
    number_between,
    least=SMALLEST_NORMAL,
    most=LARGEST_FLOAT32,
    allowed="a positive number, normal in float32",
)
growth_factor = partial(number_between, least=1, most=LARGEST_FLOAT32)
backoff_factor = partial(
    number_between,
    least=SMALLEST_NORMAL,
    most=1,
    allowed="a number in (0, 1], normal in float32",
)


def scale_or_none(name: str, value: Any) -> float | None:
    """Checks a loss scale that may also be None."""
    return None if value is None else scale(name, value)


def check_bounds(
    min_scale: float | None, initial_scale: float, max_scale: float | None
) -> None:
    """Raises a `ValueError` unless a scale is within its bounds; None is no bound."""
    is_low = min_scale is not None and initial_scale < min_scale
    is_high = max_scale is not None and initial_scale > max_scale
    if not is_low and not is_high:
        return
    bounds = []
    if min_scale is not None:
        bounds.append(f"at least {user_name('min_scale')}={min_scale!r}")
    if max_scale is not None:
        bounds.append(f"at most {user_name('max_scale')}={max_scale!r}")
    refuse("initial_scale", initial_scale, " and ".join(bounds))


def one_of(name: str, value: Any, options: tuple[Any, ...]) -> Any:
    """Checks that an argument is one of a few options and has their type.

    Without the type, `1` would pass for `True`, which it equals.
    """
    is_of_their_type = type(value) is type(options[0])
    if not is_of_their_type or value not in options:
        listed = ", ".join(map(repr, options))
        refuse(name, value, f"one of {listed}")
    return value


def flag(name: str, value: Any) -> bool:
    """Checks that an argument is True or False, not a number."""
    return one_of(name, value, (True, False))


def floating_dtype(name: str, value: Any) -> np.dtype:
    """Checks that an argument is a dtype of real floating-point numbers."""
    floating = dtype_or_none(value)
    if floating is None or not jnp.issubdtype(floating, jnp.floating):
        refuse(name, value, "a floating-point dtype")
    return floating


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


def check_transformation(name: str, value: Any) -> None:
    """Raises a `TypeError` unless an argument is an Optax gradient transformation."""
    init = getattr(value, "init", None)
    update = getattr(value, "update", None)
    if not callable(init) or not callable(update):
        raise TypeError(
            f"{name} must be an Optax gradient transformation, with init and update; "
            f"got {shown(value)}"
        )


def argnums_tuple(value: Any) -> tuple[int, ...]:
    """Converts `argnums`, an int or a sequence of ints, to a tuple.

    Raises a `TypeError` for anything else, and a `ValueError` if an int occurs twice.
    """
    argnums = tuple(value) if isinstance(value, Sequence) else (value,)
    for argnum in argnums:
        is_int = isinstance(argnum, (int, np.integer))
        # A bool is an int, too, but may have been meant for `has_aux`.
        if not is_int or isinstance(argnum, bool):
            raise TypeError(
                f"argnums must be an int or a sequence of ints, got {shown(value)}"
            )
    if len(set(argnums)) < len(argnums):
        raise ValueError(f"argnums must name each argument once, got {shown(value)}")
    return argnums


def is_traced(tree: Any) -> bool:
    """Whether a tree contains tracers, whose values are not known yet."""
    leaves = jax.tree.leaves(tree)
    return any(isinstance(x, jax.core.Tracer) for x in leaves)


def check_concrete(name: str, tree: Any) -> None:
    """Raises a `TypeError` if a tree contains tracers, which the host cannot read."""
    if is_traced(tree):
        raise TypeError(
            f"{name} reads numbers on the host: call it outside jit, vmap and grad, on "
            "what the compiled step returned, or by jax.debug.callback"
        )
