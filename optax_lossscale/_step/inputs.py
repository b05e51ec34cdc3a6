"""The inputs of a step: gradients, parameters and loss, checked and completed.

`prepare` makes a `Prepared` of them. It puts zeros where a gradient is missing (None),
as the inner optimizer has a place for every parameter, and remembers the paths, so that
these parameters and their slots in the inner state stay as they are. It checks that
structures and shapes fit. And it sets aside the gradients that a `mask` excludes, which
are neither unscaled nor checked. The methods of `Prepared` unscale the gradients, hand
all of them to the inner optimizer, and restore what has to stay after its update.
"""

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
from optax_lossscale._arrays.precision import (
    at_least_float32,
    dtype_of,
    is_array_leaf,
    is_inexact_leaf,
)
from optax_lossscale._arrays.validation import is_real, is_traced, refuse, shown
from optax_lossscale._arrays.variables import find_nodes, without_variables
from optax_lossscale._scales.loss_scale import LossScale

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

_static: Any = partial(dataclasses.field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """The inputs of a step, checked and completed.

    Without a mask, `grads` is a tree of all gradients. With one, `grads` and `left_out`
    are lists of as many leaves as that tree has, and each leaf is in one of the lists,
    with None in its place in the other.
    """

    grads: Any  # scaled or unscaled, with zeros for missing gradients
    params: Any  # None if the step was given none
    value: jax.Array | None = None  # the true loss, shape ()
    # The paths of leaves and branches of parameters without a gradient
    missing: frozenset[Any] = _static(default=frozenset())
    left_out: Any = None  # the gradients that a mask excludes, in float32 or wider
    structure: Any = _static(default=None)  # of the tree of all gradients, with a mask

    def unscaled(self, loss_scale: LossScale) -> Self:
        """A copy with unscaled gradients, in float32 or wider."""
        # A compiled step unscales in several branches; this traces it only once.
        unscale = _unscale_traced_once if is_traced(loss_scale) else _unscale
        return dataclasses.replace(self, grads=unscale(loss_scale, self.grads))

    def zeroed(self) -> Self:
        """A copy with zeros in place of NaN and infinities, in the loss and `grads`."""
        # Numbers are replaced one by one, without waiting for the result of the check.
        # So the norm of a clip inside is computed in the same pass as the check.
        grads, value = jax.tree.map(_zero_unless_finite, (self.grads, self.value))
        return dataclasses.replace(self, grads=grads, value=value)

    def all_grads(self) -> Any:
        """All gradients in their own tree, also those that the mask left out."""
        if self.structure is None:
            return self.grads
        pairs = zip(self.grads, self.left_out, strict=True)
        leaves = [left_out if grad is None else grad for grad, left_out in pairs]
        return self.structure.unflatten(leaves)

    def map_updates(self, function: Callable[[Any, Any], Any], updates: Any) -> Any:
        """`function(param, update)` of each parameter; the update is None if missing.

        The paths of `optax.lookahead`'s pair of parameter trees, the fast and the slow
        ones, begin with one more key than those of gradients.
        """
        is_pair = isinstance(self.params, optax.LookaheadParams)

        def unless_missing(path, param, update):
            path_of_grad = path[1:] if is_pair else path
            if self.is_missing(path_of_grad):
                update = None
            return function(param, update)

        return jax.tree.map_with_path(unless_missing, self.params, updates)

    def slots_kept(self, init: Callable[[Any], Any], new: Any, old: Any) -> Any:
        """The new inner state, but with the old slots of parameters without gradients.

        Slots are the arrays that the inner state has for each parameter, such as
        Adam's moments. `init` is the inner optimizer's, from which Optax finds them.
        """
        if not self.missing:
            return new

        def are_missing(slots):
            # Slots are matched to parameters by their paths, not leaf by leaf: some are
            # trees themselves (SM3's), and others are missing (under a mask).
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
        """Whether the gradient at a path is missing, or that of a branch around it."""
        return any(path[:length] in self.missing for length in range(len(path) + 1))


def prepare(
    grads: Any, params: Any, value: ArrayLike | None, mask: Mask | None
) -> Prepared:
    """Checks and completes the inputs of a step; the gradients are still scaled."""
    if find_nodes(lambda x: isinstance(x, optax.MaskedNode), grads):
        raise ValueError(
            "with_loss_scale is inside optax.masked, optax.partition or "
            "optax.multi_transform, which pass the gradients of all other parameters "
            "on as they are, scaled: wrap the whole of it, as in "
            "with_loss_scale(optax.masked(inner, mask))"
        )
    check_arrays("the gradients", grads)
    completed = complete(grads, params)
    if params is not None:
        _check_kinds(completed.grads, _like(params))
    loss = None if value is None else _true_loss(value)
    prepared = dataclasses.replace(completed, value=loss)
    return prepared if mask is None else _divided(prepared, mask)


def complete(grads: Any, params: Any) -> Prepared:
    """The gradients with zeros for missing ones, in the structure of the parameters.

    Without parameters, the gradients as they are: where zeros belong is not known.
    """
    leaves = jax.tree.leaves_with_path(grads, is_leaf=_has_no_gradient)
    missing = frozenset(path for path, g in leaves if _has_no_gradient(g))
    if params is None:
        return Prepared(grads, None, missing=missing)
    like = _like(params)

    def or_zeros(grad, branch):
        """A gradient, or zeros like its branch of the parameters if it is missing."""
        if not _has_no_gradient(grad):
            return grad
        return jax.tree.map(lambda p: jnp.zeros_like(as_inner_sees(p)), branch)

    try:
        completed = jax.tree.map(or_zeros, grads, like, is_leaf=_has_no_gradient)
    except ValueError as error:
        raise _other_structure(grads, like) from error
    if jax.tree.structure(completed) != jax.tree.structure(like):
        raise _other_structure(grads, like)
    return Prepared(completed, params, missing=missing)


def _other_structure(grads: Any, params: Any) -> ValueError:
    """The error for gradients that do not have the structure of their parameters."""

    def paths(tree):
        return {path_name(path) for path, _ in jax.tree.leaves_with_path(tree)}

    only_in_one = sorted(paths(grads) ^ paths(params))
    return ValueError(
        "the gradients must have the structure of the parameters, with None where "
        f"there is no gradient. Only one of them has {shown(only_in_one)}.\nGradients: "
        f"{jax.tree.structure(grads)}\nParameters: {jax.tree.structure(params)}"
    )


def as_inner_sees(x: Any) -> Any:
    """A parameter as the inner optimizer sees it: in float32 or wider.

    For a PRNG key, which no optimizer can compute with, zeros of its shape.
    """
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.zeros(x.shape, jnp.float32)
    return at_least_float32(x)


def update_or_zero(param: Any, update: Any) -> Any:
    """The update of a parameter, or zeros if it has none."""
    return jnp.zeros_like(as_inner_sees(param)) if update is None else update


def check_arrays(name: str, tree: Any) -> None:
    """Raises a `TypeError` for a leaf that is neither an array nor a number."""
    for path, x in jax.tree.leaves_with_path(tree):
        if not is_array_leaf(x):
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
    """Raises unless an update has the shape of its parameter."""
    shape = np.shape(param)
    if np.shape(update) != shape:
        raise ValueError(
            f"the update of a parameter of shape {shape} has the shape "
            f"{np.shape(update)}; average the gradients of a batch first"
        )


def check_mask(mask: Mask | None) -> None:
    """Raises unless a mask is a function or a tree of bools."""
    if callable(mask):
        return
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            refuse("mask", leaf, "a tree of bools, or a function from gradients to one")


def check_scalar(name: str, x: Any) -> None:
    """Raises a `TypeError` unless `x` is a real number of shape ()."""
    if not is_real(x):
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
    """The inputs with the gradients that a mask excludes moved to `left_out`."""
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
    """An array with zeros in place of NaN and infinities."""
    return jnp.where(jnp.isfinite(x), x, 0) if is_inexact_leaf(x) else x


def _like(params: Any) -> Any:
    """The parameters that gradients are of: for `optax.lookahead`, the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _has_no_gradient(grad: Any) -> bool:
    """Whether this is None, or a float0 array, JAX's gradient of an integer."""
    return grad is None or getattr(grad, "dtype", None) == jax.dtypes.float0


def _check_kinds(grads: Any, params: Any) -> None:
    """Raises unless each gradient is of its parameter's kind.

    It has the parameter's shape, after any batch axes, and floats if that has floats.
    """
    pairs = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(grads), strict=True)
    for (path, param), grad in pairs:
        shape = np.shape(param)
        dimensions_of_batch = np.ndim(grad) - len(shape)
        if np.shape(grad)[dimensions_of_batch:] != shape:
            raise ValueError(
                f"a gradient must have the shape of its parameter, {shape} at "
                f"{path_name(path)}; got {np.shape(grad)}"
            )
        if is_inexact_leaf(param) and not is_inexact_leaf(grad):
            raise ValueError(
                "the gradient of a floating-point parameter must have a floating-point "
                f"dtype, as another is not unscaled; got {dtype_of(grad)} at "
                f"{path_name(path)}"
            )


def _true_loss(value: ArrayLike) -> jax.Array:
    """The true loss as an array of shape (), also if an `nnx` variable holds it."""
    loss = without_variables(value)
    check_scalar("value, the true loss,", loss)
    return jnp.asarray(loss)
