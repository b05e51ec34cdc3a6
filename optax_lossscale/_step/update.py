"""The inner optimizer's part of a step: from unscaled gradients to parameters or updates."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import optax

from optax_lossscale._arrays.precision import at_least_float32, dtype_of, strong
from optax_lossscale._step.inputs import Prepared, check_update_shape


@dataclasses.dataclass(frozen=True, eq=False)
class InnerUpdate:
    """What one step computes if it is applied, and in which form it gives that."""

    inner: optax.GradientTransformation
    extra_args: Mapping[str, Any]
    to_params: bool  # whether it gives the new parameters, or else the updates
    is_checked: bool  # so that none is applied whose gradients or loss are not finite

    def apply(self, unscaled: Prepared, inner_state: Any) -> tuple[Any, Any]:
        """The new parameters, or the updates that lead there, and the new inner state."""
        params = unscaled.params
        inner = optax.with_extra_args_support(self.inner)
        updates, new_state = inner.update(
            unscaled.all_grads(),
            inner_state,
            jax.tree.map(at_least_float32, params),
            **self._extra_args(inner, unscaled.value),
        )
        if self.to_params:
            updates = jax.tree.map(_param_after, params, updates)

        def in_its_dtype(new, old):
            return strong(new, dtype_of(old))

        return updates, jax.tree.map(in_its_dtype, new_state, inner_state)

    def _extra_args(self, inner: Any, value: jax.Array | None) -> Mapping[str, Any]:
        """What else the inner update is given: the loss, too, if it takes that."""
        parameters = inspect.signature(inner.update).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if value is None or not (takes_any or "value" in parameters):
            return self.extra_args
        return {"value": value, **self.extra_args}


def _param_after(param: Any, update: Any) -> Any:
    """`optax.apply_updates`, in float32 or wider."""
    check_update_shape(param, update)
    moved = optax.apply_updates(at_least_float32(param), update)
    return strong(moved, dtype_of(param))
