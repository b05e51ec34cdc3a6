"""The error for training that cannot go on, raised on the host.

A compiled step cannot raise an error: if gradients overflow at every loss scale, it
skips every step. The state shows that, and `raise_if_stuck` reads it between steps.
"""

from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._arrays.validation import check_concrete, positive_int
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import APPLIED_PER_SKIP, SkipRule
from optax_lossscale._step.get import get_loss_scale
from optax_lossscale._step.state import LossScaleState, wrapper_state

_NOT_FINITE = "gradients or losses were not finite"
_DIAGNOSE = (
    "A skipped step has left everything as it was: "
    "run print(ols.diagnose(loss_fn, params, batch))"
)
_LOWER_FLOOR = (
    "If gradients are large but not broken, allow a smaller scale (min_scale)"
)
_RESTART_RULE = (
    "If large norms are the new level, restart the rule, "
    "state._replace(skip_rule=tx.init(params).skip_rule), or use skips.spikes(), which "
    "finds such a level by itself after max_skips steps, if max_consecutive_skips is "
    "at least as many"
)


class LossScaleError(RuntimeError):
    """Training cannot go on: too many steps overflow, or a rule skips too many."""


def raise_if_stuck(state: Any, max_consecutive_skips: int = 100) -> None:
    """Raises an error on the host if loss scaling has nothing left to try.

    It waits for the device. A skipped step has left everything as it was, so what is
    wrong with it can be seen afterwards: `print(diagnose(loss_fn, params, batch))`.

    Args:
      state: an optimizer state with one `LossScaleState` in it, a train state or an
        `nnx.Optimizer` that holds it; or a `LossScale`, of which only `exhausted` is
        looked at.
      max_consecutive_skips: how many steps in a row may be skipped. A skip rule may
        skip as many over the whole run, and 1 more for every 20 steps applied.

    Raises:
      LossScaleError: if the loss scale is `exhausted`, or more steps than
        `max_consecutive_skips` were skipped in a row, or a rule skipped more than it
        may.
      ValueError: if the state holds no loss scale, or several, or if
        `max_consecutive_skips` is not an int of at least 1.
      TypeError: if the state is that of an ensemble, or is traced.

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
    positive_int("max_consecutive_skips", max_consecutive_skips)
    check_concrete("raise_if_stuck", state)
    loss_scale = get_loss_scale(state)
    wrapper = wrapper_state(state)
    _check_one_model(loss_scale, wrapper)
    fault = _exhausted(loss_scale)
    in_a_row = ""
    if wrapper is not None:
        fault = (
            fault
            or _skipped_by_rule(wrapper, max_consecutive_skips)
            or _skipped_in_a_row(wrapper, max_consecutive_skips)
        )
        in_a_row = f"Steps skipped in a row: {wrapper.consecutive_skipped_steps}. "
    if fault:
        raise LossScaleError(f"{fault.reason}. {in_a_row}{fault.remedy}")


class _Fault(NamedTuple):
    """Why training cannot go on, and what to do about it, as text for the error."""

    reason: str
    remedy: str


def _exhausted(loss_scale: LossScale) -> _Fault | None:
    """The fault, if the loss scale cannot be lowered; else None."""
    if not loss_scale.exhausted():
        return None
    has_floor = getattr(loss_scale, "min_scale", None) is not None
    return _Fault(
        f"gradients overflowed at a loss scale of {loss_scale():g}, which cannot be "
        "lowered",
        f"{_DIAGNOSE}. {_LOWER_FLOOR}" if has_floor else _DIAGNOSE,
    )


def _skipped_by_rule(state: LossScaleState, most: int) -> _Fault | None:
    """The fault, if the rule skips too many finite steps; else None."""
    rule = state.skip_rule
    if rule is None or rule.skip_debt <= APPLIED_PER_SKIP * most:
        return None
    return _Fault(
        f"{type(rule).__name__} has skipped more than 1 in 20 of the last steps, "
        f"{rule.skipped_by_rule} steps in all. {_last_step(rule)}",
        f"{_DIAGNOSE}. {_RESTART_RULE}",
    )


def _skipped_in_a_row(state: LossScaleState, most: int) -> _Fault | None:
    """The fault, if too many steps were skipped in a row; else None."""
    if state.consecutive_skipped_steps <= most:
        return None
    reason = f"{_NOT_FINITE}; the loss scale is {state.loss_scale():g}"
    rule = state.skip_rule
    if rule is None:
        return _Fault(reason, _DIAGNOSE)
    return _Fault(
        f"{reason}. Or {type(rule).__name__} skipped the steps. {_last_step(rule)}",
        f"{_DIAGNOSE}. {_RESTART_RULE}",
    )


def _last_step(rule: SkipRule) -> str:
    """What is known of the last step, which was skipped by the rule or anyway."""
    if np.isfinite(rule.gradient_norm):
        return f"At the last step, gradients had a norm of {rule.gradient_norm:g}"
    return f"At the last step, gradients had a norm of 2**64 or more, or {_NOT_FINITE}"


def _check_one_model(loss_scale: LossScale, wrapper: LossScaleState | None) -> None:
    """Raises a `TypeError` for the stacked state of an ensemble."""
    number = loss_scale.loss_scale if wrapper is None else wrapper.should_apply
    shape = np.shape(number)
    if shape:
        raise TypeError(
            "raise_if_stuck takes the state of one model, got many, with leaves of "
            f"shape {shape}. Pass that of one member: jax.tree.map(lambda x: x[0], "
            "state)"
        )
