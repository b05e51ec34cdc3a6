"""Names of leaves, layers and scales in reports and errors, and of public modules."""

import math
import re
from typing import Any

from jax.tree_util import keystr


def make_public(module: str, *things: Any) -> None:
    """Makes a public module the home of classes and functions from private files.

    It is the module that reprs, pickles and tracebacks then name, so a pickle can be
    read after a file has moved. The price, as with JAX's own classes:
    `inspect.getsource` does not find the class. It does find functions and methods.
    """
    for thing in things:
        thing.__module__ = module
        if "__firstlineno__" in vars(thing):
            # From Python 3.13 on, the lines of the public module would be returned.
            del thing.__firstlineno__


def path_name(path: Any) -> str:
    """A leaf's path in a pytree as text: `decoder/layer_3/kernel`; `.` for the root."""
    return keystr(path, simple=True, separator="/") or "."


def natural_sort_key(name: str) -> list[tuple[str, int]]:
    """A key to sort names by, with numbers in order: layer_2 precedes layer_10."""
    parts = re.findall(r"(\D*)(\d*)", name)
    return [(text, int(digits or 0)) for text, digits in parts]


def without_numbers(name: str) -> str:
    """A name with `*` for each number in it, as layers share: `blocks/*/mlp/w1`.

    Digits beside a letter stay, such as those of `w1`.
    """
    return re.sub(r"(?<![^\W_])\d+(?![^\W_])", "*", name)


def scale_name(scale: float) -> str:
    """A loss scale as text: `2**15` for a power of two, otherwise in decimals."""
    mantissa, exponent = math.frexp(scale)
    is_power = mantissa == 0.5
    return f"2**{exponent - 1}" if is_power else f"{scale:g}"
