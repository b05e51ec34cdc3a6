"""What arguments may be, and the errors that say so."""

import inspect
import reprlib
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.contexts import IS_REPORTED

SMALLEST = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
LARGEST_INT = int(np.iinfo(np.int32).max)
_OURS = ("optax_lossscale", "jax")


class _Short(reprlib.Repr):
    """Values cut short."""

    def __init__(self):
        super().__init__()
        self.maxlevel = 3
        self.maxstring = 60
        self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        """Without this, one with too many digits is an error, or on Python 3.14 an address."""
        return repr(x) if abs(x) < 10**40 else "<int>"


_SHORT = _Short()


def shown(value: Any) -> str:
    """A value in an error message: never long, whatever it is."""
    text = " ".join(_SHORT.repr(value).split())
    return text if len(text) <= 300 else f"{text[:300]}…"


def warn(text: str) -> None:
    """Warns at the user's line that led here, but not while a report is made of it."""
    if IS_REPORTED.value:
        return
    frames = traceback.walk_stack(inspect.currentframe())
    modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    users = (n for n, name in enumerate(modules) if name.split(".")[0] not in _OURS)
    warnings.warn(text, stacklevel=next(users, 0) + 1)


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """Raises for an argument, and says what is allowed for it."""
    raise ValueError(f"{name} must be {allowed}, got {shown(value)}")


def python_number(value: Any) -> int | float | None:
    """A number, or a concrete array of one, as a Python number; None for anything else."""
    if isinstance(value, (np.generic, np.ndarray, jax.Array)) and value.shape == ():
        if isinstance(value, jax.core.Tracer):
            return None
        value = value.item()
    return (
        None
        if isinstance(value, bool) or not isinstance(value, (int, float))
        else value
    )


def is_numeric(value: Any) -> bool:
    """Whether this is a number or an array of numbers, and not bools."""
    if hasattr(value, "dtype"):
        return jnp.issubdtype(value.dtype, jnp.number)
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def number(allowed: str, holds: Callable[[float], bool]) -> Callable[[str, Any], float]:
    """A check that an argument is a finite number for which `holds`; it returns a Python float."""

    def checked(name: str, value: Any) -> float:
        x = python_number(value)
        if x is None or not abs(x) <= sys.float_info.max or not holds(float(x)):
            refuse(name, value, allowed)
        return float(x)

    return checked


def scale_up_to(largest: float) -> Callable[[str, Any], float]:
    """A check that an argument can be a loss scale, which may not be subnormal."""
    allowed = f"a number between {SMALLEST:.4g} and {largest:.4g}, normal in float32"
    return number(allowed, lambda x: SMALLEST <= x <= largest)


finite = number("a finite number", lambda x: True)
positive = number("a positive number", lambda x: 0 < x <= LARGEST)
scale = scale_up_to(LARGEST)
growth_factor = number(f"a number from 1 to {LARGEST:.4g}", lambda x: 1 <= x <= LARGEST)
backoff_factor = number("a number in (0, 1]", lambda x: 0 < x <= 1)


def in_order(min_scale: float, initial_scale: float, max_scale: float) -> None:
    """Raises unless the first scale lies between its bounds."""
    if not min_scale <= initial_scale <= max_scale:
        allowed = f"between min_scale={min_scale!r} and max_scale={max_scale!r}"
        refuse("initial_scale", initial_scale, allowed)


def count(name: str, value: Any, least: int = 1, most: int = LARGEST_INT) -> int:
    """A whole number between two others."""
    n = python_number(value)
    if not isinstance(n, int) or not least <= n <= most:
        refuse(name, value, f"an int between {least} and {most}")
    return n


def one_of(name: str, value: Any, options: tuple[Any, ...]) -> Any:
    """One of a few values of a type: 1 is not taken for True."""
    if type(value) is not type(options[0]) or value not in options:
        refuse(name, value, f"one of {', '.join(map(repr, options))}")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False, and no number."""
    return one_of(name, value, (True, False))


def floating_dtype(name: str, value: Any) -> np.dtype:
    """A dtype of real floating-point numbers."""
    floating = dtype(value)
    if floating is None or not jnp.issubdtype(floating, jnp.floating):
        refuse(name, value, "a floating-point dtype")
    return floating


def dtype(value: Any) -> np.dtype | None:
    """A dtype, or None for anything that is not one."""
    try:
        return None if value is None else jnp.dtype(value)
    except TypeError:
        return None


def function(name: str, value: Any) -> None:
    """Raises unless an argument can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {shown(value)}")


def argnums(value: Any) -> tuple[int, ...]:
    """Which positional arguments: an int, or a sequence of ints."""
    positions = tuple(value) if isinstance(value, Sequence) else (value,)
    for position in positions:
        if isinstance(position, bool) or not isinstance(position, (int, np.integer)):
            raise TypeError(
                f"argnums must be an int or a sequence of ints, got {shown(value)}"
            )
    if len(set(positions)) < len(positions):
        raise ValueError(f"argnums must name each argument once, got {shown(value)}")
    return positions


def at_hand(name: str, tree: Any) -> None:
    """Raises unless the host can read these numbers: they must not be traced."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        raise TypeError(
            f"{name} reads numbers on the host: call it outside jit, vmap and grad, on "
            "what the compiled step returned, or by jax.debug.callback"
        )


def construct(cls: Callable[..., Any], config: Any) -> Any:
    """`cls(**config)`; an unknown or missing key raises a `ValueError` that lists them all."""
    parameters = inspect.signature(cls).parameters.values()
    allowed = [p.name for p in parameters]
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    if not isinstance(config, dict) or not set(required) <= set(config) <= set(allowed):
        needed = f", of which it needs {', '.join(required)}" if required else ""
        raise ValueError(
            f"the config of {cls.__name__} must be a dict with keys among "
            f"{', '.join(allowed)}{needed}; got {shown(config)}"
        )
    return cls(**config)
