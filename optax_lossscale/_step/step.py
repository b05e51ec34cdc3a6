"""The optimizer step as a whole: unscale, decide, then apply or skip.

`ScaledStep.step` does the following:

1. `inputs.prepare` validates the gradients and puts zeros in place of missing ones.
2. The gradients are divided by the loss scale in the state, the same one that the loss
   was multiplied by.
3. `decide_step` checks whether the gradients and the loss are finite on all replicas
   and then runs the skip rule, if there is one. It returns whether to apply the step,
   and the state with an adapted loss scale.
4. `apply_or_skip` runs the inner optimizer on the unscaled gradients or keeps the
   parameters and the inner state as they were.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays.precision import param_for_inner, strongly_typed
from optax_lossscale._arrays.replicas import AxisName
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step import inputs
from optax_lossscale._step.branch import Branch, apply_or_skip
from optax_lossscale._step.decision import Skip, decide_step
from optax_lossscale._step.mask import Mask
from optax_lossscale._step.master_weights import with_remainders
from optax_lossscale._step.state import (
    LossScaleState,
    check_configuration,
    check_inner_state,
    check_state,
    loss_scale_states_in,
)
from optax_lossscale._step.update import InnerUpdate
from optax_lossscale.skips import SkipRule


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledStep:
    """The step of the optimizer that `with_loss_scale` returns.

    An instance is the `update` of that optimizer. It is not a closure, because
    `apply_gradients` also calls its method `step`.

    Attributes:
      inner: the wrapped optimizer.
      loss_scale: the loss scale before the first step.
      axis_name: the axis or axes over which replicas decide together.
      mask: which gradients are unscaled and checked; None for all.
      branch: how a step is skipped; None for the platform's default.
      skip: which steps are skipped, besides those that the loss scale skips.
    """

    inner: optax.GradientTransformation
    loss_scale: LossScale
    axis_name: AxisName | None
    mask: Mask | None
    branch: Branch | None
    skip: Skip | None

    @property
    def rule(self) -> SkipRule | None:
        """The skip rule in its initial state, or None if `skip` is not a rule."""
        return self.skip if isinstance(self.skip, SkipRule) else None

    def init(self, params: Any) -> LossScaleState:
        """Returns the state before the first step.

        The floats of the inner state are float32 or wider even for 16-bit parameters,
        because small values such as Adam's second moments would underflow in float16.
        """
        inputs.check_arrays("params", params, inputs.FILTER_MODEL)
        return LossScaleState(
            # The arrays are copied, because the state may be donated and `init` called
            # again.
            loss_scale=jax.tree.map(jnp.array, self.loss_scale),
            inner_state=_unaliased(self._init_inner(params), params),
            should_apply=jnp.array(True),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skipped_steps=jnp.zeros((), jnp.int32),
            gradient_norm=None if self.skip is None else jnp.zeros((), jnp.float32),
            skip_rule=jax.tree.map(jnp.array, self.rule),
        )

    def _init_inner(self, params: Any) -> Any:
        """Returns the state of the inner optimizer before the first step."""
        inner_state = self.inner.init(jax.tree.map(param_for_inner, params))
        if loss_scale_states_in(inner_state):
            raise ValueError(
                "a part of inner is wrapped in with_loss_scale already, so its "
                "gradients would be divided by the loss scale twice. Wrap the whole "
                "optimizer, once"
            )
        inner_state = with_remainders(inner_state, self.inner.init, params)
        return jax.tree.map(strongly_typed, inner_state)

    def __call__(
        self,
        updates: Any,
        state: LossScaleState,
        params: Any = None,
        *,
        value: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[Any, LossScaleState]:
        """Takes one step, as the `update` of Optax does; returns `(updates, state)`."""
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
        """Takes one step; returns `(params, state)`.

        With `to_params=False`, returns `(updates, state)`. `value` is the true loss.
        """
        self._check_state(state, params)
        scaled = inputs.prepare(scaled_grads, params, value, self.mask)
        unscaled = scaled.unscaled_by(state.loss_scale)
        skips_nonfinite = self.skip is not None
        should_apply, new_state = decide_step(
            unscaled, state, self.axis_name, skips_nonfinite=skips_nonfinite
        )
        params_or_updates, inner_state = apply_or_skip(
            should_apply,
            InnerUpdate(self.inner, extra_args, to_params=to_params),
            (scaled, state.loss_scale, state.inner_state),  # It unscales them again.
            self.branch,
            skips_nonfinite=skips_nonfinite,
        )
        return params_or_updates, new_state._replace(inner_state=inner_state)

    def _check_state(self, state: Any, params: Any) -> None:
        """Raises unless the state fits this transformation and these parameters."""
        check_state(state)
        check_configuration("loss_scale", state.loss_scale, self.loss_scale)
        check_configuration("skip_rule", state.skip_rule, self.rule)
        if (state.gradient_norm is None) != (self.skip is None):
            raise ValueError(
                "the state is one of another skip: with skip=None its gradient_norm is "
                "None, else a number. Keep the rest of it: "
                "state._replace(gradient_norm=tx.init(params).gradient_norm)"
            )
        if params is not None:
            check_inner_state(state.inner_state, self._init_inner, params)


def _unaliased(state: Any, params: Any) -> Any:
    """Copies arrays of the state that occur in it twice, or among the parameters.

    JAX refuses to donate the same array twice. With the copies, the parameters and the
    state can be donated to a step together.
    """
    seen = {id(param) for param in jax.tree.leaves(params)}

    def copy_if_seen(x):
        if isinstance(x, jax.Array) and id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(copy_if_seen, state)
