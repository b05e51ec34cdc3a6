"""What an optimizer with loss scaling keeps from step to step."""

from typing import Any, NamedTuple

import jax
import numpy as np

from optax_lossscale._arrays.precision import dtype_of
from optax_lossscale._arrays.stateful import Stateful
from optax_lossscale._arrays.validation import shown
from optax_lossscale._arrays.variables import find, plain
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule


class LossScaleState(NamedTuple):
    """The state of `with_loss_scale`.

    Attributes:
      loss_scale: the loss scale and its counters.
      inner_state: the state of the wrapped optimizer.
      should_apply: whether the last step was applied; bool, shape ().
      skipped_steps: the steps skipped so far; int32, shape ().
      consecutive_skipped_steps: those since the last applied step; int32, shape ().
      skip_rule: the rule that decides about finite steps, with its own state; or None.
    """

    loss_scale: LossScale
    inner_state: Any
    should_apply: jax.Array
    skipped_steps: jax.Array
    consecutive_skipped_steps: jax.Array
    skip_rule: SkipRule | None = None


def wrapper_states(state: Any) -> list[LossScaleState]:
    """Every `LossScaleState` in an optimizer state, however deeply nested."""
    return [plain(x) for x in find(lambda x: isinstance(x, LossScaleState), state)]


def check_state(state: Any) -> None:
    """Raises for anything but a state of this transformation, as it was returned."""
    if not isinstance(state, LossScaleState):
        raise TypeError(
            "the state must be the LossScaleState that this transformation's init or "
            f"its last step returned, got a {type(state).__name__}; the order of the "
            "arguments is gradients, state, params"
        )
    kind = dtype_of(state.should_apply)
    shape = np.shape(state.should_apply)
    if kind != np.bool_:
        raise TypeError(
            f"the state's should_apply came back as {kind}: a transformation around "
            "the wrapper has computed with its state, as SAM's transparent mode does. "
            "Put it inside: with_loss_scale(optax.contrib.sam(…))"
        )
    if shape:
        raise ValueError(
            f"the state is a stack of shape {shape}, as made by vmap(tx.init) or pmap: "
            "take the whole step under that vmap or pmap, too, as in "
            "vmap(train_step)(params, state, batch)"
        )


def check_configuration(
    state: LossScaleState, loss_scale: LossScale, rule: SkipRule | None
) -> None:
    """Raises for a loss scale or a skip rule that is not the transformation's."""
    for name, in_state, configured, remedy in (
        ("loss scale", state.loss_scale, loss_scale, _WITH_OTHER_SCALE),
        ("skip rule", state.skip_rule, rule, _WITH_OTHER_RULE),
    ):
        if jax.tree.structure(in_state) != jax.tree.structure(configured):
            raise ValueError(
                f"the state's {name} has another configuration than this "
                f"transformation's:\n  state:          {_shown_config(in_state)}\n  "
                f"transformation: {_shown_config(configured)}\nRestore a checkpoint "
                "into what tx.init(params) returns. To go on with this configuration, "
                f"keep the rest of the state: {remedy}"
            )


_WITH_OTHER_SCALE = "tx.init(params)._replace(inner_state=state.inner_state)"
_WITH_OTHER_RULE = "state._replace(skip_rule=tx.init(params).skip_rule)"


def _shown_config(x: Any) -> Any:
    """The configuration of a loss scale or of a rule; anything else as it is, if short."""
    return x.get_config() if isinstance(x, Stateful) else shown(x)
