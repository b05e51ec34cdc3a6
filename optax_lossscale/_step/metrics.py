"""Collects the scalars to log about loss scaling, such as the scale and the skips.

Some entries, such as `loss_scale` and `skipped_steps`, do not depend on the class of
the loss scale. The others are the public state of the loss scale and the skip rule,
under the names of the fields. If two entries would have the same name, the second gets
a longer one, such as `skip_rule/name`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._arrays.contexts import TESTING_METRICS
from optax_lossscale._arrays.stateful import Stateful
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.get import get_loss_scale
from optax_lossscale._step.state import loss_scale_state_or_none


def metrics(state: Any) -> dict[str, jax.Array]:
    """Returns the state of loss scaling as a flat dict of scalars to log.

    Call it in the compiled step or on the state that the step returns. With a
    `DynamicLossScale`, a few skipped steps are normal, because the scale grows until
    gradients overflow. If steps are skipped again and again, however, look for the
    cause with `diagnose`.

    Args:
      state: an optimizer state with one `LossScaleState` in it, or a train state or
        `nnx.Optimizer` that holds it. For a `LossScale`, the dict contains only the
        entries of the loss scale.

    Returns:
      A dict from names to scalars of shape (). State fields of your own classes keep
      their shape. If the state is a stack of several models' states, all entries also
      have the axes of the stack.

      - `loss_scale`, `log2_loss_scale`: float32.
      - `exhausted`: whether, on the last step that the scale adapted to, gradients
        overflowed and the scale could not be lowered; bool.
      - `should_apply`: whether the last step was applied; bool.
      - `skipped_steps`, `consecutive_skipped_steps`: int32.
      - The other public state of the loss scale: for a `DynamicLossScale`,
        `growth_counter`, the finite steps in a row since the last growth, and
        `hysteresis_left`, the non-finite steps left until a back-off; int32.
      - With a skip rule, `gradient_norm`: the global norm of the last step's unscaled
        gradients, infinite if the step was not finite; float32.
      - With a skip rule, `skipped_by_rule`: how many steps the rule skipped although
        their gradients, norm and loss were finite; int32.
      - The other public state of the rule.

      If the name of an entry of the loss scale or the rule is already in use, the entry
      is called `loss_scale/name` or `skip_rule/name`.

    Raises:
      ValueError: if `get_loss_scale` rejects the state, for example because it holds no
        loss scale or several.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.sgd(0.1))
      >>> params = jnp.ones(2)
      >>> _, state = tx.apply_gradients(jnp.full(2, jnp.inf), tx.init(params), params)
      >>> for name, value in ols.metrics(state).items():
      ...     print(name, value)
      loss_scale 16384.0
      log2_loss_scale 14.0
      exhausted False
      should_apply False
      skipped_steps 1
      consecutive_skipped_steps 1
      growth_counter 0
      hysteresis_left 1
    """
    loss_scale = get_loss_scale(state)
    wrapper_state = loss_scale_state_or_none(state)
    # `testing` sets this, so that metrics do not count as outputs that depend on the
    # loss scale.
    if TESTING_METRICS.value and jax.tree.leaves(loss_scale):
        loss_scale = _blank(loss_scale)
    scale, log2, exhausted = _loss_scale_scalars(loss_scale)
    scalars: dict[str, jax.Array] = {
        "loss_scale": scale,
        "log2_loss_scale": log2,
        "exhausted": exhausted,
    }
    rule = None
    if wrapper_state is not None:
        rule = wrapper_state.skip_rule
        for name in ("should_apply", "skipped_steps", "consecutive_skipped_steps"):
            scalars[name] = getattr(wrapper_state, name)
    _add_public_state(scalars, {"loss_scale": loss_scale, "skip_rule": rule})
    return scalars


def _add_public_state(
    scalars: dict[str, jax.Array], parts: dict[str, Stateful | None]
) -> None:
    """Adds the public state fields of `parts` to `scalars`, except the scale itself.

    If the name of a field is in use, the field gets the name of its part in front.
    """
    for part, owner in parts.items():
        if owner is None:
            continue
        for name in owner._state_names:
            is_scale = part == name == "loss_scale"
            if is_scale or name.startswith("_"):
                continue
            key = f"{part}/{name}" if name in scalars else name
            scalars[key] = getattr(owner, name)


@jax.jit  # Without it, each eager call would copy the constants to the device.
def _loss_scale_scalars(
    loss_scale: LossScale,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the scale, its log2, and whether it is exhausted; each of shape ()."""
    scale = loss_scale()
    # With the exponent taken out, the log2 of a power of two is exactly an integer.
    mantissa, exponent = jnp.frexp(scale)
    log2 = (exponent - 1).astype(scale.dtype) + jnp.log2(2 * mantissa)
    return scale, log2, loss_scale.exhausted()


@jax.jit
def _blank(loss_scale: LossScale) -> LossScale:
    """Returns a loss scale with its initial scale and with zeros for other state."""
    initial = jnp.full_like(loss_scale.loss_scale, loss_scale.initial_scale)
    zeros = jax.tree.map(jnp.zeros_like, loss_scale)
    return zeros.replace(loss_scale=initial)
