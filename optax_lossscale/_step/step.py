"""The optimizer step, which unscales, decides, applies or skips, and adapts.

Scaled gradients pass through `ScaledStep.step` as follows. `inputs.prepare` checks
them, and puts zeros where one is missing. They are divided by the loss scale that the
state holds, which is the one that the loss was multiplied by. `decide_step` checks
whether they are finite, on all replicas, and returns whether to apply the step,
together with the state in which the loss scale has adapted. `apply_or_skip` then runs
the inner optimizer on the unscaled gradients, or keeps the parameters and the inner
state as they were.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays.finite import AxisName
from optax_lossscale._arrays.precision import strongly_typed
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step import inputs, master_weights
from optax_lossscale._step.branch import Branch, apply_or_skip
from optax_lossscale._step.decision import Skip, decide_step
from optax_lossscale._step.mask import Mask
from optax_lossscale._step.missing_gradients import as_inner_sees
from optax_lossscale._step.nesting import check_nothing_follows
from optax_lossscale._step.state import (
    LossScaleState,
    check_configuration,
    check_inner_dtypes,
    check_state,
    loss_scale_states_in,
)
from optax_lossscale._step.update import InnerUpdate


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledStep:
    """The step of `with_loss_scale`, with the arguments of that function as fields.

    An instance is the transformation's `update`, where `apply_gradients` finds it.
    """

    inner: optax.GradientTransformation
    loss_scale: LossScale
    axis_name: AxisName | None
    mask: Mask | None
    branch: Branch | None
    skip: Skip | None

    @property
    def rule(self) -> SkipRule | None:
        """The rule that decides about finite steps, in its initial state."""
        return self.skip if isinstance(self.skip, SkipRule) else None

    def init(self, params: Any) -> LossScaleState:
        """The state before the first step, made for parameters in float32 or wider."""
        inputs.check_arrays("params", params)
        return LossScaleState(
            # Copies, as a state may be donated, and `init` may be called again.
            loss_scale=jax.tree.map(jnp.array, self.loss_scale),
            inner_state=_unaliased(self._init_inner(params), params),
            should_apply=jnp.array(True),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skipped_steps=jnp.zeros((), jnp.int32),
            skip_rule=jax.tree.map(jnp.array, self.rule),
        )

    def _init_inner(self, params: Any) -> Any:
        """The inner optimizer's state before the first step."""
        inner_state = self.inner.init(jax.tree.map(as_inner_sees, params))
        if loss_scale_states_in(inner_state):
            raise ValueError(
                "a part of inner is wrapped in with_loss_scale already, and would see "
                "its gradients divided by the loss scale twice: wrap the whole "
                "optimizer, once"
            )
        check_nothing_follows(inner_state)
        with_remainders = master_weights.with_remainders(
            inner_state, self.inner.init, params
        )
        return jax.tree.map(strongly_typed, with_remainders)

    def __call__(self, updates, state, params=None, *, value=None, **extra_args):
        """The transformation's `update`; returns `(updates, state)`."""
        return self.step(updates, state, params, value, extra_args, to_params=False)

    def step(
        self,
        scaled_grads: Any,
        state: LossScaleState,
        params: Any,
        value: ArrayLike | None,
        extra_args: Mapping[str, Any],
        *,
        to_params: bool,
    ) -> tuple[Any, LossScaleState]:
        """Takes one step; returns the new parameters and the new state.

        With `to_params=False`, it returns the updates in place of the parameters.
        """
        self._check_state(state, params)
        if value is None and self.rule is not None:
            value = extra_args.get("loss")  # its name in MaxText and Levanter
        scaled = inputs.prepare(scaled_grads, params, value, self.mask)
        unscaled = scaled.unscaled_by(state.loss_scale)
        should_apply, new_state = decide_step(
            unscaled, state, self.skip, self.axis_name
        )
        update = InnerUpdate(self.inner, extra_args, to_params=to_params)
        new, inner_state = apply_or_skip(
            should_apply,
            update,
            (scaled, state),
            self.branch,
            skips_nonfinite=self.skip is not None,
        )
        return new, new_state._replace(inner_state=inner_state)

    def _check_state(self, state: Any, params: Any) -> None:
        """Raises unless a state is one of this transformation, for these parameters."""
        check_state(state)
        check_configuration("loss_scale", state.loss_scale, self.loss_scale)
        check_configuration("skip_rule", state.skip_rule, self.rule)
        if params is not None:
            master_weights.check_remainders(state.inner_state, self._init_inner, params)
            check_inner_dtypes(state.inner_state, self._init_inner, params)


def _unaliased(state: Any, params: Any) -> Any:
    """A state in which no array occurs twice, or is one of the parameters.

    Parameters and state may then be donated to the step: JAX refuses to donate an array
    twice.
    """
    seen = {id(p) for p in jax.tree.leaves(params)}

    def unaliased(x):
        if isinstance(x, jax.Array) and id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(unaliased, state)
