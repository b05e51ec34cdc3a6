"""What a step may be given besides a state, and the errors that say so."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optax_lossscale._arrays.names import path_name
from optax_lossscale._scales.validation import shown

Mask = Any | Callable[[Any], Any]


def refuse_other_leaves(name: str, tree: Any) -> None:
    """Raises for a tree with leaves that are neither arrays nor numbers."""
    for path, x in jax.tree.leaves_with_path(tree):
        if not hasattr(x, "dtype") and not isinstance(x, (bool, int, float, complex)):
            raise TypeError(
                f"{name} must be a tree of arrays, got {shown(x)} at {path_name(path)}; of a "
                "model that holds other things give the arrays alone, as eqx.filter(model, "
                "eqx.is_inexact_array) does"
            )


def refuse_other_shapes(grads: Any, params: Any) -> None:
    """Raises unless each gradient has its parameter's shape, or a batch of it."""

    def check(path, p, g):
        shape, batch = np.shape(p), np.shape(g)[: np.ndim(g) - np.ndim(p)]
        if np.shape(g) != (*batch, *shape):
            raise ValueError(
                f"a gradient must have the shape of its parameter, {shape} at "
                f"{path_name(path)}; got {np.shape(g)}"
            )

    jax.tree.map_with_path(check, params, grads)


def mask_of(grads: Any, mask: Mask | None) -> Any:
    """The mask as a prefix of the gradients, made of bools."""
    if callable(mask):
        mask = mask(grads)
        refuse_other_masks(mask)
    if mask is None:
        return True
    try:
        jax.tree.broadcast(mask, grads)
    except ValueError as error:
        raise ValueError(
            "mask must be a prefix of the gradients' tree, with a bool for each leaf or branch; "
            f"got {jax.tree.structure(mask)} for {jax.tree.structure(grads)}"
        ) from error
    return mask


def refuse_other_masks(mask: Mask | None) -> None:
    """Raises for what is neither a function nor a tree of bools."""
    for leaf in [] if callable(mask) else jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            raise TypeError(
                "mask must be a tree of bools, or a function from the gradients to one; got "
                f"{shown(leaf)} in it"
            )
