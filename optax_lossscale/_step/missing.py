"""A missing gradient: its parameter stays as it is, and so does what inner keeps of it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._arrays.precision import at_least_float32


def as_inner_sees(x: Any) -> Any:
    """A parameter as the inner optimizer sees it: in float32 or wider; zeros for PRNG keys."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.zeros(x.shape, jnp.float32)
    return at_least_float32(x)


def fill_missing(grads: Any, params: Any) -> Any:
    """Zeros for missing gradients, as an inner state has a place for every parameter.

    Raises:
      ValueError: unless the gradients' structure is then the parameters'.
    """
    if params is None or isinstance(params, optax.LookaheadParams):
        return grads
    fill = lambda p, g: jnp.zeros_like(as_inner_sees(p)) if _is_missing(g) else g
    try:
        filled = jax.tree.map(fill, params, grads)
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
    """The updates, None where the gradient is missing."""
    if not _any_missing(grads):
        return updates
    drop = lambda g, u: None if _is_missing(g) else u
    return jax.tree.map(drop, grads, updates, is_leaf=_is_missing)


def zeros_for_missing(updates: Any, params: Any) -> Any:
    """The updates, zero for a parameter that has none."""
    if params is None:
        return updates
    zeros = lambda u, p: jnp.zeros_like(as_inner_sees(p)) if u is None and p is not None else u
    return jax.tree.map(zeros, updates, params, is_leaf=lambda u: u is None)


def keep_slots(
    inner: optax.GradientTransformation, new: optax.OptState, old: optax.OptState, grads: Any
) -> optax.OptState:
    """The new inner state, but for what it keeps of parameters whose gradient is missing.

    Raises:
      ValueError: if the inner state does not tell what it keeps of which parameter.
    """
    if not _any_missing(grads):
        return new
    paths, _ = jax.tree.flatten_with_path(grads, is_leaf=_is_missing)
    missing = {path for path, grad in paths if _is_missing(grad)}
    # By path: some slots are trees themselves (of SM3), others are missing (under a mask).
    is_own = lambda path, _: any(path[:n] in missing for n in range(len(path) + 1))
    try:
        is_kept = optax.tree.map_params(
            inner.init,
            lambda slots: jax.tree.map_with_path(is_own, slots),
            new,
            transform_non_params=lambda _: False,
            is_leaf=lambda _: True,
        )
    except Exception as error:
        raise ValueError(
            "inner does not tell which part of its state belongs to a parameter whose gradient "
            "is None, as optax.tree.map_params cannot read it: give zeros for that gradient, or "
            "leave the parameter out with optax.masked inside the wrapper"
        ) from error
    return jax.tree.map(lambda kept, n, o: o if kept else n, is_kept, new, old)


def _any_missing(grads: Any) -> bool:
    return any(map(_is_missing, jax.tree.leaves(grads, is_leaf=_is_missing)))


def _is_missing(grad: Any) -> bool:
    """None, or the float0 that JAX gives for an integer."""
    return grad is None or getattr(grad, "dtype", None) == jax.dtypes.float0
