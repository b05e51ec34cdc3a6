"""Whether a step is applied, and what the loss scale and the skip rule make of it."""

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
from optax_lossscale._scales.headroom import HeadroomLossScale
from optax_lossscale._scales.logmax import LogMaxLossScale
from optax_lossscale._scales.loss_scale import LossScale, choose
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step.inputs import Prepared
from optax_lossscale._step.state import LossScaleState

Skip = SkipRule | Literal["nonfinite"]

# Each is known to find every number that is not finite, so that nothing else need look.
_CHECKING = {LossScale.update, HeadroomLossScale.update, LogMaxLossScale.update}


def decide(
    unscaled: Prepared,
    state: LossScaleState,
    skip: Skip | None,
    axis_name: AxisName | None,
) -> tuple[jax.Array | Literal[True], LossScaleState]:
    """Whether to apply a step, and the state after it, except for its inner state.

    The loss scale learns from steps that are applied, and from gradients that are not
    finite. A step skipped for another reason, by a rule or for its loss, leaves it as
    it was: no other scale would have helped, and what was not applied is no good step.

    The first is a bool, shape (), or the Python bool True where nothing was checked.
    """
    # What is measured is not differentiated.
    grads, value = lax.stop_gradient((unscaled.grads, unscaled.value))
    norm = None
    finite = None
    if state.skip_rule is not None:
        norm, finite = norm_and_all_finite(grads)
        norm = across(lax.pmax, norm, axis_name)
        finite = on_all_replicas(finite, axis_name)
    elif skip is not None and type(state.loss_scale).update not in _CHECKING:
        finite = on_all_replicas(all_finite(grads), axis_name)

    loss_scale, fits = _adapted(state.loss_scale, grads, finite, axis_name)
    if skip is None and fits is True:
        return True, state._replace(loss_scale=loss_scale)

    fits = jnp.asarray(fits, bool)
    loss_is_finite = True
    if skip is not None and value is not None:
        loss_is_finite = on_all_replicas(jnp.isfinite(value), axis_name)
    should_apply = fits & loss_is_finite
    rule = state.skip_rule
    if rule is not None and norm is not None:  # both or neither; type checkers ask
        rule, should_apply = _ruled(rule, norm, value, should_apply, axis_name)
    scale_adapts = loss_is_finite & (should_apply | ~fits)
    loss_scale = choose(scale_adapts, loss_scale, state.loss_scale)
    _check_replicas_agree(should_apply, state)

    skipped = state.skipped_steps
    skipped = jnp.where(should_apply, skipped, optax.safe_increment(skipped))
    in_a_row = state.consecutive_skipped_steps
    in_a_row = jnp.where(should_apply, 0, optax.safe_increment(in_a_row))
    return should_apply, state._replace(
        loss_scale=loss_scale,
        should_apply=should_apply,
        skipped_steps=skipped,
        consecutive_skipped_steps=in_a_row,
        skip_rule=rule,
    )


def _adapted(
    loss_scale: LossScale,
    grads: Any,
    finite: jax.Array | None,
    axis_name: AxisName | None,
) -> tuple[LossScale, jax.Array | bool]:
    """The loss scale after these gradients, and whether it would apply them.

    `finite` says whether they are, or is None if the loss scale alone decides.
    """
    if finite is None:
        return loss_scale.update(grads, axis_name)
    if type(loss_scale).update is LossScale.update:
        # Whether they are finite is all that it looks at, and is already known.
        return loss_scale.adjust(finite), finite
    new, fits = loss_scale.update(grads, axis_name)
    return new, finite & fits


def _ruled(
    rule: SkipRule,
    norm: jax.Array,
    value: jax.Array | None,
    should_apply: jax.Array,
    axis_name: AxisName | None,
) -> tuple[SkipRule, jax.Array]:
    """The rule after a step, and whether to apply that.

    It sees only finite steps, and learns nothing from the others.
    """
    should_apply = should_apply & jnp.isfinite(norm)
    if value is not None:
        value = across(lax.pmean, value.astype(jnp.float32), axis_name)
        should_apply = should_apply & jnp.isfinite(value)
    after_seeing, allowed = rule.update(norm, value)
    unseen = rule.replace(gradient_norm=jnp.inf)
    rule = choose(should_apply, after_seeing, unseen)
    return rule, should_apply & allowed


def _check_replicas_agree(should_apply: jax.Array, state: LossScaleState) -> None:
    """Raises if replicas of a `shard_map` that share a state would decide differently."""
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
