"""What an optimizer with loss scaling keeps from step to step."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from optax_lossscale._arrays.variables import plain
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`.

    Attributes:
      loss_scale: the loss scale and its counters.
      inner_state: the state of the wrapped optimizer.
      should_apply: whether the last step was applied; bool, shape ().
      skipped_steps: the steps skipped so far; int32, shape ().
      consecutive_skipped_steps: those since the last applied step; int32, shape ().
      skip_rule: the rule that decides about finite steps, with what it has learnt, or None.
    """

    loss_scale: LossScale
    inner_state: Any
    should_apply: jax.Array
    skipped_steps: jax.Array
    consecutive_skipped_steps: jax.Array
    skip_rule: SkipRule | None = None

    if not TYPE_CHECKING:  # to which it would mean that every name is one

        def __getattr__(self, name):
            raise AttributeError(
                f"a LossScaleState has no {name!r}; what the wrapped optimizer keeps is its "
                "inner_state: where a function takes that optimizer's own state, as "
                "optax.contrib.schedule_free_eval_params does, give it state.inner_state"
            )


def wrapper_states(state: Any) -> list[LossScaleState]:
    """Every `LossScaleState` in an optimizer state, however deep it lies."""
    is_state = lambda x: isinstance(x, LossScaleState)
    return [plain(x) for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
