"""Decides whether to apply a step, and adapts the loss scale and the skip rule to it.

A step is applied if all of these hold:

1. The unscaled gradients are finite.
2. The sum of their squares is finite in float32: their norm is below 2**64. A gradient
   of 1e20 is finite, but would make Adam's second moment infinite for good.
3. The true loss is finite, if it was passed to the step.
4. The loss scale's `update` allows it, if the loss scale has one of its own.
5. The skip rule accepts the step, if there is one.

With `skip=None`, the loss scale's `update` alone decides.

If replicas decided differently, their parameters would diverge. With an `axis_name`,
everything that the decision depends on is therefore reduced over that axis first: flags
by a minimum, the norm by a maximum, and the loss by a mean. A loss scale that overrides
`update` receives the axis name and reduces its flag itself.
"""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_lossscale._arrays.checks import as_flag
from optax_lossscale._arrays.finite import LARGEST_FLOAT32, norm_and_all_finite
from optax_lossscale._arrays.precision import is_inexact_leaf
from optax_lossscale._arrays.replicas import (
    AxisName,
    on_all_replicas,
    reduce_replicas,
    varying_axes,
)
from optax_lossscale._arrays.stateful import choose
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.inputs import StepInputs
from optax_lossscale._step.state import LossScaleState
from optax_lossscale.skips import SkipRule

Skip = Literal["nonfinite"] | SkipRule

Flag: TypeAlias = jax.Array | bool
"""A bool array of shape (), or Python's True if nothing was checked."""


def decide_step(
    unscaled: StepInputs,
    state: LossScaleState,
    axis_name: AxisName | None,
    *,
    skips_nonfinite: bool,
) -> tuple[Flag, LossScaleState]:
    """Decides whether to apply a step; returns `(should_apply, new_state)`.

    `new_state` is the state after the step, but still with the old inner state.

    The loss scale adapts to an applied step, and to gradients that are not finite of a
    finite loss. It stays as it was if the step is skipped for another reason: another
    scale would not have helped, and a skipped step should not count towards its growth.
    """
    # No gradient flows through the decision.
    grads, value = lax.stop_gradient((unscaled.kept_grads(), unscaled.value))
    if not skips_nonfinite:
        loss_scale, should_apply = _update(state.loss_scale, grads, axis_name)
        new_state = state._replace(loss_scale=loss_scale)
        if should_apply is True:
            # The counts stay as they were, so that they cost the step nothing.
            return True, new_state
        flag = jnp.asarray(should_apply)
        _check_replicas_agree(flag, state)
        return flag, _count(new_state, flag)

    _check_loss_is_of_all_replicas(value, grads)
    norm, finite = _norm_and_finite(grads, axis_name)
    scale = state.loss_scale
    if type(scale).update is LossScale.update:
        # It would check the gradients again, only to pass the same flag to `adjust`.
        adapted = scale._succeeded_by(scale.adjust(finite), "adjust")
        grads_pass = finite
    else:
        adapted, allows = _update(scale, grads, axis_name)
        grads_pass = finite & allows
    loss_finite = True
    if value is not None:
        loss_finite = on_all_replicas(jnp.isfinite(value), axis_name)
    should_apply = grads_pass & jnp.isfinite(norm) & loss_finite
    rule = state.skip_rule
    if rule is not None:
        rule, should_apply = _run_rule(rule, norm, value, should_apply, axis_name)
    _check_replicas_agree(should_apply, state)
    scale_adapts = should_apply | (loss_finite & ~grads_pass)
    new_state = state._replace(
        loss_scale=choose(scale_adapts, adapted, scale),
        gradient_norm=norm,
        skip_rule=rule,
    )
    return should_apply, _count(new_state, should_apply)


def _norm_and_finite(
    grads: Any, axis_name: AxisName | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the norm of the gradients and whether they are finite on all replicas.

    The norm is infinite if they are not finite, or if their squares overflow. Replicas
    exchange one number: infinity if gradients are not finite, the largest float32 if
    only their squares overflow, else the norm.
    """
    norm, finite = norm_and_all_finite(grads)
    number = jnp.where(finite, jnp.minimum(norm, LARGEST_FLOAT32), jnp.inf)
    largest = reduce_replicas(lax.pmax, number, axis_name)
    norm = jnp.where(largest < LARGEST_FLOAT32, largest, jnp.inf)
    return norm, jnp.isfinite(largest)


def _update(
    loss_scale: LossScale, grads: Any, axis_name: AxisName | None
) -> tuple[LossScale, Flag]:
    """Returns the next loss scale and whether it allows the step, by `update`."""
    new, allows = loss_scale.update(grads, axis_name)
    new = loss_scale._succeeded_by(new, "update")
    return new, True if allows is True else as_flag(allows, loss_scale, "update")


def _run_rule(
    rule: SkipRule,
    norm: jax.Array,
    value: jax.Array | None,
    passed: jax.Array,
    axis_name: AxisName | None,
) -> tuple[SkipRule, jax.Array]:
    """Returns the next skip rule and whether to apply the step.

    The rule runs on every step, without a branch. If the step did not pass the other
    checks, its decision and its new state are discarded.
    """
    if value is not None:
        value = reduce_replicas(lax.pmean, value.astype(jnp.float32), axis_name)
        # The mean of large losses, or a float64 loss, may overflow float32.
        passed = passed & jnp.isfinite(value)
    updated, allows = rule.update(norm, value)
    return choose(passed, updated, rule), passed & allows


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
    name = _axis_apart(should_apply, [jnp.asarray(state.should_apply)])
    if name is not None:
        raise ValueError(
            f"the replicas along the axis {name} of a shard_map share their state, but "
            "would each decide alone whether to apply the step, by their own gradients "
            "or loss. Let them decide together, with_loss_scale(…, "
            f"axis_name={name}), or give each replica its own state, which varies "
            f"along this axis. {_DIFFERENTIATE_THE_MEAN}"
        )


def _check_loss_is_of_all_replicas(value: jax.Array | None, grads: Any) -> None:
    """Raises if the loss is one replica's, but the gradients are those of all.

    Under `shard_map`, JAX sums the gradients of replicated parameters over the
    replicas. If the loss still varies along an axis, nobody has divided by their
    number. With `check_vma=False`, JAX does not track the axes, so nothing is raised.
    """
    if value is None:
        return
    leaves = filter(is_inexact_leaf, jax.tree.leaves(grads))
    name = _axis_apart(value, leaves)
    if name is not None:
        raise ValueError(
            f"the loss differs from replica to replica along the axis {name} of a "
            f"shard_map, but the gradients do not. {_DIFFERENTIATE_THE_MEAN}. If these "
            "are a mean of each replica's own already, pass the mean of the loss as "
            "value; a share of a loss that is meant to be summed is not passed at all"
        )


def _axis_apart(x: jax.Array, others: Iterable[jax.Array]) -> str | None:
    """Names an axis of a `shard_map` along which `x` varies, but none of the others."""
    axes = varying_axes(x).difference(*map(varying_axes, others))
    return min(map(repr, axes), default=None)


_DIFFERENTIATE_THE_MEAN = (
    "Differentiate the mean of the loss, jax.lax.pmean(loss, axis_name), and take no "
    "mean of the gradients: JAX has summed those of replicated parameters already"
)
