"""What is wrong with a step at loss scales at which gradients overflow.

The step should be skipped: its loss scale comes back lower, and all else that comes
back to it is as it was. At an infinite loss scale, all gradients overflow, so a step
that is applied there does not see its scale, or hides what is not finite.

A fault is text that names the outputs concerned and says what to do; empty if there is
none.
"""

from collections.abc import Iterable

import jax

from optax_lossscale.testing._carry import Carry
from optax_lossscale.testing._contents import Path, equal
from optax_lossscale.testing._output_names import listed
from optax_lossscale.testing._trial import Trial, same


def stuck(trials: list[Trial]) -> str:
    """The fault that the loss scale that comes back does not adapt.

    Then the next step overflows, too. The loss scale is as it was given, or it is made
    anew: the same for the first two of the trials, which are at different loss scales.
    """
    is_made_anew = len(trials) > 1 and _is_made_anew(*trials[:2])
    if is_made_anew or any(map(_is_as_given, trials)):
        return _STUCK
    return ""


def _is_made_anew(trial, other):
    """Whether two trials return the same loss scale, where other ones are due."""
    due, _ = trial.adapted
    others_due, _ = other.adapted
    if same(due, others_due) or not (trial.was_skipped and other.was_skipped):
        return False
    adapting = filter(jax.tree.leaves, trial.after.loss_scales)  # no fixed ones
    others = filter(jax.tree.leaves, other.after.loss_scales)
    are_same = list(map(same, adapting, others))
    return bool(are_same) and all(are_same)


def _is_as_given(trial):
    """Whether the loss scale comes back as it was given, although it should adapt."""
    if_skipped, if_applied = trial.adapted
    due = [if_skipped] if trial.was_skipped else [if_skipped, if_applied]
    may_stay = any(same(x, trial.loss_scale) for x in due)
    stay = [same(x, trial.loss_scale) for x in trial.after.loss_scales]
    return bool(stay) and all(stay) and not may_stay


def left_behind(trials: Iterable[Trial], carry: Carry) -> str:
    """The fault that skipped steps change what comes back.

    A silent step should be skipped where all gradients overflow.
    """
    for trial in trials:
        left = changed(trial, carry)
        should_be_skipped = trial.is_silent and trial.is_infinite
        if left and (trial.was_skipped or should_be_skipped):
            return listed(_LEFT, left, KEEP)
    return ""


def changed(trial: Trial, carry: Carry) -> list[Path]:
    """The outputs in `carry` that differ from their arguments."""
    outputs = trial.outputs
    before = trial.before.numbers
    return [
        path
        for path, place in carry.items()
        if path in outputs and not equal(outputs[path], before[place])
    ]


def applied_at_infinity(outputs: Iterable[Path]) -> str:
    """The fault that a step is applied at an infinite loss scale, to these outputs."""
    return listed(_APPLIED, outputs, APPLIED_REMEDY)


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
state. Keep all else that the step changes, such as batch statistics or an average of the
parameters, with ols.where_applied(state, new, old), where state is what the step made. Name what
is meant to move on all the same, such as a replay buffer, in ignore=."""
APPLIED_REMEDY = """\
Either gradients are not multiplied by the loss scale of the state that the step is given: use
value_and_scaled_grad(loss_fn, state) or scale_gradient(loss, state). Or what is not finite is
replaced before it is checked, by nan_to_num or a where: hand the optimizer scaled gradients as
they come. Or nothing is checked, with skip=None and a fixed loss scale: use skip="nonfinite". Or
they are all zero: give the step a batch that it learns from."""
_STUCK = """\
Gradients overflow, and the loss scale comes back as it was given, or as it was at first, so the
next step overflows, too: return the state that the step makes, with its loss scale. Or the loss
itself is not finite where gradients overflow, as in a step of SAM, whose second loss is computed
from the first gradient: then no lower scale is tried."""
