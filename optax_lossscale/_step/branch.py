"""How a step is applied or skipped: by a conditional, or by selecting the results.

Whether to apply a step is known only on the device, after the gradients are computed.
There are two ways to compile that. With `"cond"`, a `lax.cond` runs one of two
branches: the inner optimizer, or nothing. With `"select"`, the inner optimizer runs at
every step, and each of its results is replaced by the old value if the step is skipped.

A conditional saves the work of a skipped step, but skipped steps are rare. What counts
is how memory is used. On CPU, the results of a conditional stay in place. On GPU, the
compiler gives them buffers of their own, and copies them afterwards; on TPU, it does
the same with the updates that `update` returns. A select needs no copy, as it is part
of the kernel that computes the result. What is said of GPU and TPU, here and in
comments elsewhere, was seen in programs compiled for them; it is not timed.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._arrays.precision import strongly_typed
from optax_lossscale._arrays.validation import is_traced
from optax_lossscale._step.decision import Flag
from optax_lossscale._step.inputs import StepInputs
from optax_lossscale._step.state import LossScaleState
from optax_lossscale._step.update import InnerUpdate

Branch = Literal["cond", "select"]


def apply_or_skip(
    should_apply: Flag,
    update: InnerUpdate,
    operands: tuple[StepInputs, LossScaleState],
    branch: Branch | None,
    *,
    skips_nonfinite: bool,
) -> tuple[Any, Any]:
    """The results of a step: new parameters or updates, and the new inner state.

    Without `jit`, `should_apply` is known. Then an applied step runs `update` alone,
    and a skipped one runs it only with `branch="select"`.

    Args:
      should_apply: whether to apply the step; True if nothing was checked.
      update: the inner update, which returns parameters or updates. For a skipped step,
        these are the parameters as they are, or zeros.
      operands: the inputs, still scaled, and the state. They are arguments of the
        branches, which would take longer to trace if they closed over arrays.
      branch: the way to skip; with None, the platform that the step is compiled for
        decides: a conditional on CPU, a select elsewhere.
      skips_nonfinite: whether steps that are not finite are always skipped.
    """
    is_known = not is_traced(should_apply)
    # Several branches call it, and in a compiled step it is still traced only once.
    run = update.apply if is_known else jax.jit(update.apply)

    def applied(scaled, state):
        # To unscale once more, which fuses with the inner update, is cheaper than to
        # keep the unscaled gradients of the check in memory.
        return run(scaled.unscaled_by(state.loss_scale), state.inner_state)

    def skipped(scaled, state):
        if update.to_params:
            return jax.tree.map(strongly_typed, scaled.params), state.inner_state
        updates, _ = jax.eval_shape(applied, scaled, state)
        return jax.tree.map(jnp.zeros_like, updates), state.inner_state

    def by_cond(flag, scaled, state):
        return lax.cond(flag, applied, skipped, scaled, state)

    def by_select(flag, scaled, state):
        unscaled = scaled.unscaled_by(state.loss_scale)
        if skips_nonfinite:
            # A skipped step runs, too, and `inner` should see no NaN even then.
            unscaled = unscaled.with_zeros_for_nonfinite()
        results = run(unscaled, state.inner_state)
        choose = partial(lax.select, flag)
        return jax.tree.map(choose, results, skipped(scaled, state))

    if is_known and should_apply:
        return applied(*operands)
    if branch == "select":
        return by_select(should_apply, *operands)
    if is_known:
        # A `lax.cond` would be compiled anew at each step, and stay in JAX's cache. The
        # results are copies, like those of a compiled step, as they may be donated.
        return jax.tree.map(jnp.copy, skipped(*operands))
    if branch == "cond":
        return by_cond(should_apply, *operands)
    return lax.platform_dependent(
        should_apply, *operands, cpu=by_cond, default=by_select
    )
