"""The decision whether to apply a step, and how loss scale and skip rule adapt to it.

A step is applied if

1. its unscaled gradients are finite (unless `skip=None`), and the loss scale's `update`
   agrees, which by default is the same question;
2. the true loss is finite, if the step is given one (unless `skip=None`);
3. the skip rule, if there is one, does not take it for a spike.

All replicas must decide alike, or their parameters would differ from then on. So with
an `axis_name`, whatever is decided by is first reduced over that axis: flags by a
minimum, the norm by a maximum, and the loss by its mean.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lossscale._arrays.finite import (
    AxisName,
    across,
    all_finite,
    norm_and_all_finite,
    on_all_replicas,
)
from optax_lossscale._arrays.placement import varying_axes
from optax_lossscale._arrays.stateful import check_successor, choose
from optax_lossscale._scales.headroom import HeadroomLossScale
from optax_lossscale._scales.logmax import LogMaxLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step.inputs import Prepared
from optax_lossscale._step.state import LossScaleState

Skip = SkipRule | Literal["nonfinite"]

# These find every number that is not finite. After another `update`, such as that of a
# fixed scale or of the user's own class, the gradients are checked here.
_CHECKING = {LossScale.update, HeadroomLossScale.update, LogMaxLossScale.update}


def decide_step(
    unscaled: Prepared,
    state: LossScaleState,
    skip: Skip | None,
    axis_name: AxisName | None,
) -> tuple[jax.Array | Literal[True], LossScaleState]:
    """Decides about a step; returns `(should_apply, state)`.

    `should_apply` is a bool, shape (), or the Python bool True if nothing was checked.
    `state` is the state after the step, except for its inner state, which is still old.

    The loss scale adapts if the step is applied, or if its gradients are not finite but
    its loss is. A step that a rule skips, or whose loss is not finite, leaves it as it
    was: another scale would not have helped, and a step that was not applied should not
    bring the scale closer to growth.
    """
    # No gradient flows through the decision.
    grads, value = lax.stop_gradient((unscaled.grads, unscaled.value))
    norm, finite = _measured(grads, state, skip, axis_name)
    loss_scale, grads_fit = _adapted(state.loss_scale, grads, finite, axis_name)
    if skip is None and grads_fit is True:
        return True, state._replace(loss_scale=loss_scale)

    grads_fit = jnp.asarray(grads_fit, bool)
    loss_is_finite = True
    if skip is not None and value is not None:
        loss_is_finite = on_all_replicas(jnp.isfinite(value), axis_name)
    should_apply = grads_fit & loss_is_finite
    rule = state.skip_rule
    if rule is not None:
        rule, should_apply = _ruled(rule, norm, value, should_apply, axis_name)
    _check_replicas_agree(should_apply, state)

    scale_adapts = loss_is_finite & (should_apply | ~grads_fit)
    loss_scale = choose(scale_adapts, loss_scale, state.loss_scale)
    new_state = state._replace(loss_scale=loss_scale, skip_rule=rule)
    return should_apply, _counted(new_state, should_apply)


def _measured(
    grads: Any, state: LossScaleState, skip: Skip | None, axis_name: AxisName | None
) -> tuple[Any, Any]:
    """The norm of these gradients, and whether they are finite, on all replicas.

    The norm is None without a skip rule, and both are None if only the loss scale looks
    at the gradients.
    """
    if state.skip_rule is not None:
        norm, finite = norm_and_all_finite(grads)
        norm = across(lax.pmax, norm, axis_name)
        return norm, on_all_replicas(finite, axis_name)
    if skip is None or type(state.loss_scale).update in _CHECKING:
        return None, None
    return None, on_all_replicas(all_finite(grads), axis_name)


def _adapted(
    loss_scale: LossScale,
    grads: Any,
    finite: jax.Array | None,
    axis_name: AxisName | None,
) -> tuple[LossScale, jax.Array | bool]:
    """The loss scale after these unscaled gradients, and whether to apply them.

    `finite` is that of `_measured`. The second result is a bool, shape (), or Python's
    True if nothing was checked.
    """
    if finite is not None and type(loss_scale).update is LossScale.update:
        # This `update` would check again what is already known.
        new = loss_scale.adjust(finite)
        grads_fit = finite
    else:
        new, grads_fit = loss_scale.update(grads, axis_name)
        if finite is not None:
            grads_fit = finite & grads_fit
    check_successor(new, loss_scale, "adjust")
    return new, grads_fit


def _ruled(
    rule: SkipRule,
    norm: jax.Array,
    value: jax.Array | None,
    is_finite: jax.Array,
    axis_name: AxisName | None,
) -> tuple[SkipRule, jax.Array]:
    """The skip rule after a step, and whether to apply the step.

    A rule is given every step, as a compiled step cannot leave it out. But what it
    learns from a step that is not finite is dropped, except that its `gradient_norm`
    becomes infinite.
    """
    is_finite = is_finite & jnp.isfinite(norm)
    if value is not None:
        value = across(lax.pmean, value.astype(jnp.float32), axis_name)
        is_finite = is_finite & jnp.isfinite(value)
    after_seeing, allows = rule.update(norm, value)
    unseen = rule.replace(gradient_norm=jnp.inf)
    return choose(is_finite, after_seeing, unseen), is_finite & allows


def _counted(state: LossScaleState, should_apply: jax.Array) -> LossScaleState:
    """The state with one more step counted, which is applied or skipped."""
    skipped = state.skipped_steps
    skipped = jnp.where(should_apply, skipped, optax.safe_increment(skipped))
    in_a_row = state.consecutive_skipped_steps
    in_a_row = jnp.where(should_apply, 0, optax.safe_increment(in_a_row))
    return state._replace(
        should_apply=should_apply,
        skipped_steps=skipped,
        consecutive_skipped_steps=in_a_row,
    )


def _check_replicas_agree(should_apply: jax.Array, state: LossScaleState) -> None:
    """Raises if replicas that share a state could decide differently.

    JAX's types show that under `shard_map`: `should_apply` then varies along an axis
    along which the state does not.
    """
    axes_of_state = varying_axes(jnp.asarray(state.should_apply))
    axes_apart = varying_axes(should_apply) - axes_of_state
    if axes_apart:
        name, *_ = sorted(map(repr, axes_apart))
        raise ValueError(
            f"the replicas along the axis {name} of a shard_map share their state, and "
            "would each decide alone whether to apply the step, by gradients or a "
            "loss of their own. Let them decide together, with_loss_scale(…, "
            f"axis_name={name}), or give each a state of its own, that varies along "
            "this axis"
        )
