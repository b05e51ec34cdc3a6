"""Whether a step is applied, and what the loss scale and the rule of skipping make of it."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._arrays.finite import all_finite, norm_and_all_finite
from optax_lossscale._scales.loss_scale import AxisName, LossScale, across, on_all_replicas
from optax_lossscale._scales.validation import refuse
from optax_lossscale._skips.rule import SkipRule

Skip = SkipRule | Literal["nonfinite"]


def refuse_other_skips(skip: Skip | None) -> None:
    """Raises for what says nothing of when to skip."""
    is_nonfinite = isinstance(skip, str) and skip == "nonfinite"
    if not is_nonfinite and not isinstance(skip, SkipRule | None):
        allowed = "None, 'nonfinite', or a rule such as skips.spikes()"
        refuse("skip", skip, allowed)


def decide(
    grads: Any,
    value: jax.Array | None,
    loss_scale: LossScale,
    rule: SkipRule | None,
    axis_name: AxisName | None,
    *,
    checks: bool,
) -> tuple[LossScale, SkipRule | None, jax.Array | Literal[True]]:
    """The loss scale and the rule after one step, and whether it is applied.

    Args:
      grads: the unscaled gradients, without those that are left out.
      value: the true loss, shape (), or None.
      loss_scale: the one by which they were scaled.
      rule: what decides about finite steps, or None.
      axis_name: the axes over which all replicas decide alike, by the largest of their norms and
        the mean of their losses.
      checks: whether to check what the loss scale does not.

    Returns:
      `(loss_scale, rule, should_apply)`, of which the last is a bool, shape (), or the Python
      bool True where nothing was checked.
    """
    norm, finite = (None, None) if rule is None else _measured(grads, axis_name)
    adapted, should_apply = _adapted(loss_scale, grads, finite, axis_name)
    if should_apply is True and checks:
        should_apply = on_all_replicas(all_finite(grads), axis_name)
    if value is not None:
        # The forward pass does not depend on the loss scale: no other would have helped.
        loss_finite = on_all_replicas(jnp.isfinite(value), axis_name)
        adapted = jax.tree.map(partial(jnp.where, loss_finite), adapted, loss_scale)
        should_apply = loss_finite & should_apply
    if rule is None or norm is None:
        return adapted, None, should_apply
    return adapted, *_followed(rule, norm, value, should_apply, axis_name)


def _measured(grads: Any, axis_name: AxisName | None) -> tuple[jax.Array, jax.Array]:
    """The norm of the gradients, and whether all are finite, agreed on by all replicas."""
    norm, finite = norm_and_all_finite(grads)
    if axis_name is None:
        return norm, finite
    return across(lax.pmax, norm, axis_name), on_all_replicas(finite, axis_name)


def _adapted(
    loss_scale: LossScale, grads: Any, finite: jax.Array | None, axis_name: AxisName | None
) -> tuple[LossScale, Any]:
    """What `loss_scale.update` gives; without another pass, if finiteness is all it looks at."""
    if finite is not None and type(loss_scale).update is LossScale.update:
        adapted, should_apply = loss_scale.adjust(finite), finite
    else:
        adapted, should_apply = loss_scale.update(grads, axis_name)
        should_apply = should_apply if finite is None else finite & should_apply
    if jax.tree.structure(adapted) != jax.tree.structure(loss_scale):
        raise TypeError(
            f"{type(loss_scale).__name__} must adapt to another of its kind, with the same "
            f"configuration: return self.replace(…) from adjust. Got {adapted!r}"
        )
    return adapted, should_apply


def _followed(
    rule: SkipRule,
    norm: jax.Array,
    value: jax.Array | None,
    finite: jax.Array,
    axis_name: AxisName | None,
) -> tuple[SkipRule, jax.Array]:
    """The rule after the step, which it sees only if finite, and whether the step is applied."""
    seen = finite & jnp.isfinite(norm)
    if value is not None:
        value = value.astype(jnp.float32)
        value = value if axis_name is None else across(lax.pmean, value, axis_name)
        seen &= jnp.isfinite(value)
    after_seeing, allowed = rule.update(norm, value)
    unseen = rule.replace(gradient_norm=jnp.inf)
    return jax.tree.map(partial(jnp.where, seen), after_seeing, unseen), seen & allowed
