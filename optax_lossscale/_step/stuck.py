"""Raises an error on the host if training cannot continue.

A compiled step cannot raise an error, so if gradients overflow at every loss scale,
every step is skipped and training goes on without effect. The state counts the skipped
steps, however, and `raise_if_stuck` reads these counts between two steps.
"""

from typing import Any

import numpy as np

from optax_lossscale._arrays.validation import check_concrete, positive_int
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import APPLIED_PER_SKIP, SkipRule
from optax_lossscale._step.get import get_loss_scale
from optax_lossscale._step.state import LossScaleState, loss_scale_state_or_none

_NOT_FINITE = "gradients or losses were not finite"
_NOT_FINITE_OR_HUGE = f"{_NOT_FINITE}, or gradients had a norm of 2**64 or more"
_DIAGNOSE = (
    "Skipped steps leave the parameters as they were. To find the cause, "
    "run print(ols.diagnose(loss_fn, params, batch))"
)
_LOWER_FLOOR = (
    "If gradients are large but not broken, allow a smaller scale (min_scale)"
)
_RESTART_RULE = (
    "If norms have risen for good, restart the rule: "
    "state._replace(skip_rule=tx.init(params).skip_rule). Or use skips.spikes(), which "
    "accepts a new level after max_skips skipped steps, if max_consecutive_skips is at "
    "least max_skips"
)


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
      optax_lossscale.LossScaleError: gradients overflowed at a loss scale...
    """
    max_skips = positive_int("max_consecutive_skips", max_consecutive_skips)
    check_concrete("raise_if_stuck", state)
    loss_scale = get_loss_scale(state)
    wrapper_state = loss_scale_state_or_none(state)
    _check_one_model(loss_scale, wrapper_state)
    reason = _why_stuck(loss_scale, wrapper_state, max_skips)
    if reason is None:
        return
    sentences = [reason]
    if wrapper_state is not None:
        skipped = wrapper_state.consecutive_skipped_steps
        sentences.append(f"Steps skipped in a row: {skipped}")
    sentences += [_DIAGNOSE, *_further_remedies(loss_scale, wrapper_state)]
    raise LossScaleError(". ".join(sentences))


def _why_stuck(
    loss_scale: LossScale, state: LossScaleState | None, max_skips: int
) -> str | None:
    """Explains why training cannot continue, or returns None if it can."""
    if loss_scale.exhausted():
        return (
            f"gradients overflowed at a loss scale of {loss_scale():g}, which cannot "
            "be lowered"
        )
    return None if state is None else _too_many_skips(state, max_skips)


def _too_many_skips(state: LossScaleState, max_skips: int) -> str | None:
    """Explains why steps were skipped, or returns None if not too many were."""
    rule = state.skip_rule
    if rule is not None and rule.skip_debt > APPLIED_PER_SKIP * max_skips:
        return (
            f"{type(rule).__name__} has skipped {rule.skipped_by_rule} steps, and too "
            f"few were applied to make up for them: its skip_debt is {rule.skip_debt}, "
            f"above {APPLIED_PER_SKIP} * max_consecutive_skips. {_last_step(rule)}"
        )
    if state.consecutive_skipped_steps <= max_skips:
        return None
    reason = _NOT_FINITE if rule is None else _NOT_FINITE_OR_HUGE
    if rule is not None and rule.skipped_by_rule:
        reason += f", or {type(rule).__name__} skipped the steps"
    reason += f"; the loss scale is {state.loss_scale():g}"
    return reason if rule is None else f"{reason}. {_last_step(rule)}"


def _further_remedies(loss_scale: LossScale, state: LossScaleState | None) -> list[str]:
    """Returns what else to try if training is stuck, besides `diagnose`."""
    if loss_scale.exhausted():
        has_floor = getattr(loss_scale, "min_scale", None) is not None
        return [_LOWER_FLOOR] if has_floor else []
    rule = None if state is None else state.skip_rule
    return [_RESTART_RULE] if rule is not None and rule.skipped_by_rule else []


def _last_step(rule: SkipRule) -> str:
    """Describes the gradients of the last step, whether or not the rule skipped it."""
    if np.isfinite(rule.gradient_norm):
        return f"At the last step, gradients had a norm of {rule.gradient_norm:g}"
    return f"At the last step, {_NOT_FINITE_OR_HUGE}"


def _check_one_model(loss_scale: LossScale, state: LossScaleState | None) -> None:
    """Raises a `ValueError` if the state is a stack of several models' states."""
    scalar = loss_scale.loss_scale if state is None else state.should_apply
    shape = np.shape(scalar)
    if shape:
        raise ValueError(
            "raise_if_stuck takes the state of one model, got a stack of states, of "
            f"shape {shape}. Pass the state of one model: "
            "jax.tree.map(lambda x: x[0], state)"
        )
