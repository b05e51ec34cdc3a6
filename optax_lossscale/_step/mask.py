"""The argument `mask`: gradients that are neither unscaled nor checked.

The mask excludes leaves that are not gradients but new values of their parameters, such
as Flax's float8 scales, which the loss scale does not multiply. The inner optimizer
sees them beside the unscaled gradients of the others.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from optax_lossscale._arrays.messages import refuse
from optax_lossscale._arrays.validation import is_function

# A bool; a tree of bools; or a function from the gradients to either. The types name
# the usual containers; for others, use a function.
Mask: TypeAlias = (
    bool
    | np.bool_
    | Mapping[Any, "Mask"]
    | tuple["Mask", ...]
    | list[Any]
    | Callable[[Any], Any]
)


def kept_leaves(mask: Mask, grads: Any) -> tuple[bool, ...]:
    """Whether the mask keeps each gradient, in the order of the leaves."""
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
    """Raises unless a mask is None, a function, or a tree of bools."""
    if is_function(mask):
        return
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            refuse("mask", leaf, "a tree of bools, or a function from gradients to one")
