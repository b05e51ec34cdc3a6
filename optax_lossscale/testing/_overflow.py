"""The assertion that an overflow, or a NaN in the batch, leaves nothing behind.

What a skipped step must keep is what comes back to the next step: `_places.py` finds
out what that is. `_runs.py` runs the step with other loss scales and numbers. The
functions below each look at some of the runs, and return what is wrong with the step as
text, or an empty string.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._step.gradient import check_keywords
from optax_lossscale.testing._names import listed, name_of, not_ignored
from optax_lossscale.testing._places import what_comes_back
from optax_lossscale.testing._runs import Trial, equal, flat, outcomes, same


def assert_survives_overflow(
    step: Callable[..., Any],
    *args: Any,
    ignore: str | Collection[str] = (),
    **kwargs: Any,
) -> None:
    """Raises if gradients that overflow, or a NaN in the batch, leave something behind.

    Such a step must be skipped. Then the parameters, the optimizer's state and every
    other float that is given to the next step are as they were. Only integers outside
    of the optimizer's state may count, PRNG keys move on, the skip is counted, and the
    loss scale adapts, unless it is fixed. What is only returned, such as the loss and
    norms to be logged, may be anything. This assertion finds batch statistics, hidden
    states and averages without `where_applied`, replicas of `shard_map` that drift
    apart, and steps that are not skipped at all. Put it into your tests beside
    `assert_scale_invariant`, with the same arguments.

    It runs the step on copies of its arguments: with loss scales at which gradients
    overflow, up to infinity; with a NaN in the batch, the first array of floats that is
    not given to the next step (a batch of tokens has none); and several times with
    small changes, to see which numbers are given to the next step.

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
      AssertionError: if an overflow or a NaN leaves something behind. It says what that
        is, and what to do.
      ValueError: if there is no loss scale among the arguments, or several; if nothing
        that it is given comes back from the step; or if a name to ignore is not that of
        an output.
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
    infinite = overflowing[-1]
    # Where moments are zero, as before the first step, an optimizer that runs on zeros
    # leaves no trace. It does in the runs with other numbers.
    back, nudged = what_comes_back(trial, [usual, infinite])
    judged = {path: back[path] for path in not_ignored(ignore, usual) if path in back}
    fault = (
        _drifted(usual, judged)
        or _after_overflow(trial, overflowing, nudged, judged)
        or _applied_at_infinity(trial, infinite, usual, judged)
        or _after_nan(trial, back, judged)
    )
    if fault:
        raise AssertionError(f"the step does not survive an overflow. {fault}")


def is_stuck(runs):
    """Whether the loss scale that comes back does not adapt.

    It is as it was given, or it is made anew: the same for the first two of these runs.
    """
    is_made_anew = len(runs) > 1 and _is_made_anew(*runs[:2])
    return is_made_anew or any(map(_is_as_given, runs))


def _is_made_anew(run, other):
    """Whether two runs at different loss scales return the same one, although skipped."""
    backed_off, _ = outcomes(run.loss_scale)
    others, _ = outcomes(other.loss_scale)
    if same(backed_off, others) or not (run.was_skipped and other.was_skipped):
        return False
    pairs = zip(run.loss_scales, other.loss_scales, strict=False)
    adapting = [(x, y) for x, y in pairs if jax.tree.leaves(x)]  # no fixed ones
    return bool(adapting) and all(same(x, y) for x, y in adapting)


def _is_as_given(run):
    """Whether the loss scale comes back as it was given, although it should adapt."""
    if not run.loss_scales:
        return False
    backed_off, other = outcomes(run.loss_scale)
    possible = [backed_off] if run.was_skipped else [backed_off, other]
    may_stay = any(same(x, run.loss_scale) for x in possible)
    stays = all(same(x, run.loss_scale) for x in run.loss_scales)
    return stays and not may_stay


def left_behind(runs, back):
    """The fault that skipped steps change what comes back; empty if there is none.

    `back` has for each output that comes back its place among the arguments.
    """
    for run in runs:
        left = _changed(run, back)
        if left and not run.flags.any():
            return listed(_LEFT, left, _KEEP)
    return ""


def _changed(run, back):
    """The paths of outputs in `back` that differ from their arguments."""
    changed = []
    for path, place in back.items():
        before = flat(run.given[place])
        if not equal(run.outputs.get(path, before), before):
            changed.append(path)
    return changed


def _after_overflow(trial, runs, nudged, judged):
    """The fault after gradients overflow, and what to do; empty if there is none."""
    if is_stuck(runs):
        return STUCK
    fault = left_behind(runs + nudged, judged)
    if fault:
        return fault
    if any(run.states and run.was_skipped and run.more_skipped <= 0 for run in runs):
        return _UNCOUNTED
    if any(_counts_on(trial, run) for run in runs):
        return _COUNTS_ON
    return ""


