"""Names of layers and scales in reports.

For example, the group of leaves `blocks/3/w1` of all layers is called `blocks/*/w1`. A
loss scale of 32768.0 is called `2**15`.
"""

import math
import re


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
