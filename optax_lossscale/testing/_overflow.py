"""A test for training steps: of an overflow, or of a NaN in the batch, nothing is left."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._step.gradient import check_keywords
from optax_lossscale.testing._names import listed, name_of, not_ignored
from optax_lossscale.testing._places import what_comes_back
from optax_lossscale.testing._runs import Path, Run, Trial, equal, flat, outcomes, same


def assert_survives_overflow(
    step: Callable[..., Any],
    *args: Any,
    ignore: str | Collection[str] = (),
    **kwargs: Any,
) -> None:
    """Raises if a step whose gradients overflow, or whose batch holds a NaN, leaves a trace.

    Such a step is to be skipped: the parameters, the optimizer's state and every other
    float that comes back, to be given to the next step, are as they were given. Only
    integers may count and keys move on, and the loss scale adapts, unless it is fixed.
    What is only returned, such as the loss and norms to be logged, may be anything. It
    finds batch statistics, hidden states and averages without
    `where_applied`, and steps that are not skipped at all. Put it into your tests
    beside `assert_scale_invariant`, with the same arguments.

    It runs the step on copies of its arguments: with a loss scale that is beyond all
    numbers; with a NaN in the first array of floats that does not come back, the batch,
    if there is one (tokens are none); and some times with small changes, to see which
    numbers come back.

    Args:
      step: the training step, compiled or not. It returns its new state or changes it
        in place, and may donate its arguments.
      *args: its arguments, which stay as they are. Somewhere among them is one loss
        scale: in an optimizer state, a train state, an `nnx.Optimizer`.
      ignore: outputs that an overflow may change, one or several, by their names in the
        error: `"result[2]['mean']"`, or `"result[2]"` for everything in it.
      **kwargs: its keyword arguments, likewise; bind one named `ignore` with
        `functools.partial`.

    Raises:
      AssertionError: if something is left of an overflow or a NaN, what it is, and what
        to do.
      ValueError: if there is no loss scale among the arguments, or several; or if a
        name to ignore is not that of an output.
      TypeError: if the arguments are traced.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.adam(1e-3))
      >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
      >>> @jax.jit
      ... def wrong(params, mean, state, x):
      ...     loss, params, state = tx.minimize(loss_fn, state, params, x)
      ...     return params, 0.9 * mean + 0.1 * jnp.mean(x), state, loss
      >>> params, mean, x = jnp.ones(3), jnp.zeros(()), jnp.ones((2, 3))
      >>> ols.testing.assert_survives_overflow(wrong, params, mean, tx.init(params), x)
      Traceback (most recent call last):
          ...
      AssertionError: the step does not survive an overflow. A loss scale that overflows, at...
    """
    check_keywords(step, ["ignore"], args)
    trial = Trial("assert_survives_overflow", step, args, kwargs)
    usual = trial.run(trial.loss_scale)
    overflowing = trial.overflowing()
    back = what_comes_back(trial, [usual, overflowing[-1]])
    judged = {}
    for path in not_ignored(ignore, usual):
        if path in back:
            judged[path] = back[path]
    batch = _first_of_batch(trial, back)
    # A scale of 1 need not be multiplied by: there, a NaN in the batch tells.
    need_not_overflow = batch is not None and trial.loss_scale == FixedLossScale(1)
    fault = after_overflow(trial, overflowing, judged)
    if not fault and not need_not_overflow:
        fault = _applied_at_infinity(trial, overflowing[-1], usual, judged)
    if not fault and batch is not None:
        fault = _after_nan(trial, batch, judged)
    if fault:
        raise AssertionError(f"the step does not survive an overflow. {fault}")


def after_overflow(trial: Trial, runs: list[Run], judged: dict[Path, Path]) -> str:
    """What is wrong after gradients overflow, and what to do; empty if nothing is.

    Of the outputs to be judged it is given the arguments that they come back for.
    """
    for run in runs:
        if is_stuck(run):
            return STUCK
        changed = _changed(trial, run, judged)
        if changed and not run.flags.any():
            return listed(_LEFT, changed, _KEEP)
    return ""


def _applied_at_infinity(trial, beyond, usual, judged):
    """What a step is applied to beyond all loss scales, and what to do; empty if skipped."""
    if not beyond.flags.any():
        return ""
    changes = _changed(trial, beyond, judged)
    if beyond.flags.all() and not changes:  # gradients are 0, divided by infinity
        changes = _changed(trial, usual, judged)
    return listed(APPLIED, changes, APPLIED_REMEDY)


def is_stuck(run: Run) -> bool:
    """Whether the loss scale comes back as it was given, where it would have changed."""
    if not run.loss_scales:
        return False
    backed_off, other = outcomes(run.before)
    possible = [backed_off, other] if run.flags.any() else [backed_off]
    may_stay = any(same(x, run.before) for x in possible)
    stays = all(same(x, run.before) for x in run.loss_scales)
    return stays and not may_stay


def _changed(trial, run, judged):
    """What comes back from a run other than it was given."""
    changed = []
    for path, place in judged.items():
        before = flat(trial.floats[place])
        if not equal(run.outputs.get(path, before), before):
            changed.append(path)
    return changed


def _first_of_batch(trial, back):
    """The first array of floats that does not come back; None if there is none."""
    for path, x in trial.floats.items():
        if x.ndim and path not in back.values():
            return path
    return None


def _after_nan(trial, batch, judged):
    """What is wrong after a step on a batch with a NaN."""
    numbers = trial.floats[batch].copy()
    numbers.flat[0] = np.nan
    run = trial.run(trial.loss_scale, {batch: numbers})
    # If it is applied, the NaN may not reach the loss, or only the first of several steps.
    left = []
    for path in _changed(trial, run, judged):
        is_finite = np.isfinite(run.outputs[path]).all()
        if not run.flags.any() or not is_finite:
            left.append(path)
    return listed(_LEFT_BY_NAN.format(name=name_of(batch)), left, _KEEP)


_LEFT = "A loss scale that overflows, at which the step should be skipped, changes"
_LEFT_BY_NAN = "With a NaN in {name}, these come back other than given:"
APPLIED = (
    "The loss scale is infinite, gradients should overflow, but the step is applied, to"
)
_KEEP = """\
Let tx.apply_gradients or tx.minimize take the step: they keep the parameters and the optimizer's
state. Keep all else that the step changes, such as batch statistics or an average of the
parameters, with ols.where_applied(state, new, old), where state is what the step made."""
APPLIED_REMEDY = """\
Either gradients are not multiplied by the loss scale of the state that the step is given: use
value_and_scaled_grad(loss_fn, state) or scale_gradient(loss, state). Or what is not finite is
replaced before it is checked, by nan_to_num or a where: hand the optimizer scaled gradients as
they come. Or nothing is checked, with skip=None and a fixed loss scale: use skip="nonfinite". Or
they are all zero: give the step a batch that it learns from."""
STUCK = """\
Gradients overflow, and the loss scale comes back as it was given, so the next step overflows, too:
return the state that the step makes, with its loss scale."""
