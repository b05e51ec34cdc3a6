"""How a step is applied or skipped: by a branch, or by a select."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._arrays.precision import strong
from optax_lossscale._arrays.validation import is_traced
from optax_lossscale._step.inputs import Prepared
from optax_lossscale._step.state import LossScaleState
from optax_lossscale._step.update import InnerUpdate

Branch = Literal["cond", "select"]


def apply_or_skip(
    should_apply: jax.Array,
    update: InnerUpdate,
    scaled: Prepared,
    state: LossScaleState,
    branch: Branch | None,
) -> tuple[Any, Any]:
    """What a step gives, parameters or updates, and the inner state after it.

    A conditional computes one of the two, and on CPU its results stay in place. A GPU's
    compiler gives them buffers of their own and copies them afterwards, and a TPU's
    does so with updates; a select is part of the kernel that computes its result, but
    computes the step every time. `branch=None` takes what stays in place on the
    platform that the step is compiled for.
    """
    inner_update = update.apply
    if is_traced(should_apply):
        # It is called several times, in the branches for several platforms, but traced
        # once.
        inner_update = jax.jit(update.apply)

    # These take what they need as arguments: closing over it would take longer to
    # trace.
    def apply(scaled, state):
        # Unscaled a second time, where that fuses with the inner update: so the check
        # leaves no unscaled copy of the gradients in memory.
        unscaled = scaled.unscaled(state.loss_scale)
        return inner_update(unscaled, state.inner_state)

    def skip(scaled, state):
        if update.to_params:
            return jax.tree.map(strong, scaled.params), state.inner_state
        updates, _ = jax.eval_shape(apply, scaled, state)
        return jax.tree.map(jnp.zeros_like, updates), state.inner_state

    def cond(should_apply, scaled, state):
        return lax.cond(should_apply, apply, skip, scaled, state)

    def select(should_apply, scaled, state):
        unscaled = scaled.unscaled(state.loss_scale)
        if update.is_checked:
            unscaled = unscaled.finite()
        applied = inner_update(unscaled, state.inner_state)
        skipped = skip(scaled, state)
        return jax.tree.map(partial(lax.select, should_apply), applied, skipped)

    if branch == "select":
        return select(should_apply, scaled, state)
    if is_traced(should_apply):
        if branch == "cond":
            return cond(should_apply, scaled, state)
        return lax.platform_dependent(
            should_apply, scaled, state, cpu=cond, default=select
        )
    # Not compiled, so Python can branch. A `lax.cond` would be compiled anew at each
    # step, as its functions are new ones, and would keep what they close over for good
    # as constants.
    if should_apply:
        return apply(scaled, state)
    # Copies, as a compiled step returns: they may be donated, and zeros share one
    # array.
    return jax.tree.map(jnp.copy, skip(scaled, state))