def _counts_on(trial, run):
    """Whether a skipped step changes an integer of an optimizer, such as a count."""
    # Of several states, one may be skipped and another one applied.
    is_one_state = max(len(trial.states), len(run.states)) <= 1
    are_alike = len(trial.counts) == len(run.counts)
    if not (run.was_skipped and is_one_state and are_alike):
        return False
    pairs = zip(trial.counts, run.counts, strict=True)
    return any(not equal(old, new) for old, new in pairs)


def _applied_at_infinity(trial, infinite, usual, judged):
    """The fault that a step is applied at an infinite loss scale; empty if it is not.

    `infinite` is the run at that scale, and `usual` one at the scale that was given.
    """
    if not infinite.flags.any() or _need_not_overflow(trial, judged):
        return ""
    changes = _changed(infinite, judged)
    # Gradients that were not scaled are zero, divided by infinity, and change nothing.
    if infinite.flags.all() and not changes:
        changes = _changed(usual, judged)
    return listed(APPLIED, changes, APPLIED_REMEDY)


def _need_not_overflow(trial, judged):
    """Whether nothing has to overflow at an infinite loss scale.

    A step may leave out the multiplication by a fixed scale of 1. Then it is evidence
    enough that it is skipped with a NaN in something that comes back to it, such as a
    parameter.
    """
    if trial.loss_scale != FixedLossScale(1):
        return False
    return any(_with_nan(trial, place).was_skipped for place in judged.values())


def _drifted(run, judged):
    """The fault that replicas drift apart; empty if they do not.

    What is only returned, such as the loss of each device, may differ; not so a loss
    scale, which is not among the other outputs.
    """
    drifted = [x for x in run.drifted if x in judged or x not in run.outputs]
    return listed(_DRIFTED, drifted, _ONE_DECISION)


def _first_of_batch(trial, back):
    """The path of the first array of floats that does not come back, or None."""
    given_back = set(back.values())
    for path, x in trial.floats.items():
        if x.ndim and path not in given_back:
            return path
    return None


def _after_nan(trial, back, judged):
    """The fault after a step with a NaN in the batch; empty if there is none."""
    batch = _first_of_batch(trial, back)
    if batch is None:
        return ""
    run = _with_nan(trial, batch)
    drifted = _drifted(run, judged)
    if drifted:
        return drifted
    # A step that is applied may be right: the NaN may not have reached the loss, or
    # only one of several steps that are taken in one. Then only outputs that are not
    # finite are wrong.
    left = [
        path
        for path in _changed(run, judged)
        if run.was_skipped or not np.isfinite(run.outputs[path]).all()
    ]
    return listed(_LEFT_BY_NAN.format(name=name_of(batch)), left, _KEEP)


def _with_nan(trial, place):
    """The run with a NaN in one of the arguments' arrays."""
    numbers = trial.floats[place].copy()
    numbers.flat[0] = np.nan
    return trial.run(trial.loss_scale, {place: numbers})


_LEFT = "A loss scale that overflows, at which the step should be skipped, changes"
_LEFT_BY_NAN = "With a NaN in {name}, these come back other than given:"
_DRIFTED = "Devices hold copies of these outputs that differ:"
APPLIED = (
    "The loss scale is infinite, gradients should overflow, but the step is applied, to"
)
_ONE_DECISION = """\
So each takes the step by its own gradients, or decides by these whether to skip it. Average the
gradients over all devices before anything else, with jax.lax.pmean, and give with_loss_scale the
axis_name."""
_KEEP = """\
Let tx.apply_gradients or tx.minimize take the step: they keep the parameters and the optimizer's
state. Keep all else that the step changes, such as batch statistics or an average of the
parameters, with ols.where_applied(state, new, old), where state is what the step made. Name what
is meant to move on all the same, such as a replay buffer, in ignore=."""
APPLIED_REMEDY = """\
Either gradients are not multiplied by the loss scale of the state that the step is given: use
value_and_scaled_grad(loss_fn, state) or scale_gradient(loss, state). Or what is not finite is
replaced before it is checked, by nan_to_num or a where: hand the optimizer scaled gradients as
they come. Or nothing is checked, with skip=None and a fixed loss scale: use skip="nonfinite". Or
they are all zero: give the step a batch that it learns from."""
STUCK = """\
Gradients overflow, and the loss scale comes back as it was given, or as it was at first, so the
next step overflows, too: return the state that the step makes, with its loss scale. Or the loss
itself is not finite where gradients overflow, as in a step of SAM, whose second loss is computed
from the first gradient: then no lower scale is tried."""
_COUNTS_ON = f"""\
The step is skipped, but an integer in the optimizer's state changes, such as Adam's count.
{_KEEP}"""
_UNCOUNTED = """\
The step is skipped, but the state that comes back does not count it: return the state that the
step makes as it is, not one put together from old and new."""
