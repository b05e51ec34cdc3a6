"""Raises an error on the host if training cannot continue.

A compiled step cannot raise an error, so if gradients overflow at every loss scale,
every step is skipped and training goes on without effect. The state counts the skipped
steps, however, and `raise_if_stuck` reads these counts between two steps.
"""

from typing import Any

import numpy as np

from optax_lossscale._arrays.checks import check_concrete, integer
from optax_lossscale._step.get_loss_scale import get_loss_scale
from optax_lossscale._step.state import LossScaleState, loss_scale_state_or_none
from optax_lossscale.skips import APPLIED_PER_SKIP


class LossScaleError(RuntimeError):
    """Training cannot continue: the scale is exhausted, or too many steps were skipped.

    `raise_if_stuck` raises this error, with a message that says what to try.
    """


def raise_if_stuck(state: Any, max_consecutive_skips: int = 100) -> None:
    """Raises an error on the host if loss scaling has nothing left to try.

    Call it between two steps, but not after each, because it waits for the device::

        if step % 100 == 0:
            ols.raise_if_stuck(state)

    Skipped steps leave the parameters as they were, so you can look for the cause
    afterwards: `print(ols.diagnose(loss_fn, params, batch))`.

    Args:
      state: an optimizer state with one `LossScaleState` in it, or a train state or
        `nnx.Optimizer` that holds it. For a `LossScale`, only `exhausted` is checked.
      max_consecutive_skips: how many steps in a row may be skipped. It also limits a
        skip rule, which may skip this many steps, in a row or not, before applied steps
        make up for them (see `skip_debt` of `skips.SkipRule`).

    Raises:
      LossScaleError: if the loss scale is `exhausted`.
      LossScaleError: if more than `max_consecutive_skips` steps in a row were skipped.
      LossScaleError: if the `skip_debt` of a rule is more than 20 times
        `max_consecutive_skips`.
      ValueError: if `get_loss_scale` rejects the state, for example because it holds no
        loss scale or several.
      ValueError: if `max_consecutive_skips` is not an int of at least 1.
      ValueError: if the state is a stack of several models' states.
      TypeError: if the state is traced.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> ls = ols.DynamicLossScale(initial_scale=1.0)
      >>> tx = ols.with_loss_scale(optax.sgd(0.1), ls)
      >>> params = jnp.ones(2)
      >>> state = tx.init(params)
      >>> params, state = tx.apply_gradients(jnp.full(2, jnp.nan), state, params)
      >>> ols.raise_if_stuck(state)
      Traceback (most recent call last):
          ...
      optax_lossscale._step.stuck.LossScaleError: gradients overflowed at a loss ...
    """
    max_skips = integer("max_consecutive_skips", max_consecutive_skips, 1)
    check_concrete("raise_if_stuck", state)
    loss_scale = get_loss_scale(state)
    wrapper_state = loss_scale_state_or_none(state)
    scalar = loss_scale() if wrapper_state is None else wrapper_state.should_apply
    if np.shape(scalar):
        raise ValueError(
            "raise_if_stuck takes the state of one model, got a stack of states, of "
            f"shape {np.shape(scalar)}. Pass the state of one model: "
            "jax.tree.map(lambda x: x[0], state)"
        )
    if loss_scale.exhausted():
        reason = (
            f"gradients overflowed at a loss scale of {loss_scale():g}, which cannot "
            "be lowered. If they are large but not broken, allow a smaller scale"
        )
        reason += " (min_scale)" if hasattr(loss_scale, "min_scale") else ""
    elif wrapper_state is not None:
        reason = _too_many_skips(wrapper_state, max_skips)
    else:
        reason = None
    if reason is None:
        return
    if wrapper_state is not None:
        reason += f". Steps skipped in a row: {wrapper_state.consecutive_skipped_steps}"
    raise LossScaleError(
        f"{reason}. Skipped steps leave the parameters as they were. To find the "
        "cause, run print(ols.diagnose(loss_fn, params, batch))"
    )


def _too_many_skips(state: LossScaleState, max_skips: int) -> str | None:
    """Says why steps were skipped, or returns None if not too many were."""
    rule = state.skip_rule
    norm = state.gradient_norm
    last = "" if norm is None else f". The last gradients had a norm of {norm:g}"
    if rule is not None and rule.skip_debt > APPLIED_PER_SKIP * max_skips:
        return (
            f"{type(rule).__name__} has skipped {rule.skipped_by_rule} steps, and too "
            f"few were applied to make up for them: its skip_debt is {rule.skip_debt}, "
            f"above {APPLIED_PER_SKIP} * max_consecutive_skips{last}. If norms have "
            "risen for good, restart the rule: "
            "state._replace(skip_rule=tx.init(params).skip_rule)"
        )
    if state.consecutive_skipped_steps <= max_skips:
        return None
    causes = "gradients, their norm or losses were not finite"
    if rule is not None and rule.skipped_by_rule:
        causes += f", or {type(rule).__name__} skipped the steps"
    return f"{causes}. The loss scale is {state.loss_scale():g}{last}"
