"""The decision whether to apply a step, and how loss scale and skip rule adapt to it.

A step is applied if

1. its unscaled gradients are finite (unless `skip=None`), and the loss scale's `update`
   agrees, which by default checks the same;
2. the true loss is finite, if the step is given one (unless `skip=None`);
3. with a skip rule, the norm is finite in float32, that is, below 2**64, and the rule
   does not take the step for a spike.

The answers to 1 and 2 are `Flag`s. The rule is asked last.

All replicas must decide alike, or their parameters would differ from then on. So with
an `axis_name`, all that the decision depends on is first reduced over that axis: flags
by a minimum, the norm by a maximum, and the loss by its mean. A loss scale that
overrides `update` is given the axis, and reduces its flag by itself.
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
from optax_lossscale._arrays.stateful import check_successor, choose
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step.inputs import StepInputs
from optax_lossscale._step.state import LossScaleState

Skip = SkipRule | Literal["nonfinite"]

# A bool, shape (); or Python's True where nothing was checked
Flag: TypeAlias = jax.Array | Literal[True]


def decide_step(
    unscaled: StepInputs,
    state: LossScaleState,
    skip: Skip | None,
    axis_name: AxisName | None,
) -> tuple[Flag, LossScaleState]:
    """Decides about a step; returns `(should_apply, state)`.

    `state` is the state after the step, except for its inner state, which is still old.

    The loss scale adapts to the gradients, unless the loss is not finite or a rule
    skips the step. Another scale would not have helped there, and a step that is not
    applied should not bring the scale closer to growth.
    """
    # No gradient flows through the decision.
    grads, value = lax.stop_gradient((unscaled.kept_grads(), unscaled.value))
    norm, grads_finite = _measure(grads, state, skip, axis_name)
    adapted, scale_agrees = _adapt(state.loss_scale, grads, grads_finite, axis_name)
    loss_finite: Flag = True
    if value is not None and skip is not None:
        loss_finite = on_all_replicas(jnp.isfinite(value), axis_name)
    flag = grads_finite & scale_agrees & loss_finite
    if flag is True:
        # Nothing was checked. The counts stay as they were, so that the step compiles
        # to that of the inner optimizer alone.
        return True, state._replace(loss_scale=adapted)

    may_apply = jnp.asarray(flag)
    should_apply = may_apply
    scale_adapts = loss_finite
    rule = state.skip_rule
    if rule is not None:
        rule, should_apply = _ask_rule(rule, norm, value, may_apply, axis_name)
        is_skipped_by_rule = may_apply & ~should_apply
        scale_adapts = loss_finite & ~is_skipped_by_rule
    _check_replicas_agree(should_apply, state)
    loss_scale = choose(scale_adapts, adapted, state.loss_scale)
    new_state = state._replace(loss_scale=loss_scale, skip_rule=rule)
    return should_apply, _count(new_state, should_apply)


def _measure(
    grads: Any, state: LossScaleState, skip: Skip | None, axis_name: AxisName | None
) -> tuple[Any, Flag]:
    """The norm of the gradients, and whether they are finite, on all replicas.

    The norm is None without a skip rule, which alone needs it. Where neither the loss
    scale nor `skip` needs to know whether they are finite, they are not checked.
    """
    if state.skip_rule is not None:
        norm, finite = norm_and_all_finite(grads)
        norm = reduce_replicas(lax.pmax, norm, axis_name)
        return norm, on_all_replicas(finite, axis_name)
    update = type(state.loss_scale).update
    checks_itself = getattr(update, "checks_gradients", False)
    must_be_finite = skip is not None and not checks_itself
    if must_be_finite or _adapts_to_flag(state.loss_scale):
        return None, on_all_replicas(all_finite(grads), axis_name)
    return None, True


def _adapt(
    loss_scale: LossScale, grads: Any, grads_finite: Flag, axis_name: AxisName | None
) -> tuple[LossScale, Flag]:
    """The loss scale after these unscaled gradients, and whether it would apply them.

    `grads_finite` is that of `_measure`.
    """
    if _adapts_to_flag(loss_scale):
        new = loss_scale.adjust(grads_finite)
        check_successor(new, loss_scale, "adjust")
        return new, True
    new, agrees = loss_scale.update(grads, axis_name)
    check_successor(new, loss_scale, "update")
    return new, agrees if agrees is True else jnp.asarray(agrees, bool)


def _adapts_to_flag(loss_scale: LossScale) -> bool:
    """Whether a loss scale inherits `LossScale.update`, which only asks `adjust`."""
    return type(loss_scale).update is LossScale.update


def _ask_rule(
    rule: SkipRule,
    norm: jax.Array,
    value: jax.Array | None,
    may_apply: jax.Array,
    axis_name: AxisName | None,
) -> tuple[SkipRule, jax.Array]:
    """The skip rule after a step, and whether to apply the step.

    `may_apply` says whether the step would be applied without a rule. The rule is asked
    at every step, which is cheaper than a branch. What it learns from a step that is
    not finite is dropped, except that its `gradient_norm` becomes infinite.
    """
    is_finite = may_apply & jnp.isfinite(norm)
    if value is not None:
        value = reduce_replicas(lax.pmean, value.astype(jnp.float32), axis_name)
        is_finite = is_finite & jnp.isfinite(value)
    after_seeing, allows = rule.update(norm, value)
    unseen = rule.replace(gradient_norm=jnp.inf)
    return choose(is_finite, after_seeing, unseen), is_finite & allows


def _count(state: LossScaleState, should_apply: jax.Array) -> LossScaleState:
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

    JAX's types show it under `shard_map`, unless `check_vma=False`: `should_apply` then
    varies along an axis along which the state does not.
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
