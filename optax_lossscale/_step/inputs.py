"""What a step is given: checked, and completed where gradients are missing."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import at_least_float32, is_array, is_inexact
from optax_lossscale._arrays.validation import is_numeric, is_traced, refuse, shown
from optax_lossscale._arrays.variables import find, plain
from optax_lossscale._scales.loss_scale import LossScale

# Bools, a tree of them, or a function that returns one; for other containers, use a
# function.
Mask: TypeAlias = (
    bool
    | np.bool_
    | Mapping[Any, "Mask"]
    | tuple["Mask", ...]
    | list[Any]
    | Callable[[Any], Any]
)

_static: Any = partial(dataclasses.field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a step was given, checked and completed.

    A `mask` divides the leaves of the gradients in two lists, with None in each for
    those of the other. Without one, all are in `grads`, in their own tree.
    """

    grads: Any  # as they came or unscaled, with zeros where one is missing
    params: Any  # or None
    value: jax.Array | None = None  # the true loss, shape ()
    # The paths of leaves and branches without a gradient: they stay, as does what inner
    # keeps.
    missing: frozenset[Any] = _static(default=frozenset())
    left_out: Any = None  # by the mask: neither scaled nor checked
    structure: Any = _static(default=None)  # of both, if there is a mask

    def unscaled(self, loss_scale: LossScale) -> Self:
        """With unscaled gradients, in float32 or wider."""
        # A compiled step unscales in the branches of several platforms, but traces it
        # once.
        unscale = _unscale_traced_once if is_traced(loss_scale) else _unscale
        return dataclasses.replace(self, grads=unscale(loss_scale, self.grads))

    def finite(self) -> Self:
        """With zeros for what is not finite, in the loss and in the gradients checked."""
        # Each by itself, without waiting for the check: so a clip's norm is computed in
        # the same pass.
        grads, value = jax.tree.map(_zero_unless_finite, (self.grads, self.value))
        return dataclasses.replace(self, grads=grads, value=value)

    def all_grads(self) -> Any:
        """The gradients in their own tree, as inner takes them."""
        if self.structure is None:
            return self.grads
        pairs = zip(self.grads, self.left_out, strict=True)
        leaves = [left_out if grad is None else grad for grad, left_out in pairs]
        return self.structure.unflatten(leaves)

    def moved(self, move: Callable[[Any, Any], Any], updates: Any) -> Any:
        """`move(param, update)` for each parameter; without a gradient, its update is None."""
        is_pair = isinstance(self.params, optax.LookaheadParams)

        def moved(path, param, update):
            path_of_grad = path[1:] if is_pair else path
            if self.is_missing(path_of_grad):
                update = None
            return move(param, update)

        return jax.tree.map_with_path(moved, self.params, updates)

    def slots_kept(self, init: Callable[[Any], Any], new: Any, old: Any) -> Any:
        """The new inner state, except for what it keeps for parameters without a gradient."""
        if not self.missing:
            return new

        def are_missing(slots):
            # By path: some slots are trees themselves (SM3's), others are missing
            # (under a mask).
            return jax.tree.map_with_path(lambda path, _: self.is_missing(path), slots)

        without_gradient = optax.tree.map_params(
            init,
            are_missing,
            new,
            transform_non_params=lambda _: False,
            is_leaf=lambda _: True,
        )

        def chosen(is_missing, new, old):
            return old if is_missing else new

        return jax.tree.map(chosen, without_gradient, new, old)

    def is_missing(self, path: Any) -> bool:
        """Whether there was no gradient at a path, or for the branch in which it lies."""
        if not self.missing:
            return False
        return any(path[:length] in self.missing for length in range(len(path) + 1))


def prepare(
    grads: Any, params: Any, value: ArrayLike | None, mask: Mask | None
) -> Prepared:
    """Checks what a step was given, and completes it."""
    if find(lambda x: isinstance(x, optax.MaskedNode), grads):
        raise ValueError(
            "with_loss_scale is inside optax.masked, optax.partition or "
            "optax.multi_transform, which pass the gradients of all other parameters "
            "on as they are, scaled: wrap the whole of it, as in "
            "with_loss_scale(optax.masked(inner, mask))"
        )
    check_arrays("the gradients", grads)
    completed = complete(grads, params)
    if params is not None:
        _check_shapes(completed.grads, _like(params))
    loss = None if value is None else _true_loss(value)
    prepared = dataclasses.replace(completed, value=loss)
    return prepared if mask is None else _divided(prepared, mask)


def complete(grads: Any, params: Any) -> Prepared:
    """The gradients with zeros for missing ones, as inner has a place for every parameter."""
    leaves = jax.tree.leaves_with_path(grads, is_leaf=_has_no_gradient)
    missing = frozenset(path for path, g in leaves if _has_no_gradient(g))
    if params is None:
        return Prepared(grads, None, missing=missing)
    like = _like(params)

    def or_zeros(grad, branch):
        """A gradient, or zeros for the branch of parameters that it is missing for."""
        if not _has_no_gradient(grad):
            return grad
        return jax.tree.map(lambda p: jnp.zeros_like(as_inner_sees(p)), branch)

    try:
        completed = jax.tree.map(or_zeros, grads, like, is_leaf=_has_no_gradient)
    except ValueError:
        completed = None
    if jax.tree.structure(completed) != jax.tree.structure(like):
        raise ValueError(
            "the gradients must have the structure of the parameters, with None where "
            "there is no gradient.\nGradients: "
            f"{jax.tree.structure(grads)}\nParameters: {jax.tree.structure(like)}"
        )
    return Prepared(completed, params, missing=missing)


