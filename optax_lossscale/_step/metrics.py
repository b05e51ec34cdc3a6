"""Collects the scalars to log about loss scaling, such as the scale and the skips."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._step.get_loss_scale import get_loss_scale
from optax_lossscale._step.state import loss_scale_state_or_none


def metrics(state: Any) -> dict[str, jax.Array]:
    """Returns the state of loss scaling as a flat dict of scalars to log.

    Call it in the compiled step or on the state that the step returns. With a
    `DynamicLossScale`, a few skipped steps are normal, because the scale grows until
    gradients overflow. If steps are skipped again and again, look for the cause with
    `diagnose`.

    Args:
      state: an optimizer state with one `LossScaleState` in it, or a train state or
        `nnx.Optimizer` that holds it. For a `LossScale`, the dict contains only the
        entries of the loss scale.

    Returns:
      A dict from names to scalars of shape (). If the state is a stack of several
      models' states, the entries also have the axes of the stack, except those of a
      fixed loss scale.

      - `loss_scale`, `log2_loss_scale`: float32.
      - `exhausted`: whether, on the last step that the scale adapted to, gradients
        overflowed and the scale could not be lowered; bool.
      - `should_apply`: whether the last step was applied; bool.
      - `skipped_steps`, `consecutive_skipped_steps`: int32.
      - `gradient_norm`: the global norm of the last step's unscaled gradients, infinite
        if they were not finite or their norm was 2**64 or more; float32. It is missing
        with `skip=None`.
      - The other public state of the loss scale, such as `growth_counter`, and that of
        the skip rule, such as `skipped_by_rule`, under the names of the fields, or as
        `loss_scale/name` and `skip_rule/name` where a name is in use. A field of a
        class of your own keeps its shape.

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
      gradient_norm inf
      growth_counter 0
      hysteresis_left 1
    """
    loss_scale = get_loss_scale(state)
    wrapper_state = loss_scale_state_or_none(state)
    scale, log2, exhausted = _loss_scale_scalars(loss_scale)
    scalars = {"loss_scale": scale, "log2_loss_scale": log2, "exhausted": exhausted}
    parts: dict[str, Any] = {"loss_scale": loss_scale}
    if wrapper_state is not None:
        for name in (
            "should_apply",
            "skipped_steps",
            "consecutive_skipped_steps",
            "gradient_norm",
        ):
            scalars[name] = getattr(wrapper_state, name)
        parts["skip_rule"] = wrapper_state.skip_rule
    for part, owner in parts.items():
        for name in [] if owner is None else owner._state_names:
            if name.startswith("_") or part == name == "loss_scale":
                continue
            key = f"{part}/{name}" if name in scalars else name
            scalars[key] = getattr(owner, name)
    return {name: x for name, x in scalars.items() if x is not None}


@jax.jit  # Without it, each eager call would copy the constants to the device.
def _loss_scale_scalars(loss_scale: Any) -> tuple[jax.Array, ...]:
    """Returns the scale, its log2, and whether it is exhausted; each of shape ()."""
    scale = loss_scale()
    # With the exponent taken out, the log2 of a power of two is exactly an integer.
    mantissa, exponent = jnp.frexp(scale)
    log2 = (exponent - 1).astype(scale.dtype) + jnp.log2(2 * mantissa)
    return scale, log2, loss_scale.exhausted()
