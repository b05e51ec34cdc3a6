"""What is wrong with a step at loss scales at which gradients overflow.

The step should be skipped: its loss scale comes back lower, and all else that comes
back to it is as it was. At an infinite loss scale, all gradients overflow, so a step
that is applied there does not see its scale, or hides what is not finite.

A fault is text that names the outputs concerned, if any, and says what to do. It is
empty if there is none.
"""

from collections.abc import Iterable

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale.testing._carry import Carry
from optax_lossscale.testing._experiment import Experiment
from optax_lossscale.testing._numbers import Path
from optax_lossscale.testing._output_names import listed
from optax_lossscale.testing._trial import Trial


def not_adapted(trials: list[Trial]) -> str:
    """The fault that the loss scale that comes back is not adapted.

    Then the next step overflows, too. The step returned the loss scale that it was
    given, or the same one whatever it was given.
    """
    if _is_reset(trials[0], trials[-1]) or any(map(_is_as_given, trials)):
        return _NOT_ADAPTED
    return ""


def _is_reset(trial, other):
    """Whether two skipped steps return one loss scale where different ones are due."""
    if_skipped, _ = trial.adapted
    if_other_skipped, _ = other.adapted
    are_skipped = trial.was_skipped and other.was_skipped
    are_same = [other.returns(x) for x in trial.loss_scales]
    are_due = if_skipped == if_other_skipped
    return are_skipped and bool(are_same) and all(are_same) and not are_due


def _is_as_given(trial):
    """Whether the loss scale comes back as it was given, although it should adapt."""
    if_skipped, if_applied = trial.adapted
    due = [if_skipped] if trial.was_skipped else [if_skipped, if_applied]
    return trial.returns(trial.loss_scale) and trial.loss_scale not in due


def left_behind(trials: Iterable[Trial], carry: Carry) -> str:
    """The fault that skipped steps change what comes back.

    A step that does not say whether it was applied, a silent one, should be skipped
    where all gradients overflow.
    """
    for trial in trials:
        left = changed(trial, carry)
        should_be_skipped = trial.is_silent and trial.is_infinite
        if left and (trial.was_skipped or should_be_skipped):
            return listed(_LEFT, left, KEEP)
    return ""


def changed(trial: Trial, carry: Carry) -> list[Path]:
    """The outputs in `carry` that differ from their arguments in any number."""
    arguments = trial.given_fingerprints
    returned = trial.output_fingerprints
    return [
        output
        for output, argument in carry.items()
        if output in returned and returned[output] != arguments[argument]
    ]


def overflow_applied(experiment: Experiment, usual: Trial, carry: Carry) -> str:
    """The fault that a step is applied at an infinite loss scale.

    `usual` is a trial in which it is applied. There is no trial at an infinite scale if
    the step raises an error there.
    """
    highest = experiment.overflowing[-1]
    says_applied = highest.was_applied and not highest.is_silent
    is_applied = says_applied and highest.is_infinite
    if not is_applied or _need_not_overflow(experiment, carry):
        return ""
    # Gradients that were not scaled are zero, divided by infinity, and change nothing.
    changes = changed(highest, carry) or changed(usual, carry)
    return listed(_APPLIED, changes, APPLIED_REMEDY)


def _need_not_overflow(experiment, carry):
    """Whether nothing has to overflow at an infinite loss scale.

    A step may leave out the multiplication by a fixed scale of 1. If it is skipped when
    an argument that comes back, such as a parameter, holds a NaN, it does check its
    gradients, and nothing is wrong.
    """
    if experiment.loss_scale != FixedLossScale(1):
        return False
    return any(experiment.with_nan(x).was_skipped for x in carry.values())


_LEFT = (
    "At a loss scale where gradients overflow, so that the step should be skipped, it "
    "changed:"
)
_APPLIED = (
    "At an infinite loss scale, where all gradients overflow, the step was applied. It "
    "changed:"
)
KEEP = """\
Let tx.apply_gradients or tx.minimize take the step: they keep the parameters and the optimizer's
state, such as Adam's count, if all transformations are inside the wrapper. Keep all else that the
step changes, such as batch statistics or an average of the parameters, with
ols.where_applied(state, new, old), where state is the new state. Name what is meant to move
on all the same, such as a replay buffer, or is only returned, in ignore=."""
APPLIED_REMEDY = """\
Either gradients are not multiplied by the loss scale of the state that the step is given: use
value_and_scaled_grad(loss_fn, state) or scale_gradient(loss, state). Or what is not finite is
replaced before it is checked, by nan_to_num or a where: pass the optimizer the scaled gradients
unchanged. Or nothing is checked, with skip=None and a fixed loss scale: use skip="nonfinite". Or
they are all zero: give the step a batch that it learns from."""
_NOT_ADAPTED = """\
Gradients overflow, and the loss scale comes back as it was given, or as it was at first, so the
next step overflows, too: return the state that the step makes, with its loss scale. Or the loss
itself is not finite where gradients overflow, as in a step of SAM, whose second loss is computed
from the first gradient: then no lower scale is tried."""
