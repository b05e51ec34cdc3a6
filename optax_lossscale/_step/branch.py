"""Applies or skips a step, by a conditional or by a select.

Whether to apply a step is known only on the device, once the gradients are computed. A
compiled step can be skipped in two ways. With `"cond"`, a `lax.cond` runs one of two
branches: the inner optimizer, or nothing. With `"select"`, the inner optimizer runs on
every step, and a select returns either its results or the old values::

    new = inner_update(grads, old)
    new = lax.select(should_apply, new, old)

A conditional saves the work of a skipped step, but such steps are rare, so the default
is the way that moves fewer bytes on the applied ones:

- On CPU, a conditional, which computes its results in place.
- On GPU and TPU, a select, which is fused into the kernel that computes the result.
  There, a conditional may put its results into separate buffers and copy them from
  these: on a TPU those of `update`, and on a GPU, with jax 0.10, those of
  `apply_gradients`.

What this file says about XLA was read from programs compiled with jax 0.10 to 0.12, not
timed.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._arrays.checks import is_traced
from optax_lossscale._arrays.precision import strongly_typed
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.decision import Flag
from optax_lossscale._step.inputs import StepInputs
from optax_lossscale._step.update import InnerUpdate

Branch = Literal["cond", "select"]


def apply_or_skip(
    should_apply: Flag,
    update: InnerUpdate,
    operands: tuple[StepInputs, LossScale, Any],
    branch: Branch | None,
    *,
    skips_nonfinite: bool,
) -> tuple[Any, Any]:
    """Applies or skips a step; returns new parameters or updates, and the inner state.

    If nothing traces the step or nothing was checked, the value of `should_apply` is
    known. Then no branch is compiled: an applied step runs `update` alone, and a
    skipped step does not run it, unless `branch="select"`.

    Args:
      should_apply: whether to apply the step; True if nothing was checked.
      update: the inner update, which returns parameters or updates. A skipped step
        returns the old parameters, or zeros for the updates.
      operands: the inputs, still scaled, the loss scale and the inner state. The
        branches receive these as arguments, because branches that close over arrays
        take longer to trace.
      branch: the way to skip; None chooses by the platform that the step is compiled
        for: a conditional on CPU, a select elsewhere.
      skips_nonfinite: whether steps that are not finite are always skipped.
    """
    traced = is_traced(should_apply)
    # A traced step calls this in several branches; under `jit`, the update is traced
    # only once.
    run_inner = jax.jit(update.run) if traced else update.run

    def apply(scaled, loss_scale, inner_state):
        # The gradients are unscaled a second time, because XLA fuses this with the
        # inner update. Those that were checked would have to be written to memory.
        return run_inner(scaled.unscaled_by(loss_scale), inner_state)

    def skip(scaled, loss_scale, inner_state):
        if update.to_params:
            return jax.tree.map(strongly_typed, scaled.params), inner_state
        # `inner` chooses their dtypes, and need not be given parameters.
        updates, _ = jax.eval_shape(apply, scaled, loss_scale, inner_state)
        return jax.tree.map(jnp.zeros_like, updates), inner_state

    def by_cond(flag, *operands):
        return lax.cond(flag, apply, skip, *operands)

    def by_select(flag, scaled, loss_scale, inner_state):
        unscaled = scaled.unscaled_by(loss_scale)
        if skips_nonfinite:
            # `inner` also runs on a skipped step. What it makes of a NaN is dropped,
            # but not by `jax_debug_nans`, nor by a derivative of the step. With
            # `skip=None`, a step with a NaN may be applied, which zeros would hide.
            unscaled = unscaled.with_zeros_for_nonfinite()
        results = run_inner(unscaled, inner_state)
        kept = skip(scaled, loss_scale, inner_state)
        return jax.tree.map(partial(lax.select, flag), results, kept)

    if traced:
        if branch is None:
            return lax.platform_dependent(
                should_apply, *operands, cpu=by_cond, default=by_select
            )
        by_branch = by_cond if branch == "cond" else by_select
        return by_branch(should_apply, *operands)
    if should_apply:
        return apply(*operands)
    if branch == "select":
        return by_select(should_apply, *operands)
    # The results are copies, because callers may donate what a step returns. A
    # `lax.cond` would be compiled again on every step, and JAX's cache would hold each
    # of these programs.
    return jax.tree.map(jnp.copy, skip(*operands))
