"""The argument `mask`, which excludes gradients from unscaling and from the check.

The loss scale multiplies all gradients, but some leaves of a gradient tree are new
values of their parameters instead, such as Flax's float8 scales, and must not be
divided by the loss scale. A mask of bools excludes these leaves::

    mask = {"params": True, "_overwrite_with_gradient": False}

The inner optimizer receives these together with the unscaled gradients.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from optax_lossscale._arrays.checks import is_function, refuse

Mask: TypeAlias = (
    bool
    | np.bool_
    | Mapping[Any, "Mask"]
    | tuple["Mask", ...]
    | list[Any]
    | Callable[[Any], Any]
)
"""A bool, a tree of bools, or a function from the gradients to one of these.

Type checkers accept only the containers that are listed here, so for a tree with other
nodes, pass a function.
"""


def kept_leaves(mask: Mask, grads: Any) -> tuple[bool, ...]:
    """Returns a flag for each leaf of the gradients: whether the mask keeps it."""
    if is_function(mask):
        mask = mask(grads)
        check_mask(mask)
    try:
        flags = jax.tree.broadcast(mask, grads)
    except ValueError as error:
        raise ValueError(
            f"mask must be a prefix of the gradients' tree: {error}"
        ) from error
    return tuple(jax.tree.leaves(flags))


def check_mask(mask: Mask | None) -> None:
    """Raises a `ValueError` unless `mask` is None, a function, or a tree of bools."""
    if is_function(mask):
        return
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            refuse("mask", leaf, "a tree of bools, or a function from gradients to one")
