"""`assert_survives_overflow`: no overflow, or NaN in the batch, spoils a later step.

The step is run where it should be skipped: at loss scales so large that gradients
overflow, and with a NaN in its batch. Its *carry*, that is, what it passes on to the
next step, such as parameters and moments, should come back unchanged from such a run.
`_carry.py` explains how the carry is found.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from optax_lossscale.testing._carry import Carry, find_carry, within
from optax_lossscale.testing._experiment import Experiment
from optax_lossscale.testing._numbers import Path, is_finite
from optax_lossscale.testing._output_names import (
    format_fault,
    name_of,
    without_ignored,
)
from optax_lossscale.testing._skipping import (
    KEEP_REMEDY,
    carry_not_kept,
    changed_outputs,
    overflow_applied,
    scale_not_adapted,
)
from optax_lossscale.testing._trial import Trial


def assert_survives_overflow(
    step: Callable[..., Any],
    /,
    *args: Any,
    ignore: str | Collection[str] = (),
    **kwargs: Any,
) -> None:
    """Raises if an overflow, or a NaN in the batch, spoils what a step passes on.

    One bad step is enough to ruin a run: a NaN that gets into batch statistics, a
    hidden state or an average of the parameters stays there. This assertion finds
    arrays of this kind that are updated without `where_applied`, replicas of
    `shard_map` that drift apart, and steps that are not skipped at all. Put it into
    your tests beside `assert_scale_invariant`, with the same arguments.

    A step whose gradients overflow must be skipped:

    - The parameters, the optimizer's state and all other arrays of floats that the step
      passes on to the next step stay as they were.
    - The state counts the skip.
    - The loss scale adapts, unless it is fixed.

    A step with a NaN in its batch must keep the same arrays if it is skipped. If it is
    applied, for example because the NaN does not reach the loss, none of them may
    become infinite or NaN. PRNG keys, Python numbers, the state of a skip rule,
    integers outside the states of Optax's own transformations, and outputs that are not
    passed on, such as the loss and norms for a log, are not checked.

    The batch is assumed to be the first array of floats among the arguments that is not
    passed on and is neither a scalar nor empty, so pass constants, such as class
    weights, after the batch. (JAX orders dicts and keyword arguments by name.) If there
    is no such array, as with a batch of tokens, no NaN is tried.

    The step is run several times, on copies of its arguments:

    - At its own loss scale, and at 1 if the scale adapts.
    - At loss scales where gradients overflow, up to infinity.
    - With a NaN in the batch.
    - With small changes to one argument at a time, twice for each argument that holds
      arrays of floats. These runs show what the step passes on: an output that changes
      much as an argument does counts as its new value. If it is not, list it in
      `ignore`. Examples are an autoencoder's prediction, and a loss that is multiplied
      by a weight, if that weight is an array among the arguments. Parameters are
      changed in this way, too. If the step then projects them, for example by a pruning
      mask, it changes them even when it is skipped, which is reported: pass the
      projected parameters to `where_applied` as well.

    A new value that does not depend on the old one may go unchecked, such as a running
    maximum that is still 0 and that the batch exceeds. Test such a step with a later
    state, in which the maximum is above the elements of the batch.

    If the loss scale adapts and the step raises an error where it is infinite, that run
    is left out. Any other error of the step is passed on.

    Args:
      step: the training step, compiled or not. It returns its new state or changes it
        in place, and may donate its arguments.
      *args: the step's arguments, which are not changed. They must hold exactly one
        loss scale, for instance in an optimizer state, a train state or an
        `nnx.Optimizer`. Fixed ones beside one that adapts do not count.
      ignore: the name of an output that an overflow may change, or several names, as
        they appear in the error: `"result[2]['mean']"`, or `"result[2]"` for
        everything in it.
      **kwargs: the step's keyword arguments, which are not changed either. If the step
        has an argument named `ignore`, bind it with `functools.partial`.

    Raises:
      AssertionError: if a skipped step changes what is passed on to the next step, or
        a NaN in the batch makes any of this infinite or NaN. This error, like the next
        two, names the outputs concerned, if any, and suggests a fix.
      AssertionError: if the step is not skipped on overflow, the skip is not counted,
        or the loss scale does not adapt.
      AssertionError: if the optimizer's state is not returned, or replicas differ.
      ValueError: if the arguments hold no loss scale, or several that adapt.
      ValueError: if the step passes neither an array of floats nor a loss scale on to
        the next step. Let it return its new parameters and state.
      ValueError: if `ignore` names something that is not an output. The error lists the
        outputs.
      TypeError: if the arguments are traced, or the step has an argument named `ignore`
        that is not bound.

    Warns:
      UserWarning: if no fault is found, but the step raises an error at an infinite
        loss scale, other than the `LossScaleError` of `raise_if_stuck`.

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
      AssertionError: an overflow changes what the step passes on...

      The error names `result[1]`, the mean. In its place, a correct step returns
      `ols.where_applied(state, 0.9 * mean + 0.1 * jnp.mean(x), mean)`.
    """
    experiment = Experiment("assert_survives_overflow", step, args, kwargs)
    baseline = experiment.baseline
    overflow_trials = experiment.overflow_trials
    carry = find_carry(experiment)
    outputs = without_ignored(ignore, baseline.outputs)
    floats = within(carry, outputs, experiment.floats)
    counts = within(carry, outputs, experiment.counts)
    checked = floats | counts
    fault = (
        _state_not_returned(experiment)
        or _replicas_diverge(baseline, floats)
        or _replicas_diverge(experiment.trial_at_one, floats)
        or scale_not_adapted(overflow_trials)
        or carry_not_kept(experiment, checked)
        or _skip_not_counted(overflow_trials)
        or overflow_applied(experiment, baseline, floats)
        or _nan_not_skipped(experiment, carry, checked)
    )
    if fault:
        raise AssertionError(fault)
    experiment.warn_of_error()


def _state_not_returned(experiment: Experiment) -> str:
    """Reports a step that accepts a `LossScaleState` but returns none."""
    if experiment.has_state and not experiment.baseline.states:
        return _NOT_RETURNED
    return ""


def _replicas_diverge(trial: Trial, checked: Carry) -> str:
    """Reports outputs and loss scales whose copies differ between devices.

    Outputs that are not in `checked`, such as each device's own loss, may differ. Loss
    scales, which are not among `trial.outputs`, may not.
    """
    diverged = [
        path for path in trial.diverged if path in checked or path not in trial.outputs
    ]
    return format_fault(_DIVERGED, diverged, _DIVERGED_REMEDY)


def _skip_not_counted(overflow_trials: Iterable[Trial]) -> str:
    """Reports a skipped step that returns a state in which the skip is not counted."""
    for trial in overflow_trials:
        if trial.states and trial.was_skipped and trial.skip_count_change <= 0:
            return _UNCOUNTED
    return ""


def _nan_not_skipped(
    experiment: Experiment,
    carry: Carry,
    checked: Carry,
) -> str:
    """Reports a NaN in the batch that changes the carry or makes replicas diverge."""
    batch = _batch_in(experiment, carry)
    if batch is None:
        return ""
    trial = experiment.trial_with_nan(batch)
    changed = changed_outputs(trial, checked)
    if not experiment.skips_all(trial):
        # Applying the step may be right: perhaps the NaN did not reach the loss, or
        # reached only one of several updates that the step makes. An output may then
        # change, but not to infinity or NaN.
        changed = [path for path in changed if not is_finite(trial.outputs[path])]
    title = _CHANGED_BY_NAN.format(name=name_of(batch))
    changed_fault = format_fault(title, changed, KEEP_REMEDY)
    return _replicas_diverge(trial, checked) or changed_fault


def _batch_in(experiment: Experiment, carry: Carry) -> Path | None:
    """Returns the path of the argument that is assumed to be the batch, or None.

    This is the first array of floats that is not in the carry and is neither a scalar
    nor empty.
    """
    in_carry = set(carry.values())
    for path, x in experiment.floats.items():
        if path not in in_carry and x.ndim and x.size:
            return path
    return None


_NOT_RETURNED = """\
the step does not return the optimizer's new state.
So the next step begins with the old state, and may overflow at the same loss scale.
Return the new state, with its loss scale."""
_DIVERGED = """\
devices drift apart.
Their copies of these outputs differ:"""
_DIVERGED_REMEDY = """\
Each device applies its own gradients, or decides from them alone whether to skip the
step.
- Before anything else, average the gradients over all devices:
  jax.lax.pmean(grads, axis_name).
- Let all devices decide together: with_loss_scale(optimizer, axis_name=axis_name)."""
_UNCOUNTED = """\
the step is skipped, but the state that comes back does not count the skip.
Return the new state as it is, not one assembled from the old state and the new."""
_CHANGED_BY_NAN = """\
a NaN spoils what the step passes on.
With a NaN in {name}, the step wrongly changed:"""
