"""Names of leaves, layers and scales in reports and errors, and of public modules.

For example, the leaf `params["blocks"][3]["w1"]` is called `blocks/3/w1`, and the group
of these leaves of all layers is called `blocks/*/w1`. A loss scale of 32768.0 is called
`2**15`.
"""

import math
import re
from typing import Any

from jax.tree_util import keystr


def make_public(module: str, *objects: Any) -> None:
    """Sets the `__module__` of classes and functions from private files.

    Reprs, pickles and the names of exceptions then show the public module. A pickle can
    be loaded even if the private file of its class has moved. The drawback
    is that `inspect.getsource` does not find the classes, as with JAX's own. It still
    finds functions and methods.
    """
    for obj in objects:
        obj.__module__ = module
        if "__firstlineno__" in vars(obj):
            # Since Python 3.13, `inspect.getsource` would return lines of the public
            # module instead.
            del obj.__firstlineno__


def path_name(path: Any) -> str:
    """Returns a leaf's path as text: `decoder/layer_3/kernel`, or `.` for the root."""
    return keystr(path, simple=True, separator="/") or "."


def natural_sort_key(name: str) -> list[tuple[str, int]]:
    """Returns a key that sorts numbers in names by value: layer_2 before layer_10."""
    parts = re.findall(r"(\D*)(\d*)", name)
    return [(text, int(digits or 0)) for text, digits in parts]


def without_numbers(name: str) -> str:
    """Replaces the numbers in a name with `*`, so that layers share it.

    Digits next to a letter stay: `blocks/3/mlp/w1` becomes `blocks/*/mlp/w1`.
    """
    return re.sub(r"(?<![^\W_])\d+(?![^\W_])", "*", name)


def scale_name(scale: float) -> str:
    """Writes a loss scale: `2**15` for a power of two other than 1, else a decimal."""
    mantissa, exponent = math.frexp(scale)
    is_power = mantissa == 0.5 and scale != 1
    return f"2**{exponent - 1}" if is_power else f"{scale:g}"
