"""The error for training that cannot go on, raised on the host.

A compiled step cannot raise an error: if gradients overflow at every loss scale, it
skips every step. The state shows that, and `raise_if_stuck` reads it between steps.
"""

from typing import Any

import jax.numpy as jnp

from optax_lossscale._arrays.validation import at_hand, count
from optax_lossscale._skips.rule import APPLIED_PER_SKIP
from optax_lossscale._step.get import get_loss_scale
from optax_lossscale._step.state import wrapper_state


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
        skip as many, in a row or not, and beyond them 1 step for every 20 applied.

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
    count()("max_consecutive_skips", max_consecutive_skips)
    at_hand("raise_if_stuck", state)
    loss_scale = get_loss_scale(state)
    wrapper = wrapper_state(state)
    in_a_row = 0 if wrapper is None else wrapper.consecutive_skipped_steps
    # A fixed loss scale has no state, and so no axis of an ensemble.
    shape = jnp.shape(loss_scale()) or jnp.shape(in_a_row)
    if shape:
        raise TypeError(
            "raise_if_stuck takes the state of one model, got many, with leaves of "
            f"shape {shape}. Pass that of one member: jax.tree.map(lambda x: x[0], "
            "state)"
        )
    advice = _ADVICE
    if wrapper is not None:
        advice = f"Steps skipped in a row: {in_a_row}. {_ADVICE}"
    if loss_scale.exhausted():
        if hasattr(loss_scale, "min_scale"):
            advice += f". {_IF_LARGE}"
        raise LossScaleError(
            f"gradients overflowed at a loss scale of {loss_scale():g}, which cannot "
            f"be lowered. {advice}"
        )
    rule = None if wrapper is None else wrapper.skip_rule
    most_debt = APPLIED_PER_SKIP * max_consecutive_skips
    rule_skips_too_much = rule is not None and rule.skip_debt > most_debt
    saw_last_step = rule is not None and jnp.isfinite(rule.gradient_norm)
    is_the_rule = rule_skips_too_much and saw_last_step
    if in_a_row > max_consecutive_skips and not is_the_rule:
        raise LossScaleError(
            "gradients or losses were not finite; the loss scale is "
            f"{loss_scale():g}. {advice}"
        )
    if rule is not None and rule_skips_too_much:
        raise LossScaleError(
            f"{type(rule).__name__} has skipped more than 1 in 20 of the last steps, "
            f"{rule.skipped_by_rule} steps in all; {in_a_row} were skipped in a row, "
            f"and the last gradients have a norm of {rule.gradient_norm:g}. {_IF_NEW}"
        )


_ADVICE = (
    "A skipped step has left everything as it was: "
    "run print(ols.diagnose(loss_fn, params, batch))"
)
_IF_LARGE = "If gradients are large but not broken, allow a smaller scale (min_scale)"
_IF_NEW = (
    "If that is the new level, restart the rule, "
    "state._replace(skip_rule=tx.init(params).skip_rule), or use skips.spikes(), which "
    "finds such a level by itself"
)
