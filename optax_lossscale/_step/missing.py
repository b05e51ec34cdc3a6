"""A None gradient: its parameter stays as it is, whatever the inner optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._arrays.precision import at_least_float32


def fill_missing(grads: Any, params: Any) -> Any:
    """Zeros for gradients that are None, as an inner state has a place for every parameter.

    Raises:
      ValueError: unless the gradients' structure is then the parameters'.
    """
    if params is None or isinstance(params, optax.LookaheadParams):
        return grads
    zeros_if_none = lambda p, g: jnp.zeros_like(p) if g is None else g
    try:
        filled = jax.tree.map(zeros_if_none, params, grads)
    except ValueError:
        filled = None
    if jax.tree.structure(filled) != jax.tree.structure(params):
        raise ValueError(
            "the gradients must have the structure of the parameters, with None where there is "
            f"no gradient.\nGradients: {jax.tree.structure(grads)}\n"
            f"Parameters: {jax.tree.structure(params)}"
        )
    return filled


def drop_missing(updates: Any, grads: Any) -> Any:
    """The updates, None where the gradient was."""
    if not any(map(_is_none, jax.tree.leaves(grads, is_leaf=_is_none))):
        return updates
    return jax.tree.map(lambda g, u: None if g is None else u, grads, updates, is_leaf=_is_none)


def zeros_for_missing(updates: Any, params: Any) -> Any:
    """The updates, zero for a parameter that has none."""
    if params is None:
        return updates
    zeros = lambda u, p: jnp.zeros_like(at_least_float32(p)) if u is None and p is not None else u
    return jax.tree.map(zeros, updates, params, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None
