"""Parameters without a gradient, which a step leaves as they are.

A gradient is missing where it is None, or a float0 array, JAX's gradient of an integer.
The inner optimizer has a place for every parameter, so `completed` puts zeros there.
But an optimizer may move a parameter whose gradient is zero, by weight decay or
momentum. So `MissingGradients` remembers the paths: after the inner update, it drops
the updates of these parameters, and puts back their slots in the inner state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._arrays.messages import shown
from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import at_least_float32


@dataclasses.dataclass(frozen=True)
class MissingGradients:
    """Where a tree of gradients has none."""

    paths: frozenset[Any]  # of parameters, and of whole branches of them

    def __contains__(self, path: Any) -> bool:
        """Whether the gradient at a path is missing, or that of a branch around it."""
        return any(path[:length] in self.paths for length in range(len(path) + 1))

    def map_updates(
        self, function: Callable[[Any, Any], Any], params: Any, updates: Any
    ) -> Any:
        """`function(param, update)` of each parameter, with None for a missing update."""
        # In `optax.lookahead`'s pair of parameter trees, the fast and the slow one, a
        # path begins with one key more than that of the gradient.
        is_pair = isinstance(params, optax.LookaheadParams)

        def unless_missing(path, param, update):
            path_of_grad = path[1:] if is_pair else path
            if path_of_grad in self:
                update = None
            return function(param, update)

        return jax.tree.map_with_path(unless_missing, params, updates)

    def slots_kept(self, init: Callable[[Any], Any], new: Any, old: Any) -> Any:
        """The new inner state, but with the old slots of parameters without gradients.

        Slots are the arrays that the inner state has for each parameter, such as
        Adam's moments. `init` is the inner optimizer's, from which Optax finds them.
        """
        if not self.paths:
            return new

        def are_kept(slots):
            # Slots are matched to parameters by their paths, not leaf by leaf: some are
            # trees themselves (SM3's), and others are missing (under a mask).
            return jax.tree.map_with_path(lambda path, _: path in self, slots)

        is_kept = optax.tree.map_params(
            init,
            are_kept,
            new,
            transform_non_params=lambda _: False,
            is_leaf=lambda _: True,
        )

        def chosen(is_kept, new, old):
            return old if is_kept else new

        return jax.tree.map(chosen, is_kept, new, old)


def completed(grads: Any, params: Any) -> tuple[Any, MissingGradients]:
    """The gradients in the structure of the parameters, and where they are missing.

    Zeros stand for missing gradients. Without parameters, the gradients are returned as
    they are, as it is not known where zeros belong.
    """
    leaves = jax.tree.leaves_with_path(grads, is_leaf=_is_missing)
    missing = MissingGradients(frozenset(path for path, x in leaves if _is_missing(x)))
    if params is None:
        return grads, missing
    differentiated = differentiated_params(params)

    def or_zeros(grad, branch):
        """A gradient, or zeros like its branch of the parameters if it is missing."""
        return jax.tree.map(_zeros_like, branch) if _is_missing(grad) else grad

    try:
        with_zeros = jax.tree.map(or_zeros, grads, differentiated, is_leaf=_is_missing)
    except ValueError as error:
        raise _other_structure(grads, differentiated) from error
    if jax.tree.structure(with_zeros) != jax.tree.structure(differentiated):
        raise _other_structure(grads, differentiated)
    return with_zeros, missing


def differentiated_params(params: Any) -> Any:
    """The parameters that gradients are of: for `optax.lookahead`, the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def as_inner_sees(param: Any) -> Any:
    """A parameter as the inner optimizer sees it: in float32 or wider.

    For a PRNG key, which no optimizer can compute with, zeros of its shape.
    """
    is_array = isinstance(param, jax.Array)
    if is_array and jnp.issubdtype(param.dtype, jax.dtypes.prng_key):
        return jnp.zeros(param.shape, jnp.float32)
    return at_least_float32(param)


def update_or_zero(param: Any, update: Any) -> Any:
    """The update of a parameter, or zeros if it has none."""
    return _zeros_like(param) if update is None else update


def _zeros_like(param: Any) -> jax.Array:
    """Zeros that stand for the missing gradient or update of a parameter."""
    return jnp.zeros_like(as_inner_sees(param))


def _is_missing(grad: Any) -> bool:
    """Whether this is None, or a float0 array, JAX's gradient of an integer."""
    return grad is None or getattr(grad, "dtype", None) == jax.dtypes.float0


def _other_structure(grads: Any, params: Any) -> ValueError:
    """The error for gradients that do not have the structure of their parameters."""

    def paths(tree):
        return {path_name(path) for path, _ in jax.tree.leaves_with_path(tree)}

    only_in_one = sorted(paths(grads) ^ paths(params))
    listed = f" Only one of them has {shown(only_in_one)}." if only_in_one else ""
    return ValueError(
        "the gradients must have the structure of the parameters, with None where "
        f"there is no gradient.{listed}\nGradients: {jax.tree.structure(grads)}\n"
        f"Parameters: {jax.tree.structure(params)}"
    )
