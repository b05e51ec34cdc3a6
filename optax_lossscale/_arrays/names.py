"""What things are called: in reports, and in which order; and where what is public lives."""

import math
import re
from typing import Any

from jax.tree_util import keystr


def make_public(module: str, *things: Any) -> None:
    """Makes a public module the home of classes and functions, which a private file defines.

    It is what reprs, pickles and tracebacks name.
    """
    for thing in things:
        thing.__module__ = module


def path_name(path: Any) -> str:
    """A leaf's path as its user knows it: `decoder/layer_3/kernel`."""
    return keystr(path, simple=True, separator="/") or "."


def natural(name: str) -> list[tuple[str, int]]:
    """A key by which layer_2 precedes layer_10."""
    parts = re.findall(r"(\D*)(\d*)", name)
    return [(text, int(digits or 0)) for text, digits in parts]


def without_numbers(name: str) -> str:
    """What the names of layers have in common: `blocks/*/mlp/w1` for `blocks/3/mlp/w1`."""
    return re.sub(r"(?<![^\W_])\d+(?![^\W_])", "*", name)


def scale_name(scale: float) -> str:
    """A scale as text: `2**15`, or decimals if it is no power of two."""
    mantissa, exponent = math.frexp(scale)
    is_power = mantissa == 0.5
    return f"2**{exponent - 1}" if is_power else f"{scale:g}"
