"""The inputs of a step: gradients, parameters and loss, validated and completed.

`prepare` validates that they fit each other, and returns them as a `StepInputs`, still
scaled, with zeros for missing gradients. The gradients that a `mask` keeps are then
unscaled, and checked to be finite; those that it excludes are neither.
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
from optax_lossscale._arrays.precision import (
    at_least_float32,
    dtype_of,
    is_array_leaf,
    is_inexact_leaf,
)
from optax_lossscale._arrays.validation import is_real, is_traced
from optax_lossscale._arrays.variables import find_nodes, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.mask import Mask, kept_leaves
from optax_lossscale._step.missing_gradients import (
    MissingGradients,
    completed,
    differentiated_params,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """The inputs of a step, validated and completed."""

    grads: Any  # scaled or unscaled, with zeros where a gradient is missing
    params: Any  # None if the step was given none
    value: jax.Array | None  # the true loss, shape ()
    # Whether the mask keeps a gradient, for each of them; None without a mask
    kept: tuple[bool, ...] | None = dataclasses.field(metadata={"static": True})
    missing: MissingGradients = dataclasses.field(metadata={"static": True})

    def kept_grads(self) -> Any:
        """The gradients that the mask keeps; all of them without a mask.

        With a mask, they are a flat list with None for each excluded one. They are not
        a tree, as a custom node may not accept None in place of an array.
        """
        if self.kept is None:
            return self.grads
        pairs = zip(jax.tree.leaves(self.grads), self.kept, strict=True)
        return [grad if is_kept else None for grad, is_kept in pairs]

    def unscaled_by(self, loss_scale: LossScale) -> Self:
        """A copy with unscaled gradients, in float32 or wider."""
        # A compiled step unscales in several branches; this traces it only once.
        unscale = _unscale_traced_once if is_traced(loss_scale) else _unscale
        return self._with_kept(unscale(loss_scale, self.kept_grads()))

    def with_zeros_for_nonfinite(self) -> Self:
        """A copy with zeros in place of NaN and infinities, in gradients and loss."""
        # What replaces a number depends on that number alone, not on the check. So XLA
        # can compute the norm for a clip in `inner` in the same pass as the check.
        numbers = (self.kept_grads(), self.value)
        grads, value = jax.tree.map(_zero_unless_finite, numbers)
        return dataclasses.replace(self._with_kept(grads), value=value)

    def _with_kept(self, new_grads: Any) -> Self:
        """A copy with new gradients in place of those that the mask keeps.

        Those that the mask excludes are converted to float32 if they are narrow.
        """
        if self.kept is None:
            return dataclasses.replace(self, grads=new_grads)
        leaves, structure = jax.tree.flatten(self.grads)
        pairs = zip(leaves, new_grads, strict=True)
        grads = [at_least_float32(old) if new is None else new for old, new in pairs]
        return dataclasses.replace(self, grads=structure.unflatten(grads))


def prepare(
    grads: Any, params: Any, value: ArrayLike | None, mask: Mask | None
) -> StepInputs:
    """The inputs of a step, validated and completed; the gradients are still scaled."""
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
    if value is not None:
        value = without_variables(value)  # which an `nnx` variable may hold
        check_scalar("value, the true loss,", value)
        value = jnp.asarray(value)
    kept = None if mask is None else kept_leaves(mask, grads)
    return StepInputs(grads, params, value, kept, missing)


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
                f"dtype, as integers are not unscaled; got {dtype_of(grad)} at "
                f"{path_name(path)}"
            )
