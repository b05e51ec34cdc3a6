"""The assertion that an overflow, or a NaN in the batch, leaves nothing behind.

The evidence consists of trials in which the step should be skipped: at loss scales at
which gradients overflow, and with a NaN in the batch. There the carry of the step, that
is, what comes back to the next one, should be as it was given.

Each of the functions below asks for one fault. It returns the fault as text, which is
empty if there is none.
"""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._step.gradient import check_keywords
from optax_lossscale.testing._carry import find_carry, nudges, within
from optax_lossscale.testing._contents import equal, is_finite
from optax_lossscale.testing._experiment import Experiment
from optax_lossscale.testing._output_names import listed, name_of, not_ignored
from optax_lossscale.testing._skipping import (
    KEEP,
    applied_at_infinity,
    changed,
    left_behind,
    stuck,
)


def assert_survives_overflow(
    step: Callable[..., Any],
    *args: Any,
    ignore: str | Collection[str] = (),
    **kwargs: Any,
) -> None:
    """Raises if gradients that overflow, or a NaN in the batch, leave something behind.

    Such a step must be skipped. Then the parameters, the optimizer's state and every
    other float that is given to the next step must be as they were, the skip must be
    counted, and the loss scale must adapt, unless it is fixed. PRNG keys, integers
    outside of the optimizer's state, and what is only returned, such as the loss and
    norms to be logged, may be anything.

    This assertion finds batch statistics, hidden states and averages without
    `where_applied`, replicas of `shard_map` that drift apart, and steps that are not
    skipped at all. Put it into your tests beside `assert_scale_invariant`, with the
    same arguments.

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
      TypeError: if the arguments are traced, or an argument `ignore` of the step's own
        gets no value.

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
      AssertionError: the step does not survive an overflow. At a loss scale where gradients...
    """
    check_keywords(step, ["ignore"], args)
    experiment = Experiment("assert_survives_overflow", step, args, kwargs)
    usual = experiment.trial(experiment.loss_scale)
    overflowing = experiment.overflowing()
    infinite = overflowing[-1]
    nudged = nudges(experiment, [usual, infinite])
    carry = find_carry(experiment, usual, nudged)
    judged = within(carry, not_ignored(ignore, usual.outputs))
    # Where moments are zero, as before the first step, an optimizer that runs on zeros
    # leaves no trace. It does in the trials with other numbers.
    to_be_skipped = overflowing + [nudge.repeated for nudge in nudged]
    fault = (
        _drifted(usual, judged)
        or stuck(overflowing)
        or left_behind(to_be_skipped, judged)
        or _uncounted(overflowing)
        or _counts_on(overflowing)
        or _overflow_applied(experiment, infinite, usual, judged)
        or _after_nan(experiment, carry, judged)
    )
    if fault:
        raise AssertionError(f"the step does not survive an overflow. {fault}")


def _drifted(trial, judged):
    """The fault that replicas drift apart.

    What is only returned, such as the loss of each device, may differ; not so a loss
    scale, which is not among the other outputs.
    """
    outputs = trial.outputs
    drifted = [x for x in trial.after.drifted if x in judged or x not in outputs]
    return listed(_DRIFTED, drifted, _ONE_DECISION)


def _uncounted(trials):
    """The fault that the state that comes back does not count a skipped step."""
    for trial in trials:
        if trial.after.states and trial.was_skipped and trial.more_skipped <= 0:
            return _UNCOUNTED
    return ""


def _counts_on(trials):
    """The fault that a skipped step changes an integer of an optimizer."""
    for trial in trials:
        before = trial.before
        after = trial.after
        # Of several states, one may be skipped and another one applied.
        how_many_states = max(len(before.states), len(after.states))
        are_alike = len(before.counts) == len(after.counts)
        are_kept = all(map(equal, before.counts, after.counts))
        is_told = trial.was_skipped and how_many_states <= 1
        if is_told and are_alike and not are_kept:
            return _COUNTS_ON
    return ""


def _overflow_applied(experiment, infinite, usual, judged):
    """The fault that a step is applied at an infinite loss scale.

    `infinite` is the trial at that scale, and `usual` one at the scale that was given.
    """
    # The last of the trials that overflow is finite if the step fails at infinity.
    is_applied = infinite.is_infinite and infinite.flags.any()
    if not is_applied or _need_not_overflow(experiment, judged):
        return ""
    changes = changed(infinite, judged)
    # Gradients that were not scaled are zero, divided by infinity, and change nothing.
    if infinite.flags.all() and not changes:
        changes = changed(usual, judged)
    return applied_at_infinity(changes)


def _need_not_overflow(experiment, judged):
    """Whether nothing has to overflow at an infinite loss scale.

    A step may leave out the multiplication by a fixed scale of 1. Then it is evidence
    enough that it is skipped with a NaN in something that comes back to it, such as a
    parameter.
    """
    if experiment.loss_scale != FixedLossScale(1):
        return False
    return any(_with_nan(experiment, place).was_skipped for place in judged.values())


def _after_nan(experiment, carry, judged):
    """The fault after a step with a NaN in the batch."""
    batch = _first_of_batch(experiment, carry)
    if batch is None:
        return ""
    trial = _with_nan(experiment, batch)
    # A step that is applied may be right: the NaN may not have reached the loss, or
    # only one of several steps that are taken in one. Then only outputs that are not
    # finite are wrong.
    left = [
        path
        for path in changed(trial, judged)
        if trial.was_skipped or not is_finite(trial.outputs[path])
    ]
    by_nan = _LEFT_BY_NAN.format(name=name_of(batch))
    return _drifted(trial, judged) or listed(by_nan, left, KEEP)


def _first_of_batch(experiment, carry):
    """The path of the first array of floats that does not come back, or None."""
    given_back = set(carry.values())
    for path, x in experiment.floats.items():
        if x.ndim and path not in given_back:
            return path
    return None


def _with_nan(experiment, place):
    """The trial with a NaN in one of the arguments' arrays."""
    numbers = experiment.floats[place].copy()
    numbers.flat[0] = np.nan
    return experiment.trial(experiment.loss_scale, {place: numbers})


_LEFT_BY_NAN = "With a NaN in {name}, the step wrongly changed:"
_DRIFTED = "Devices hold copies of these outputs that differ:"
_ONE_DECISION = """\
So each takes the step by its own gradients, or decides by these whether to skip it. Average the
gradients over all devices before anything else, with jax.lax.pmean, and give with_loss_scale the
axis_name."""
_COUNTS_ON = f"""\
The step is skipped, but an integer in the optimizer's state changes, such as Adam's count.
{KEEP}"""
_UNCOUNTED = """\
The step is skipped, but the state that comes back does not count it: return the state that the
step makes as it is, not one put together from old and new."""
