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

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._arrays.precision import strong
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

    Without `jit`, `should_apply` is known, and Python branches, unless
    `branch="select"`.

    Args:
      should_apply: whether to apply the step; True if nothing was checked.
      update: the inner update, which returns parameters or updates. For a skipped step,
        these are the parameters as they are, or zeros.
      operands: the inputs, still scaled, and the state.
      branch: the way to skip; with None, the platform that the step is compiled for
        decides: a conditional on CPU, a select elsewhere.
      skips_nonfinite: whether steps that are not finite are always skipped.
    """
    is_known = not is_traced(should_apply)
    run = update.apply if is_known else jax.jit(update.apply)
    results = _Results(update, run, skips_nonfinite)
    if should_apply is True:
        return results.applied(*operands)
    if branch == "select":
        return results.selected(should_apply, *operands)
    if is_known:
        # A `lax.cond` would be compiled anew at each step, as its functions are new,
        # and JAX's cache would keep forever what they close over.
        if should_apply:
            return results.applied(*operands)
        # The caller may donate what is returned, so it must be copies, like the results
        # of a compiled step. (Zeros of one shape may be the same array.)
        return jax.tree.map(jnp.copy, results.skipped(*operands))
    if branch == "cond":
        return results.by_cond(should_apply, *operands)
    return lax.platform_dependent(
        should_apply, *operands, cpu=results.by_cond, default=results.selected
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Results:
    """The results of a step, as functions of its scaled inputs and its state.

    The arrays are arguments, as functions that close over arrays take longer to trace.
    """

    update: InnerUpdate
    # `update.apply`, under `jit` if the step is: several branches trace it only once
    run: Callable[..., Any]
    skips_nonfinite: bool

    def applied(self, scaled: StepInputs, state: LossScaleState) -> Any:
        """The results if the step is applied."""
        # The check has unscaled the gradients once. To do so again, where it fuses with
        # the inner update, is cheaper than to keep an unscaled copy in memory.
        return self.run(scaled.unscaled_by(state.loss_scale), state.inner_state)

    def skipped(self, scaled: StepInputs, state: LossScaleState) -> Any:
        """The results if the step is skipped, of the types that `applied` returns."""
        if self.update.to_params:
            return jax.tree.map(strong, scaled.params), state.inner_state
        updates, _ = jax.eval_shape(self.applied, scaled, state)
        return jax.tree.map(jnp.zeros_like, updates), state.inner_state

    def by_cond(
        self, flag: jax.Array, scaled: StepInputs, state: LossScaleState
    ) -> Any:
        """The results of the branch that a conditional takes."""
        return lax.cond(flag, self.applied, self.skipped, scaled, state)

    def selected(
        self, flag: jax.Array, scaled: StepInputs, state: LossScaleState
    ) -> Any:
        """The results that a select chooses, after the inner update has run anyway."""
        unscaled = scaled.unscaled_by(state.loss_scale)
        if self.skips_nonfinite:
            # A skipped step runs, too, and `inner` should see no NaN even then.
            unscaled = unscaled.with_zeros_for_nonfinite()
        applied = self.run(unscaled, state.inner_state)
        return jax.tree.map(
            partial(lax.select, flag), applied, self.skipped(scaled, state)
        )
