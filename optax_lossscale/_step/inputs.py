"""Validates the inputs of a step: the gradients, the parameters and the loss.

`prepare` checks that these fit each other and returns them as a `StepInputs`, with
zeros for missing gradients. All gradients are still scaled. The rest of the step
unscales those that the `mask` keeps and checks that they are finite. The others are
*excluded*: neither unscaled nor checked.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays.checks import is_traced, path_name, shown
from optax_lossscale._arrays.precision import (
    at_least_float32,
    dtype_of,
    is_array_leaf,
    is_inexact_leaf,
)
from optax_lossscale._arrays.variables import find_nodes, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.loss import check_scalar
from optax_lossscale._step.mask import Mask, kept_leaves
from optax_lossscale._step.missing_gradients import (
    MissingGradients,
    differentiated_params,
    fill_missing,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """The inputs of a step, after validation.

    Attributes:
      grads: the gradients, scaled or unscaled, with zeros where one is missing.
      params: the parameters, or None if the caller passed none.
      value: the true loss, shape (), or None if the caller passed none.
      kept: for each leaf of `grads`, whether the mask keeps it; None without a mask.
      missing: which gradients were missing.
    """

    grads: Any
    params: Any
    value: jax.Array | None
    kept: tuple[bool, ...] | None = dataclasses.field(metadata={"static": True})
    missing: MissingGradients = dataclasses.field(metadata={"static": True})

    def kept_grads(self) -> Any:
        """Returns the gradients that the mask keeps; without a mask, the whole tree.

        With a mask, the result is a flat list with None for each excluded gradient,
        rather than a tree, because a custom pytree node may not accept None as a child.
        """
        if self.kept is None:
            return self.grads
        pairs = zip(jax.tree.leaves(self.grads), self.kept, strict=True)
        return [grad if is_kept else None for grad, is_kept in pairs]

    def unscaled_by(self, loss_scale: LossScale) -> Self:
        """Returns a copy with unscaled gradients, in float32 or wider."""
        # A compiled step unscales by an adaptive scale in several branches; under
        # `jit`, that is traced only once.
        grads = self.kept_grads()
        if is_traced(loss_scale):
            return self._with_kept_grads(_unscale(loss_scale, grads))
        return self._with_kept_grads(loss_scale.unscale(grads))

    def with_zeros_for_nonfinite(self) -> Self:
        """Returns a copy in which zeros replace NaN and infinities, in the loss too."""
        # Whether an element is replaced depends on that element alone, not on the check
        # of all elements. A norm that `inner` computes for a clip therefore need not
        # wait for the check. Programs compiled for an H100 do both in one pass.
        grads_and_value = (self.kept_grads(), self.value)
        grads, value = jax.tree.map(_zero_unless_finite, grads_and_value)
        return dataclasses.replace(self._with_kept_grads(grads), value=value)

    def _with_kept_grads(self, new_grads: Any) -> Self:
        """Returns a copy in which `new_grads` replace the result of `kept_grads`.

        Excluded gradients are converted to float32 if they are narrower.
        """
        if self.kept is None:
            return dataclasses.replace(self, grads=new_grads)
        leaves, treedef = jax.tree.flatten(self.grads)
        pairs = zip(leaves, new_grads, strict=True)
        grads = [at_least_float32(old) if new is None else new for old, new in pairs]
        return dataclasses.replace(self, grads=treedef.unflatten(grads))


def prepare(
    grads: Any, params: Any, value: ArrayLike | None, mask: Mask | None
) -> StepInputs:
    """Validates the inputs of a step and replaces missing gradients with zeros."""
    if find_nodes(lambda x: isinstance(x, optax.MaskedNode), grads):
        raise ValueError(
            "with_loss_scale is inside optax.masked, optax.partition or "
            "optax.multi_transform, which would leave the gradients of all other "
            "parameters scaled. Wrap the whole of it instead: "
            "with_loss_scale(optax.masked(inner, mask))"
        )
    check_arrays("the gradients", grads)
    check_arrays("params", params, PASS_ARRAYS)
    grads, missing = fill_missing(grads, params)
    if params is not None:
        _check_fit(grads, differentiated_params(params))
    if value is not None:
        value = without_variables(value)  # the loss may be an `nnx` variable
        check_scalar("value, the true loss,", value)
        value = jnp.asarray(value)
    kept = None if mask is None else kept_leaves(mask, grads)
    return StepInputs(grads, params, value, kept, missing)


FILTER_MODEL = "In Equinox, call tx.init(eqx.filter(model, eqx.is_inexact_array))"
"""What to do if `init` receives leaves that are not arrays."""

PASS_ARRAYS = (
    "In Equinox, pass eqx.filter(model, eqx.is_inexact_array), or take the step by "
    "tx.update and eqx.apply_updates(model, updates)"
)
"""What to do if the parameters of a step have such leaves."""

SPLIT_MODEL = (
    "In Equinox, use eqx.filter_value_and_grad on a function that returns "
    "scale_gradient(loss, state). Or take the arrays out of the model, and "
    "differentiate a function of them:\n"
    "    params, static = eqx.partition(model, eqx.is_inexact_array)\n"
    "    loss_fn = lambda params: loss(eqx.combine(params, static))"
)
"""What to do if such leaves are differentiated or are among the gradients."""


def check_arrays(name: str, tree: Any, remedy: str = SPLIT_MODEL) -> None:
    """Raises a `TypeError` if a leaf is neither an array nor a number.

    The error ends with `remedy`.
    """
    for path, x in jax.tree.leaves_with_path(tree):
        if not is_array_leaf(x):
            raise TypeError(
                f"{name} must be a tree of arrays, but the leaf at {path_name(path)} "
                f"is {shown(x)}. {remedy}"
            )


@jax.jit
def _unscale(loss_scale: LossScale, grads: Any) -> Any:
    return loss_scale.unscale(grads)


def _zero_unless_finite(x: Any) -> Any:
    """Replaces NaN and infinities in an array with zeros."""
    return jnp.where(jnp.isfinite(x), x, 0) if is_inexact_leaf(x) else x


def _check_fit(grads: Any, params: Any) -> None:
    """Raises a `ValueError` unless each gradient fits its parameter.

    A gradient must have the shape of its parameter, and be floating-point if the
    parameter is. Further axes in front are allowed, because some inner transformations
    expect a gradient for each example of a batch.
    """
    pairs = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(grads), strict=True)
    for (path, param), grad in pairs:
        shape = np.shape(param)
        batch_ndim = np.ndim(grad) - len(shape)
        if np.shape(grad)[batch_ndim:] != shape:
            raise ValueError(
                f"a gradient must have the shape of its parameter, {shape} at "
                f"{path_name(path)}; got {np.shape(grad)}"
            )
        if is_inexact_leaf(param) and not is_inexact_leaf(grad):
            raise ValueError(
                "the gradient of a floating-point parameter must have a floating-point "
                f"dtype, because integers are not unscaled; got {dtype_of(grad)} at "
                f"{path_name(path)}"
            )
