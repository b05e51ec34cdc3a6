"""Whether a step is applied, and what the loss scale and the skip rule make of it."""

from functools import partial
from typing import Literal

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
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step.inputs import Prepared
from optax_lossscale._step.state import LossScaleState

Skip = SkipRule | Literal["nonfinite"]


def decide(
    unscaled: Prepared, state: LossScaleState, skip: Skip | None, axis_name: AxisName | None
) -> tuple[jax.Array | Literal[True], LossScaleState]:
    """Whether to apply a step, and the state after it, except for its inner state.

    The first is a bool, shape (), or the Python bool True where nothing was checked.
    """
    # What is measured is not differentiated.
    grads, value = lax.stop_gradient((unscaled.checked_grads(), unscaled.value))
    norm = finite = None
    if state.skip_rule is not None:
        norm, finite = norm_and_all_finite(grads)
        norm, finite = across(lax.pmax, norm, axis_name), on_all_replicas(finite, axis_name)

    if finite is not None and type(state.loss_scale).update is LossScale.update:
        # Whether they are finite is all that it looks at, and is already known.
        loss_scale, should_apply = state.loss_scale.adjust(finite), finite
    else:
        loss_scale, should_apply = state.loss_scale.update(grads, axis_name)
        should_apply = should_apply if finite is None else finite & should_apply
    if jax.tree.structure(loss_scale) != jax.tree.structure(state.loss_scale):
        raise TypeError(
            f"{type(state.loss_scale).__name__} must adapt to a loss scale of its own type and "
            f"configuration: return self.replace(…) from adjust. Got {loss_scale!r}"
        )
    if should_apply is True and skip is not None:
        should_apply = on_all_replicas(all_finite(grads), axis_name)

    if value is not None:
        # The forward pass does not depend on the loss scale: no other scale would have helped.
        loss_finite = on_all_replicas(jnp.isfinite(value), axis_name)
        loss_scale = jax.tree.map(partial(jnp.where, loss_finite), loss_scale, state.loss_scale)
        should_apply = loss_finite & should_apply
    if should_apply is True:
        return True, state._replace(loss_scale=loss_scale)

    rule = state.skip_rule
    if rule is not None and norm is not None:
        should_apply = should_apply & jnp.isfinite(norm)
        if value is not None:
            value = across(lax.pmean, value.astype(jnp.float32), axis_name)
            should_apply = should_apply & jnp.isfinite(value)
        # It sees only finite steps, and learns nothing from the others.
        after_seeing, allowed = rule.update(norm, value)
        unseen = rule.replace(gradient_norm=jnp.inf)
        rule = jax.tree.map(partial(jnp.where, should_apply), after_seeing, unseen)
        should_apply = should_apply & allowed

    should_apply = jnp.asarray(should_apply, bool)
    if apart := varying_axes(should_apply) - varying_axes(jnp.asarray(state.should_apply)):
        name, *_ = sorted(map(repr, apart))
        raise ValueError(
            f"the replicas along the axis {name} of a shard_map share their state, and would each "
            "decide alone whether to apply the step, by gradients or a loss of their own. Let "
            f"them decide together, with_loss_scale(…, axis_name={name}), or give each a state "
            "of its own, that varies along this axis"
        )
    skipped, in_a_row = state.skipped_steps, state.consecutive_skipped_steps
    return should_apply, state._replace(
        loss_scale=loss_scale,
        should_apply=should_apply,
        skipped_steps=jnp.where(should_apply, skipped, optax.safe_increment(skipped)),
        consecutive_skipped_steps=jnp.where(should_apply, 0, optax.safe_increment(in_a_row)),
        skip_rule=rule,
    )