def as_inner_sees(x: Any) -> Any:
    """A parameter as the inner optimizer sees it: in float32 or wider; zeros for PRNG keys."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.zeros(x.shape, jnp.float32)
    return at_least_float32(x)


def update_or_zero(param: Any, update: Any) -> Any:
    """A parameter's update, zero where it has none."""
    return jnp.zeros_like(as_inner_sees(param)) if update is None else update


def check_arrays(name: str, tree: Any) -> None:
    """Raises for a tree with leaves that are neither arrays nor numbers."""
    for path, x in jax.tree.leaves_with_path(tree):
        if not is_array(x):
            raise TypeError(
                f"{name} must be a tree of arrays, got {shown(x)} at "
                f"{path_name(path)}, which is not an array. Take the arrays out of a "
                "model that holds other things: in Equinox, params, static = "
                "eqx.partition(model, eqx.is_inexact_array), and differentiate a "
                "function of params that calls eqx.combine(params, static); or use "
                "eqx.filter_value_and_grad on a loss that is scale_gradient(loss, "
                "state)"
            )


def check_update_shape(param: Any, update: Any) -> None:
    """Raises for an update that does not have the shape of its parameter."""
    shape = np.shape(param)
    if np.shape(update) != shape:
        raise ValueError(
            f"the update of a parameter of shape {shape} has the shape "
            f"{np.shape(update)}; average the gradients of a batch first"
        )


def check_mask(mask: Mask | None) -> None:
    """Raises for what is neither a function nor a tree of bools."""
    if callable(mask):
        return
    allowed = "a tree of bools, or a function from the gradients to one"
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            refuse("mask", leaf, allowed)


def check_scalar(name: str, x: Any) -> None:
    """Raises unless this is a real number, shape ()."""
    if not is_numeric(x) or np.iscomplexobj(x):
        raise TypeError(
            f"{name} must be a real number, got {shown(x)}; of a pair (loss, aux), or "
            "of several losses in a dict, pass the loss alone; if a function returns "
            "the pair, set has_aux=True"
        )
    shape = np.shape(x)
    if shape:
        raise TypeError(
            f"{name} must be a scalar, got shape {shape}; reduce it, say by jnp.mean"
        )


def _divided(prepared: Prepared, mask: Mask) -> Prepared:
    """What a step was given, with the gradients that a mask leaves out by themselves."""
    if callable(mask):
        mask = mask(prepared.grads)
        check_mask(mask)
    try:
        flags = jax.tree.leaves(jax.tree.broadcast(mask, prepared.grads))
    except ValueError as error:
        raise ValueError(
            f"mask must be a prefix of the gradients' tree: {error}"
        ) from error
    leaves, structure = jax.tree.flatten(prepared.grads)
    grads = []
    left_out = []
    for leaf, is_kept in zip(leaves, flags, strict=True):
        grads.append(leaf if is_kept else None)
        left_out.append(None if is_kept else at_least_float32(leaf))
    return dataclasses.replace(
        prepared, grads=grads, left_out=left_out, structure=structure
    )


def _unscale(loss_scale: LossScale, grads: Any) -> Any:
    """The gradients divided by the loss scale, in float32 or wider."""
    return loss_scale.unscale(grads)


_unscale_traced_once = jax.jit(_unscale)


def _zero_unless_finite(x: Any) -> Any:
    """The numbers that are finite, and zeros for the others."""
    return jnp.where(jnp.isfinite(x), x, 0) if is_inexact(x) else x


def _like(params: Any) -> Any:
    """The tree that gradients are like: the parameters; for `optax.lookahead`, the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _has_no_gradient(grad: Any) -> bool:
    """None, or the float0 that JAX gives for an integer."""
    return grad is None or getattr(grad, "dtype", None) == jax.dtypes.float0


def _check_shapes(grads: Any, params: Any) -> None:
    """Raises unless each gradient has its parameter's shape, or a batch of it."""
    pairs = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(grads), strict=True)
    for (path, param), grad in pairs:
        shape = np.shape(param)
        dimensions_of_batch = np.ndim(grad) - len(shape)
        if np.shape(grad)[dimensions_of_batch:] != shape:
            raise ValueError(
                f"a gradient must have the shape of its parameter, {shape} at "
                f"{path_name(path)}; got {np.shape(grad)}"
            )


def _true_loss(value: ArrayLike) -> jax.Array:
    """The loss as an array, shape ()."""
    loss = plain(value)
    check_scalar("value, the true loss,", loss)
    return jnp.asarray(loss)
