"""What a step is given: checked, and divided by a mask."""

import dataclasses
from collections.abc import Callable, Mapping
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a step was given, checked.

    A `mask` divides the gradients in two trees, with `optax.MaskedNode()` in each for
    the leaves of the other. Without one, all are in `grads`.
    """

    grads: Any  # as they came or unscaled
    left_out: Any  # by the mask: neither scaled nor checked; or None
    params: Any  # or None
    value: jax.Array | None  # the true loss, shape ()

    def unscaled(self, loss_scale: LossScale) -> Self:
        """With unscaled gradients, in float32 or wider."""
        # A compiled step unscales in the branches of several platforms, but traces it
        # once.
        if is_traced(loss_scale):
            unscaled = _unscale(loss_scale, self.grads)
        else:
            unscaled = loss_scale.unscale(self.grads)
        return dataclasses.replace(self, grads=unscaled)

    def finite(self) -> Self:
        """With zeros for what is not finite, in the loss and in the gradients checked."""
        # Each by itself, without waiting for the check: so a clip's norm is computed in
        # the same pass.
        grads, value = jax.tree.map(_zero_unless_finite, (self.grads, self.value))
        return dataclasses.replace(self, grads=grads, value=value)

    def all_grads(self) -> Any:
        """The gradients in their own tree, as inner takes them."""
        if self.left_out is None:
            return self.grads
        return jax.tree.map(
            lambda kept, left_out: left_out if _is_masked(kept) else kept,
            self.grads,
            self.left_out,
            is_leaf=_is_masked,
        )


def prepare(
    grads: Any, params: Any, value: ArrayLike | None, mask: Mask | None
) -> Prepared:
    """Checks what a step was given, and divides the gradients by the mask."""
    if find(_is_masked, grads):
        raise ValueError(
            "with_loss_scale is inside optax.masked, optax.partition or "
            "optax.multi_transform, which pass the gradients of all other parameters "
            "on as they are, scaled: wrap the whole of it, as in "
            "with_loss_scale(optax.masked(inner, mask))"
        )
    check_arrays("the gradients", grads)
    if params is not None:
        check_gradients(grads, params)
    if value is not None:
        value = plain(value)
        check_scalar("value, the true loss,", value)
        value = jnp.asarray(value)
    if mask is None:
        return Prepared(grads, None, params, value)
    if callable(mask):
        mask = mask(grads)
        check_mask(mask)
    try:
        mask_of_all = jax.tree.broadcast(mask, grads)
    except ValueError as error:
        raise ValueError(
            f"mask must be a prefix of the gradients' tree: {error}"
        ) from error

    def part(is_kept):
        """The gradients for which the mask says so."""

        def or_nothing(grad, says):
            return grad if bool(says) == is_kept else optax.MaskedNode()

        return jax.tree.map(or_nothing, grads, mask_of_all)

    left_out = jax.tree.map(at_least_float32, part(False))
    return Prepared(part(True), left_out, params, value)


def check_gradients(grads: Any, params: Any) -> None:
    """Raises unless each parameter has a gradient of its shape, or a batch of such gradients."""
    if isinstance(params, optax.LookaheadParams):
        params = params.fast
    structure = jax.tree.structure(params)
    if jax.tree.structure(grads) != structure:
        raise ValueError(
            "the gradients must have the structure of the parameters. To train some "
            "of these alone, differentiate by all, and let optax.partition freeze the "
            "others: with_loss_scale(optax.partition(…)).\nGradients: "
            f"{jax.tree.structure(grads)}\nParameters: {structure}"
        )

    def check(path, grad, param):
        shape = np.shape(param)
        dimensions_of_batch = np.ndim(grad) - len(shape)
        if np.shape(grad)[dimensions_of_batch:] != shape:
            raise ValueError(
                f"a gradient must have the shape of its parameter, {shape} at "
                f"{path_name(path)}; got {np.shape(grad)}"
            )

    jax.tree.map_with_path(check, grads, params)


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


@jax.jit
def _unscale(loss_scale: LossScale, grads: Any) -> Any:
    """The gradients divided by the loss scale, in float32 or wider."""
    return loss_scale.unscale(grads)


def _zero_unless_finite(x: Any) -> Any:
    """The numbers that are finite, and zeros for the others."""
    return jnp.where(jnp.isfinite(x), x, 0) if is_inexact(x) else x


def _is_masked(x: Any) -> bool:
    """Whether this stands for a leaf that a mask leaves out."""
    return isinstance(x, optax.MaskedNode)
