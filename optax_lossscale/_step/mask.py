"""The argument `mask`: gradients that are neither unscaled nor checked.

They carry the new values of their parameters, as those of Flax's float8 scales do, and
were not multiplied by the loss scale. `set_aside` takes them out before the others are
unscaled and checked, and `SetAside.with_others` puts them back for the inner optimizer,
which sees all gradients.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from optax_lossscale._arrays.messages import refuse
from optax_lossscale._arrays.precision import at_least_float32

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SetAside:
    """The gradients that a mask excludes."""

    leaves: list[Any]  # in float32 or wider, with None in the place of each other one
    structure: Any = dataclasses.field(metadata={"static": True})  # of all gradients

    def with_others(self, others: list[Any]) -> Any:
        """The tree of all gradients, from these and the others."""
        pairs = zip(self.leaves, others, strict=True)
        leaves = [other if leaf is None else leaf for leaf, other in pairs]
        return self.structure.unflatten(leaves)


def set_aside(grads: Any, mask: Mask) -> tuple[list[Any], SetAside]:
    """The gradients that a mask keeps, and those that it excludes.

    The kept ones are a list, with None in the place of each excluded one. They are not
    a tree, as a node of the user's own may refuse None.
    """
    if callable(mask):
        mask = mask(grads)
        check_mask(mask)
    try:
        flags = jax.tree.leaves(jax.tree.broadcast(mask, grads))
    except ValueError as error:
        raise ValueError(
            f"mask must be a prefix of the gradients' tree: {error}"
        ) from error
    leaves, structure = jax.tree.flatten(grads)
    kept = []
    excluded = []
    for leaf, is_kept in zip(leaves, flags, strict=True):
        kept.append(leaf if is_kept else None)
        excluded.append(None if is_kept else at_least_float32(leaf))
    return kept, SetAside(excluded, structure)


def check_mask(mask: Mask | None) -> None:
    """Raises unless a mask is None, a function, or a tree of bools."""
    if callable(mask):
        return
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            refuse("mask", leaf, "a tree of bools, or a function from gradients to one")
