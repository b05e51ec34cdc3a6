"""The optimizer step: prepare what is given, decide, apply or skip."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._arrays.finite import AxisName
from optax_lossscale._arrays.precision import at_least_float32, strong
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step import inputs, master_weights
from optax_lossscale._step.branch import Branch, apply_or_skip
from optax_lossscale._step.decision import Skip, decide
from optax_lossscale._step.state import (
    LossScaleState,
    check_configuration,
    check_state,
    wrapper_states,
)
from optax_lossscale._step.update import InnerUpdate


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledStep:
    """The optimizer step, and what it needs to know."""

    inner: optax.GradientTransformation
    loss_scale: LossScale
    axis_name: AxisName | None
    mask: inputs.Mask | None
    branch: Branch | None
    skip: Skip | None

    def init(self, params: Any) -> LossScaleState:
        """The state before the first step."""
        inputs.check_arrays("params", params)
        inner_state = self.inner.init(jax.tree.map(at_least_float32, params))
        master_weights.check_order(inner_state)
        inner_state = master_weights.with_rest_of_narrow(
            inner_state, self.inner.init, params
        )
        if wrapper_states(inner_state):
            raise ValueError(
                "a part of inner is wrapped in with_loss_scale already, and would see "
                "its gradients divided by the loss scale twice: wrap the whole "
                "optimizer, once"
            )
        return LossScaleState(
            # Copies: what init returns may be donated, and the optimizer is used again.
            loss_scale=jax.tree.map(jnp.array, self.loss_scale),
            inner_state=_unaliased(jax.tree.map(strong, inner_state), params),
            should_apply=jnp.array(True),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skipped_steps=jnp.zeros((), jnp.int32),
            skip_rule=jax.tree.map(jnp.array, self.rule),
        )

    def __call__(self, updates, state, params=None, *, value=None, **extra_args):
        """The transformation's `update`: one step, to updates; a skipped one gives zeros."""
        return self.step(updates, state, params, value, extra_args, to_params=False)

    @property
    def rule(self) -> SkipRule | None:
        """The rule that decides about finite steps, in its initial state."""
        return self.skip if isinstance(self.skip, SkipRule) else None

    def step(self, scaled_grads, state, params, value, extra_args, *, to_params):
        """One step, to new parameters or to the updates that lead there."""
        check_state(state)
        check_configuration(state, self.loss_scale, self.rule)
        if params is not None:
            master_weights.check_inner_state(
                state.inner_state,
                lambda: jax.eval_shape(self.init, params).inner_state,
            )
        if value is None and self.rule is not None:
            value = extra_args.get("loss")  # its name in MaxText and Levanter
        scaled = inputs.prepare(scaled_grads, params, value, self.mask)
        unscaled = scaled.unscaled(state.loss_scale)
        should_apply, new_state = decide(unscaled, state, self.skip, self.axis_name)
        is_checked = self.skip is not None
        update = InnerUpdate(self.inner, extra_args, to_params, is_checked)
        if should_apply is True:
            new, inner_state = update.apply(unscaled, state.inner_state)
        else:
            new, inner_state = apply_or_skip(
                should_apply, update, scaled, state, self.branch
            )
        return new, new_state._replace(inner_state=inner_state)


def _unaliased(state: Any, params: Any) -> Any:
    """A state that shares no array with the parameters or itself, for both to be donated."""
    seen = {id(p) for p in jax.tree.leaves(params)}

    def unaliased(x):
        is_shared = id(x) in seen
        seen.add(id(x))
        return jnp.copy(x) if is_shared and isinstance(x, jax.Array) else x

    return jax.tree.map(unaliased, state)
