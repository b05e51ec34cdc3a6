"""What leaves of a tree are called, and in which order their names come."""

import re
from typing import Any

from jax.tree_util import keystr


def path_name(path: Any) -> str:
    """A leaf's path as its user knows it: `decoder/layer_3/kernel`."""
    return keystr(path, simple=True, separator="/")


def natural(name: str) -> list[tuple[str, int]]:
    """A key by which layer_2 precedes layer_10."""
    return [(text, int(n or 0)) for text, n in re.findall(r"(\D*)(\d*)", name)]
