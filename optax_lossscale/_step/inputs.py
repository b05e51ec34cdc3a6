"""The inputs of a step: gradients, parameters and loss, checked and completed.

`prepare` checks that they fit each other, and returns them as a `Prepared`, still
scaled. There, zeros stand for missing gradients, and those that a `mask` excludes are
set aside, as they are neither unscaled nor checked.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays.messages import shown
from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import dtype_of, is_array_leaf, is_inexact_leaf
from optax_lossscale._arrays.validation import is_real, is_traced
from optax_lossscale._arrays.variables import find_nodes, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.mask import Mask, SetAside, set_aside
from optax_lossscale._step.missing_gradients import (
    MissingGradients,
    completed,
    differentiated_params,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """The inputs of a step, checked and completed."""

    # Scaled or unscaled, with zeros for missing ones; with a mask, the list of those
    # that it keeps
    grads: Any
    params: Any  # None if the step was given none
    value: jax.Array | None  # the true loss, shape ()
    set_aside: SetAside | None  # the gradients that the mask excludes, if there is one
    missing: MissingGradients = dataclasses.field(metadata={"static": True})

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
        """All gradients in one tree, also those that the mask excludes."""
        if self.set_aside is None:
            return self.grads
        return self.set_aside.with_others(self.grads)


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
    grads, missing = completed(grads, params)
    if params is not None:
        _check_fit(grads, differentiated_params(params))
    loss = None if value is None else _true_loss(value)
    excluded = None
    if mask is not None:
        grads, excluded = set_aside(grads, mask)
    return Prepared(grads, params, loss, excluded, missing)


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


def _unscale(loss_scale: LossScale, grads: Any) -> Any:
    """The gradients divided by the loss scale, in float32 or wider."""
    return loss_scale.unscale(grads)


_unscale_traced_once = jax.jit(_unscale)


def _zero_unless_finite(x: Any) -> Any:
    """An array with zeros in place of NaN and infinities."""
    return jnp.where(jnp.isfinite(x), x, 0) if is_inexact_leaf(x) else x


def _check_fit(grads: Any, params: Any) -> None:
    """Raises unless each gradient fits its parameter.

    A gradient that fits has the shape of its parameter, and floats if the parameter has
    floats. Leading batch axes are allowed, for inner transformations that take a
    gradient per example.
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
