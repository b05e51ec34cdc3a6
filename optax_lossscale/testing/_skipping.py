"""Checks of a step at loss scales so large that gradients overflow.

A correct step is skipped there: it adapts its loss scale and leaves the rest of its
carry (see `_carry.py`) as it was. At an infinite loss scale, all gradients but zeros
overflow, so a step that is applied even there does not multiply by its loss scale,
replaces infinities before they are checked, checks nothing, or has gradients that are
all zero.
"""

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale.testing._carry import Carry
from optax_lossscale.testing._experiment import Experiment
from optax_lossscale.testing._numbers import Path
from optax_lossscale.testing._output_names import format_fault
from optax_lossscale.testing._trial import Trial


def scale_not_adapted(overflow_trials: list[Trial]) -> str:
    """Reports a step that does not adapt its loss scale, so the next step overflows.

    Such a step returns the loss scale that it was given, or the same one whatever it
    was given.
    """
    is_reset = _is_reset(overflow_trials[0], overflow_trials[-1])
    if is_reset or any(map(_keeps_scale, overflow_trials)):
        return _NOT_ADAPTED
    return ""


def _is_reset(first: Trial, last: Trial) -> bool:
    """Whether two skipped steps return equal loss scales that should be different."""
    are_skipped = first.was_skipped and last.was_skipped
    if_first_skipped, _ = first.adjusted
    if_last_skipped, _ = last.adjusted
    should_differ = if_first_skipped != if_last_skipped
    are_same = [last.returns_only(x) for x in first.loss_scales]
    return are_skipped and should_differ and bool(are_same) and all(are_same)


def _keeps_scale(trial: Trial) -> bool:
    """Whether a step returns the loss scale that it was given, but should adapt it."""
    if_skipped, if_applied = trial.adjusted
    expected = [if_skipped] if trial.was_skipped else [if_skipped, if_applied]
    return trial.returns_only(trial.loss_scale) and trial.loss_scale not in expected


def carry_not_kept(experiment: Experiment, carry: Carry) -> str:
    """Reports a skipped step that changes its carry.

    A silent step (see `Trial.is_silent`) does not show whether it was skipped, but at
    an infinite loss scale it should have been.
    """
    for trial in experiment.possibly_skipped:
        should_be_skipped = trial.is_silent and trial.is_infinite
        changed = changed_outputs(trial, carry)
        if changed and (experiment.skips_all(trial) or should_be_skipped):
            return format_fault(_NOT_KEPT, changed, KEEP_REMEDY)
    return ""


def changed_outputs(trial: Trial, carry: Carry) -> list[Path]:
    """Returns the outputs in a carry that differ from the arguments they update."""
    before = trial.argument_fingerprints
    after = trial.output_fingerprints
    return [
        output
        for output, argument in carry.items()
        if output in after and after[output] != before[argument]
    ]


def overflow_applied(experiment: Experiment, finite_trial: Trial, carry: Carry) -> str:
    """Reports a step that is applied at an infinite loss scale.

    A step that raises an error at an infinite loss scale passes this check. If the
    assertion passes as well, it warns of the error (see `Experiment.warn_of_error`).

    Args:
      experiment: runs the step.
      finite_trial: a trial at a finite loss scale.
      carry: the outputs that the error may name.
    """
    trial = experiment.overflow_trials[-1]
    says_applied = trial.was_applied and not trial.is_silent
    is_applied = says_applied and trial.is_infinite
    if not is_applied or _need_not_overflow(experiment, carry):
        return ""
    # Gradients that were not scaled become zero when they are divided by infinity. If
    # nothing changes in this trial for that reason, the outputs that change at a finite
    # loss scale are named instead.
    changed = changed_outputs(trial, carry) or changed_outputs(finite_trial, carry)
    return format_fault(_APPLIED, changed, _APPLIED_REMEDY)


def _need_not_overflow(experiment: Experiment, carry: Carry) -> bool:
    """Whether the step may be correct although it is applied at an infinite loss scale.

    A step with a fixed loss scale of 1 may omit the multiplication by 1. If such a step
    is skipped when a parameter or another argument in the carry holds a NaN, it does
    check its gradients, and nothing is wrong.
    """
    if experiment.loss_scale != FixedLossScale(1):
        return False
    nan_trials = map(experiment.trial_with_nan, carry.values())
    return any(trial.was_skipped for trial in nan_trials)


_NOT_ADAPTED = """\
the step does not adapt its loss scale.
The loss scale comes back as it was given, or at its initial value, although gradients
overflow. So the next step overflows, too. The reason is one of these:
- The step returns an older state or loss scale. Instead, return the state with its loss
  scale, as tx.apply_gradients or tx.minimize returned it.
- The loss itself is not finite where gradients overflow, so the loss scale does not
  fall. A step of SAM is an example, as it computes its second loss from the first
  gradient. As value=, pass a loss that is finite there, such as SAM's first one, or
  omit value=."""
_NOT_KEPT = """\
an overflow changes what the step passes on.
Where gradients overflow, so that the step should be skipped, it changed:"""

KEEP_REMEDY = """\
- Let tx.apply_gradients or tx.minimize take the step. They keep the parameters and the
  optimizer's state, such as Adam's count, if all transformations are inside the
  wrapper.
- For everything else that the step changes, such as batch statistics or an average of
  the parameters, use ols.where_applied(state, new, old), where state is the new state.
- In ignore=, name outputs that are meant to change anyway, such as a replay buffer, or
  that are not passed on to the next step."""
"""What an error suggests if a step changes outputs that it should keep."""

_APPLIED = """\
the step is applied at an infinite loss scale, where its gradients should overflow.
It updates these outputs:"""
_APPLIED_REMEDY = """\
The reason is one of these:
- Gradients are not multiplied by the loss scale of the state that the step is given.
  Use value_and_scaled_grad(loss_fn, state) or scale_gradient(loss, state).
- nan_to_num or where replaces infinities and NaNs before they are checked. Pass the
  scaled gradients to the optimizer unchanged.
- Nothing is checked, because the loss scale is fixed and skip=None. Use
  skip="nonfinite".
- All gradients are zero. Give the step a batch that it learns from."""
