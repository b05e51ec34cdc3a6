"""Runs the inner optimizer's update, the part of a step that can be skipped.

Whatever the dtype of the parameters, the inner optimizer receives gradients, parameters
and state in float32 or wider. The updates are also added in float32 or wider, so that
the new parameters are rounded to their own dtype only once, at the end::

    updates, inner_state = inner.update(unscaled_grads, inner_state, float32_params)
    params = (float32_params + updates).astype(params.dtype)
"""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from optax_lossscale._arrays.checks import shown
from optax_lossscale._arrays.precision import (
    at_least_float32,
    dtype_of,
    param_for_inner,
    strongly_typed,
)
from optax_lossscale._step.inputs import StepInputs
from optax_lossscale._step.missing_gradients import update_or_zeros


def as_transformation(inner: Any) -> optax.GradientTransformation:
    """Checks the argument `inner` of a wrapper; returns it as a transformation.

    If it takes extra arguments, `value` may be one of them.

    Raises a `TypeError` if `inner` does not have an `init` and an `update`.
    """
    init = getattr(inner, "init", None)
    update: Any = getattr(inner, "update", None)
    if not callable(init) or not callable(update):
        raise TypeError(
            "inner must be an Optax gradient transformation, with init and update; "
            f"got {shown(inner)}"
        )
    if isinstance(inner, optax.MultiSteps):
        # Its `gradient_transformation` would drop the loss and extra arguments.
        return optax.GradientTransformationExtraArgs(init, update)
    if not isinstance(inner, optax.GradientTransformationExtraArgs):
        # With `optax.with_extra_args_support` here, it could not be pickled.
        return inner
    parameters = inspect.signature(update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if takes_any or "value" in parameters:
        return inner

    def update_without_value(updates, state, params=None, *, value=None, **extra_args):
        return update(updates, state, params, **extra_args)  # such as that of SAM

    return optax.GradientTransformationExtraArgs(init, update_without_value)


@dataclasses.dataclass(frozen=True, eq=False)
class InnerUpdate:
    """The inner optimizer's update in one step, with its extra arguments.

    Attributes:
      inner: the inner optimizer.
      extra_args: the caller's keyword arguments, passed on to the inner update.
      to_params: whether to return new parameters instead of updates.
    """

    inner: optax.GradientTransformation
    extra_args: Mapping[str, Any]
    to_params: bool

    def run(self, unscaled: StepInputs, inner_state: Any) -> tuple[Any, Any]:
        """Runs the update; returns new parameters or updates, and the new inner state.

        The new inner state has the dtypes of the old one and keeps the old slots, such
        as Adam's moments, of parameters without a gradient.
        """
        params = unscaled.params
        missing = unscaled.missing
        wide_params = jax.tree.map(param_for_inner, params)
        extra_args = dict(self.extra_args)
        if unscaled.value is not None:
            extra_args["value"] = unscaled.value
        inner = optax.with_extra_args_support(self.inner)
        result, new_state = inner.update(
            unscaled.grads, inner_state, wide_params, **extra_args
        )
        if params is not None:
            param_or_update = _updated_param if self.to_params else update_or_zeros
            result = missing.map_updates(param_or_update, params, result)

        def in_old_dtype(new, old):
            return strongly_typed(new, dtype_of(old))

        new_state = jax.tree.map(in_old_dtype, new_state, inner_state)
        return result, missing.keep_slots(self.inner.init, new_state, inner_state)


def _updated_param(param: Any, update: Any) -> Any:
    """Adds an update to a parameter in float32 or wider and rounds the sum.

    If the update is None, the parameter stays as it is.
    """
    if update is None:
        return strongly_typed(param)
    check_update_shape(param, update)
    new_param = optax.apply_updates(at_least_float32(param), update)
    return strongly_typed(new_param, dtype_of(param))


def check_update_shape(param: Any, update: Any) -> None:
    """Raises unless an update has the shape of its parameter."""
    shape = np.shape(param)
    if np.shape(update) != shape:
        raise ValueError(
            f"the update of a parameter of shape {shape} has the shape "
            f"{np.shape(update)}; average the gradients of a batch first"
        )
