"""Decides whether to apply a step, and adapts the loss scale and the skip rule to it.

A step is applied if all of these hold:

1. The unscaled gradients are finite (unless `skip=None`).
2. The loss scale's `update` allows it. By default, `update` makes the same check.
3. The true loss is finite, if it was passed to the step (unless `skip=None`).
4. With a skip rule, the gradient norm is below 2**64, so that its square is finite in
   float32, and the rule accepts the step.

Each of the first three checks may be turned off. It then costs nothing, because its
result is Python's True instead of a bool array (the type `Flag`). The rule decides
last.

If replicas decided differently, their parameters would diverge. With an `axis_name`,
everything that the decision depends on is therefore reduced over that axis first: flags
by a minimum, the norm by a maximum, and the loss by a mean. A loss scale that overrides
`update` receives the axis name and reduces its flag itself.
"""

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lossscale._arrays.finite import (
    AxisName,
    all_finite,
    norm_and_all_finite,
    on_all_replicas,
    reduce_replicas,
)
from optax_lossscale._arrays.placement import varying_axes
from optax_lossscale._arrays.stateful import as_flag, check_successor, choose
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step.inputs import StepInputs
from optax_lossscale._step.state import LossScaleState

Skip = SkipRule | Literal["nonfinite"]

Flag: TypeAlias = jax.Array | Literal[True]
"""A bool array of shape (), or Python's True if nothing was checked."""


def decide_step(
    unscaled: StepInputs,
    state: LossScaleState,
    skip: Skip | None,
    axis_name: AxisName | None,
) -> tuple[Flag, LossScaleState]:
    """Decides whether to apply a step; returns `(should_apply, new_state)`.

    `new_state` is the state after the step, but still with the old inner state.

    The loss scale does not adapt if the loss is not finite, if finite gradients have a
    norm of 2**64 or more, or if the rule skips the step: another scale would not have
    helped, and a skipped step should not count towards the growth of the scale.
    """
    # No gradient flows through the decision.
    grads, value = lax.stop_gradient((unscaled.kept_grads(), unscaled.value))
    norm, grads_finite = _check_gradients(grads, state, skip, axis_name)
    adapted, scale_allows = _adapt(state.loss_scale, grads, grads_finite, axis_name)
    loss_finite: Flag = True
    if value is not None and skip is not None:
        loss_finite = on_all_replicas(jnp.isfinite(value), axis_name)
    passed = grads_finite & scale_allows & loss_finite
    if passed is True:
        # Nothing was checked. The counts stay as they were, so that they cost the step
        # nothing.
        return True, state._replace(loss_scale=adapted)

    passed = jnp.asarray(passed)
    should_apply = passed
    scale_adapts = loss_finite
    rule = state.skip_rule
    if rule is not None:
        assert norm is not None  # for type checkers: it is measured for the rule
        rule, should_apply = _run_rule(rule, norm, value, passed, axis_name)
        # If the step passed the other checks but is skipped here, the loss scale stays
        # as it was.
        scale_adapts = loss_finite & (should_apply | ~passed)
    _check_replicas_agree(should_apply, state)
    loss_scale = choose(scale_adapts, adapted, state.loss_scale)
    new_state = state._replace(loss_scale=loss_scale, skip_rule=rule)
    return should_apply, _count(new_state, should_apply)


def _check_gradients(
    grads: Any, state: LossScaleState, skip: Skip | None, axis_name: AxisName | None
) -> tuple[jax.Array | None, Flag]:
    """Returns the norm of the gradients and whether they are finite on all replicas.

    A skip rule needs the norm, which is computed together with the check. Without a
    rule, the norm is None, and the gradients are checked only if something depends on
    the answer and the loss scale's `update` does not check them itself.
    """
    if state.skip_rule is not None:
        norm, finite = norm_and_all_finite(grads)
        norm = reduce_replicas(lax.pmax, norm, axis_name)
        return norm, on_all_replicas(finite, axis_name)
    checked_by = state.loss_scale._gradients_checked_by
    if checked_by == "step" or (checked_by == "unknown" and skip is not None):
        return None, on_all_replicas(all_finite(grads), axis_name)
    return None, True


def _adapt(
    loss_scale: LossScale, grads: Any, grads_finite: Flag, axis_name: AxisName | None
) -> tuple[LossScale, Flag]:
    """Returns the next loss scale and whether the current one allows the step.

    If a loss scale inherits `LossScale.update`, which would check the gradients again
    only to pass the answer to `adjust`, its `adjust` is called directly, with
    `grads_finite`.
    """
    if loss_scale._gradients_checked_by == "step":
        new = loss_scale.adjust(grads_finite)
        check_successor(new, loss_scale, "adjust")
        return new, True
    new, allows = loss_scale.update(grads, axis_name)
    check_successor(new, loss_scale, "update")
    return new, allows if allows is True else as_flag(allows, loss_scale, "update")


def _run_rule(
    rule: SkipRule,
    norm: jax.Array,
    value: jax.Array | None,
    passed: jax.Array,
    axis_name: AxisName | None,
) -> tuple[SkipRule, jax.Array]:
    """Returns the next skip rule and whether to apply the step.

    `passed` is whether the step passed all other checks. The rule runs on every step,
    without a branch. If the step failed a check, or if its norm or loss is not finite,
    the rule's decision and new state are discarded, and only the rule's `gradient_norm`
    changes: it becomes infinite.
    """
    may_apply = passed & jnp.isfinite(norm)
    if value is not None:
        value = reduce_replicas(lax.pmean, value.astype(jnp.float32), axis_name)
        may_apply = may_apply & jnp.isfinite(value)
    updated, allows = rule.update(norm, value)
    not_updated = rule.replace(gradient_norm=jnp.inf)
    return choose(may_apply, updated, not_updated), may_apply & allows


def _count(state: LossScaleState, should_apply: jax.Array) -> LossScaleState:
    """Counts one more step, applied or skipped."""
    one_more = optax.safe_increment(state.skipped_steps)
    one_more_in_a_row = optax.safe_increment(state.consecutive_skipped_steps)
    return state._replace(
        should_apply=should_apply,
        skipped_steps=jnp.where(should_apply, state.skipped_steps, one_more),
        consecutive_skipped_steps=jnp.where(should_apply, 0, one_more_in_a_row),
    )


def _check_replicas_agree(should_apply: jax.Array, state: LossScaleState) -> None:
    """Raises if replicas that share a state could decide differently.

    Under `shard_map`, JAX tracks the axes along which a value varies. Replicas could
    decide differently if `should_apply` varies along an axis but the state does not.
    With `check_vma=False`, JAX does not track the axes, so nothing is raised.
    """
    axes_of_state = varying_axes(jnp.asarray(state.should_apply))
    axes_apart = varying_axes(should_apply) - axes_of_state
    if axes_apart:
        name = min(map(repr, axes_apart))
        raise ValueError(
            f"the replicas along the axis {name} of a shard_map share their state, but "
            "would each decide alone whether to apply the step, by their own gradients "
            "or loss. Let them decide together, with_loss_scale(…, "
            f"axis_name={name}), or give each replica its own state, which varies "
            "along this axis"
        )
