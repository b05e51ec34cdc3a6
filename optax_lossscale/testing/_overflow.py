"""The assertion that an overflow, or a NaN in the batch, leaves nothing behind.

The evidence consists of trials in which the step should be skipped: at loss scales at
which gradients overflow, and with a NaN in the batch. There the carry of the step, that
is, what comes back to the next one, should be as it was given.

Each of the functions below asks for one fault. It returns the fault as text, which is
empty if there is none.
"""

from collections.abc import Callable, Collection
from typing import Any

from optax_lossscale._step.loss import check_keywords
from optax_lossscale.testing._carry import find_carry, within
from optax_lossscale.testing._experiment import Experiment
from optax_lossscale.testing._numbers import is_finite
from optax_lossscale.testing._output_names import listed, name_of, not_ignored
from optax_lossscale.testing._skipping import (
    KEEP,
    changed,
    left_behind,
    not_adapted,
    overflow_applied,
)


def assert_survives_overflow(
    step: Callable[..., Any],
    /,
    *args: Any,
    ignore: str | Collection[str] = (),
    **kwargs: Any,
) -> None:
    """Raises unless a step that overflows, or has a NaN in its batch, changes nothing.

    Such a step must be skipped. Then the parameters, the optimizer's state and every
    other array of floats that is given to the next step must be as they were, the skip
    must be counted, and the loss scale must adapt, unless it is fixed. PRNG keys,
    Python numbers, integers outside of the optimizer's state, and what is only
    returned, such as the loss and norms to be logged, may be anything.

    This assertion finds batch statistics, hidden states and averages that are updated
    without `where_applied`, replicas of `shard_map` that drift apart, and steps that
    are not skipped at all. Put it into your tests beside `assert_scale_invariant`, with
    the same arguments.

    It runs the step on copies of its arguments: with loss scales at which gradients
    overflow, up to infinity; with a NaN in the batch; and several times with small
    changes, to see which numbers are given to the next step. The batch is taken to be
    the first array of floats among the arguments that is not given to the next step,
    which may also be a constant, such as class weights, that comes before it. If there
    is none, as with a batch of tokens, no NaN is tried. If the step raises an error at
    an infinite loss scale, it is judged by the other runs alone.

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
      AssertionError: if an overflow or a NaN changes what is given to the next step, if
        the skip is not counted or the loss scale not adapted, or if replicas differ. It
        says which outputs are concerned, if any, and what to do.
      ValueError: if there is no loss scale among the arguments, or several; if neither
        an array of floats nor a loss scale that is given to the step comes back from
        it; or if a name to ignore is not that of an output.
      TypeError: if the arguments are traced, or the step itself has an argument named
        `ignore` that is not bound.

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
      AssertionError: the step does not survive an overflow, or its devices drift apart. At...
    """
    check_keywords(step, ["ignore"], args)
    experiment = Experiment("assert_survives_overflow", step, args, kwargs)
    baseline = experiment.baseline
    overflowing = experiment.overflowing
    carry = find_carry(experiment)
    outputs = not_ignored(ignore, baseline.outputs)
    judged = within(carry, outputs, experiment.floats)
    counts = within(carry, outputs, experiment.counts)
    fault = (
        _state_not_returned(experiment)
        or _replicas_diverge(baseline, judged)
        or not_adapted(overflowing)
        or left_behind(experiment.to_be_skipped, judged | counts)
        or _skip_not_counted(overflowing)
        or overflow_applied(experiment, baseline, judged)
        or _nan_left_behind(experiment, carry, judged | counts)
    )
    if fault:
        raise AssertionError(f"{_HEADLINE} {fault}")


def _state_not_returned(experiment):
    """The fault that a state of loss scaling is given, and none comes back."""
    is_returned = bool(experiment.baseline.states)
    return _NOT_RETURNED if experiment.has_state and not is_returned else ""


def _replicas_diverge(trial, judged):
    """The fault that replicas diverge.

    What is only returned, such as the loss of each device, may differ. Loss scales may
    not; they are not in `trial.outputs`.
    """
    outputs = trial.outputs
    diverged = [x for x in trial.diverged if x in judged or x not in outputs]
    return listed(_DIVERGED, diverged, _ONE_DECISION)


def _skip_not_counted(trials):
    """The fault that the state that comes back does not count a skipped step."""
    for trial in trials:
        if trial.states and trial.was_skipped and trial.more_skipped <= 0:
            return _UNCOUNTED
    return ""


def _nan_left_behind(experiment, carry, judged):
    """The fault that a NaN in the batch is left behind, or lets replicas diverge.

    The first array of floats that does not come back is taken for the batch.
    """
    given_back = set(carry.values())
    arrays = [path for path, x in experiment.floats.items() if x.ndim and x.size]
    batches = [path for path in arrays if path not in given_back]
    if not batches:
        return ""
    trial = experiment.with_nan(batches[0])
    # A step that is applied may be right: the NaN may not have reached the loss, or
    # only one of several steps that are taken in one. Then only outputs that are not
    # finite are wrong.
    left = [
        path
        for path in changed(trial, judged)
        if trial.was_skipped or not is_finite(trial.outputs[path])
    ]
    by_nan = _LEFT_BY_NAN.format(name=name_of(batches[0]))
    return _replicas_diverge(trial, judged) or listed(by_nan, left, KEEP)


_HEADLINE = "the step does not survive an overflow, or its devices drift apart."
_LEFT_BY_NAN = "With a NaN in {name}, the step wrongly changed:"
_DIVERGED = "Devices hold copies of these outputs that differ:"
_ONE_DECISION = """\
So each takes the step by its own gradients, or decides by these whether to skip it. Average the
gradients over all devices before anything else, with jax.lax.pmean, and give with_loss_scale the
axis_name."""
_NOT_RETURNED = """\
The optimizer's state does not come back, so the next step overflows, too: return the state that
the step makes, with its loss scale."""
_UNCOUNTED = """\
The step is skipped, but the state that comes back does not count it: return the state that the
step makes as it is, not one put together from old and new."""
