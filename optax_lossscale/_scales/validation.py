"""What a constructor's argument may be, and the errors that say so."""

import inspect
import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

SMALLEST = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
LARGEST_INT = int(np.iinfo(np.int32).max)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 60, 100


def shown(value: Any) -> str:
    """A value in an error message: never long, whatever it is."""
    try:
        text = " ".join(_SHORT.repr(value).split())
    except ValueError:  # an int of too many digits to be written down
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 300 else f"{text[:300]}…"


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise ValueError(f"{name} must be {allowed}, got {shown(value)}")


def python_number(value: Any) -> int | float | None:
    """A number, or an array of one that is at hand, as a Python number; None for all else."""
    if isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.shape == ():
        if isinstance(value, jax.core.Tracer):
            return None
        value = value.item()
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else value


def is_numeric(value: Any) -> bool:
    """Whether this is a number or an array of numbers, and no bool."""
    if hasattr(value, "dtype"):
        return jnp.issubdtype(value.dtype, jnp.number)
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def real(name: str, value: Any, allowed: str) -> float:
    """A finite Python float."""
    number = python_number(value)
    if number is None or not -sys.float_info.max <= number <= sys.float_info.max:
        refuse(name, value, allowed)
    return float(number)


def scale(name: str, value: Any, largest: float = LARGEST) -> float:
    """A number that float32 holds as a positive, normal value."""
    allowed = f"a number between {SMALLEST:.4g} and {largest:.4g}, normal in float32"
    return bounded(name, value, allowed, lambda x: SMALLEST <= x <= largest)


def count(name: str, value: Any, least: int = 1, most: int = LARGEST_INT) -> int:
    """An int that int32 holds."""
    allowed = f"an int between {least} and {most}"
    number = python_number(value)
    if not isinstance(number, int) or not least <= number <= most:
        refuse(name, value, allowed)
    return number


def bounded(name: str, value: Any, allowed: str, holds: Callable[[float], bool]) -> float:
    """A finite number of which something holds."""
    number = real(name, value, allowed)
    if not holds(number):
        refuse(name, value, allowed)
    return number


def growth_factor(name: str, value: Any) -> float:
    """A number that float32 holds, of at least 1."""
    allowed = f"a number from 1 to {LARGEST:.4g}"
    return bounded(name, value, allowed, lambda x: 1 <= x <= LARGEST)


def backoff_factor(name: str, value: Any) -> float:
    """A number in (0, 1]."""
    return bounded(name, value, "a number in (0, 1]", lambda x: 0 < x <= 1)


def bounds(min_scale: Any, initial_scale: float, max_scale: Any) -> dict[str, float]:
    """A floor and a cap with the initial scale between them."""
    checked = {
        "min_scale": scale("min_scale", min_scale),
        "max_scale": scale("max_scale", max_scale),
    }
    if not checked["min_scale"] <= initial_scale <= checked["max_scale"]:
        allowed = f"between min_scale={min_scale!r} and max_scale={max_scale!r}"
        refuse("initial_scale", initial_scale, allowed)
    return checked


def one_of(name: str, value: Any, options: tuple[Any, ...]) -> None:
    """One of a few values."""
    if type(value) is not type(options[0]) or value not in options:
        refuse(name, value, f"one of {', '.join(map(repr, options))}")


def floating_dtype(name: str, value: Any) -> np.dtype:
    """A dtype of real floating-point numbers."""
    found = dtype(value)
    if found is None or not jnp.issubdtype(found, jnp.floating):
        refuse(name, value, "a floating-point dtype")
    return found


def dtype(value: Any) -> np.dtype | None:
    """A dtype, or None for what is none."""
    try:
        return None if value is None else jnp.dtype(value)
    except TypeError:
        return None


def function(name: str, value: Any) -> None:
    """Something to call."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {shown(value)}")


def argnums(value: Any) -> tuple[int, ...]:
    """Which positional arguments: an int, or a sequence of them."""
    found = tuple(value) if isinstance(value, Sequence) else (value,)
    is_int = lambda n: isinstance(n, (int, np.integer)) and not isinstance(n, bool)
    if not all(map(is_int, found)):
        raise TypeError(f"argnums must be an int or a sequence of ints, got {shown(value)}")
    return found


def at_hand(name: str, tree: Any) -> None:
    """Numbers that the host can read, not traced ones."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            f"{name} reads numbers on the host: call it outside jit, vmap and grad, on what the "
            "compiled step returned"
        )


def construct(cls: Callable[..., Any], config: Any) -> Any:
    """`cls(**config)`, where an unknown or missing key is a `ValueError` that lists all."""
    parameters = inspect.signature(cls).parameters.values()
    allowed = [p.name for p in parameters]
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    if not isinstance(config, dict) or not set(required) <= set(config) <= set(allowed):
        needed = f", of which it needs {', '.join(required)}" if required else ""
        raise ValueError(
            f"the config of {cls.__name__} is a dict with keys among {', '.join(allowed)}"
            f"{needed}; got {shown(config)}"
        )
    return cls(**config)
