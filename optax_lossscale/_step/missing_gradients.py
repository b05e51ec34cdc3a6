"""Leaves parameters without a gradient unchanged.

A gradient is missing if it is None, which freezes its parameter, or a float0 array,
which is JAX's gradient of an integer. The inner optimizer expects a gradient for every
parameter, so `fill_missing` puts zeros in place of missing gradients. Because an
optimizer with weight decay or momentum may move a parameter even if its gradient is
zero, `MissingGradients` records which gradients were missing. After the inner update,
the updates of parameters without a gradient are dropped (`map_updates`), and the slots
of these parameters in the inner state, such as Adam's moments, are restored
(`keep_slots`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lossscale._arrays.checks import path_name, shown
from optax_lossscale._arrays.precision import (
    at_least_float32,
    dtype_of,
    is_inexact_leaf,
    param_for_inner,
)


@dataclasses.dataclass(frozen=True)
class MissingGradients:
    """The places in a gradient tree at which gradients are missing.

    Attributes:
      paths: the paths of missing leaves and of whole branches that are None.
    """

    paths: frozenset[Any]

    def __contains__(self, path: Any) -> bool:
        """Whether the gradient at a path is missing, alone or with a whole branch."""
        return any(path[:length] in self.paths for length in range(len(path) + 1))

    def map_updates(
        self, function: Callable[[Any, Any], Any], params: Any, updates: Any
    ) -> Any:
        """Applies `function(param, update)` to each parameter and its update.

        If the gradient of a parameter is missing, `update` is None. No tree of updates
        contains these Nones, because a custom pytree node may not accept None as a
        child.
        """
        # `optax.lookahead` has a pair of parameter trees, the fast and the slow one, so
        # the path of a parameter is the path of its gradient with one key in front.
        is_pair = isinstance(params, optax.LookaheadParams)

        def mapped(path, param, update):
            grad_path = path[1:] if is_pair else path
            return function(param, None if grad_path in self else update)

        return jax.tree.map_with_path(mapped, params, updates)

    def keep_slots(self, init: Callable[[Any], Any], new: Any, old: Any) -> Any:
        """Returns the new inner state, but with old slots where gradients are missing.

        Slots are the arrays that the inner state holds for each parameter, such as
        Adam's moments. Optax finds them by calling the inner optimizer's `init`.
        """
        if not self.paths:
            return new

        def which_are_kept(slots):
            # Slots are matched to parameters by path, not leaf by leaf, because a slot
            # may be a tree itself (in SM3) or missing (under a mask).
            return jax.tree.map_with_path(lambda path, _: path in self, slots)

        kept = optax.tree.map_params(
            init,
            which_are_kept,
            new,
            transform_non_params=lambda _: False,
            is_leaf=lambda _: True,  # passes each tree of slots as a whole
        )

        def select(is_kept, new, old):
            return old if is_kept else new

        return jax.tree.map(select, kept, new, old)


def fill_missing(grads: Any, params: Any) -> tuple[Any, MissingGradients]:
    """Puts zeros in place of missing gradients; returns `(grads, missing)`.

    The result has the structure of the parameters. Without parameters, it is not known
    where zeros belong, so the gradients are returned unchanged.
    """
    leaves = jax.tree.leaves_with_path(grads, is_leaf=_is_missing)
    missing = MissingGradients(frozenset(path for path, x in leaves if _is_missing(x)))
    if params is None:
        return grads, missing
    differentiated = differentiated_params(params)

    def grad_or_zeros(grad, branch):
        return jax.tree.map(_zero_gradient, branch) if _is_missing(grad) else grad

    try:
        filled = jax.tree.map(grad_or_zeros, grads, differentiated, is_leaf=_is_missing)
    except ValueError as error:
        raise _structure_error(grads, differentiated) from error
    if jax.tree.structure(filled) != jax.tree.structure(differentiated):
        raise _structure_error(grads, differentiated)
    return filled, missing


def differentiated_params(params: Any) -> Any:
    """Returns the parameters with gradients: for `optax.lookahead`, the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def update_or_zeros(param: Any, update: Any) -> Any:
    """Returns the update of a parameter, or zeros if the update is None."""
    return jnp.zeros_like(param_for_inner(param)) if update is None else update


def _zero_gradient(param: Any) -> jax.Array:
    """Returns zeros for the missing gradient of a parameter.

    They are floats for an integer, too: a clip, for example, multiplies them.
    """
    dtype = dtype_of(param) if is_inexact_leaf(param) else jnp.float32
    return at_least_float32(jnp.zeros(np.shape(param), dtype))


def _is_missing(grad: Any) -> bool:
    """Whether a gradient is None, or a float0 array, JAX's gradient of an integer."""
    return grad is None or getattr(grad, "dtype", None) == jax.dtypes.float0


def _structure_error(grads: Any, params: Any) -> ValueError:
    """Builds the error for gradients without the structure of their parameters."""

    def paths(tree):
        return {path_name(path) for path, _ in jax.tree.leaves_with_path(tree)}

    only_in_one = sorted(paths(grads) ^ paths(params))
    listed = f" Only one of the two has {shown(only_in_one)}." if only_in_one else ""
    return ValueError(
        "the gradients must have the structure of the parameters, with None where "
        f"there is no gradient.{listed}\nGradients: {jax.tree.structure(grads)}\n"
        f"Parameters: {jax.tree.structure(params)}"
    )
