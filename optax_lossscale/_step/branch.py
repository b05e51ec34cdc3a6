"""How a step is applied or skipped: by a branch, or by a select."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._arrays.precision import strong
from optax_lossscale._step.inputs import Prepared, is_traced, zeros_like
from optax_lossscale._step.state import LossScaleState

Branch = Literal["cond", "select"]


def apply_or_skip(
    should_apply: jax.Array | Literal[True],
    update: Callable[[Prepared, Any], tuple[Any, Any]],
    given: Prepared,
    unscaled: Prepared,
    state: LossScaleState,
    branch: Branch | None,
    *,
    to_params: bool,
    is_checked: bool,
) -> tuple[Any, Any]:
    """What a step gives, parameters or updates, and the inner state after it.

    `is_checked` says that no step is applied whose gradients or loss are not finite.

    A conditional computes one of the two, and on CPU its results stay in place. A GPU's
    compiler gives them buffers of their own and copies them afterwards, and a TPU's
    does so with updates; a select is part of the kernel that computes its result, but
    computes the step every time.
    """
    if should_apply is True:
        return update(unscaled, state.inner_state)
    if is_traced(should_apply):
        # It is called several times, in the branches for several platforms, but traced
        # once.
        update = jax.jit(update)

    # These take what they need as arguments: closing over it would take longer to
    # trace.
    def apply(given, state):
        # Unscaled a second time, where that fuses with the inner update: so the check
        # leaves no unscaled copy of the gradients in memory.
        return update(given.unscaled(state.loss_scale), state.inner_state)

    def skip(given, state):
        if to_params:
            return jax.tree.map(strong, given.params), state.inner_state
        updates, _ = jax.eval_shape(update, unscaled, state.inner_state)
        return zeros_like(updates), state.inner_state

    def cond(should_apply, *given):
        return lax.cond(should_apply, apply, skip, *given)

    def select(should_apply, given, state):
        unless = False if is_checked else should_apply
        finite = given.unscaled(state.loss_scale).finite(unless=unless)
        applied = update(finite, state.inner_state)
        return jax.tree.map(
            partial(lax.select, should_apply), applied, skip(given, state)
        )

    if branch == "select":
        return select(should_apply, given, state)
    if not is_traced(should_apply):
        # Not compiled, so Python can branch. A `lax.cond` would be compiled anew at
        # each step, as its functions are new ones, and would keep what they close over
        # for good as constants. Copies, as a compiled step returns: they may be
        # donated, and zeros share one array.
        return (
            apply(given, state)
            if should_apply
            else jax.tree.map(jnp.copy, skip(given, state))
        )
    if branch == "cond":
        return cond(should_apply, given, state)
    return lax.platform_dependent(should_apply, given, state, cpu=cond, default=select)
