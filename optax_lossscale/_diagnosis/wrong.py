"""Which results are wrong, and why: the loss and gradients, or else a value inside.

A result is wrong if it is off from float32 by more than 5%, if it is not finite in
float32 either, or if it is not in proportion to the loss scale. Two kinds of results
are not judged. One is what float32 does not determine, as it is off from float64 as
well: the gradient of a bias before a normalization is nothing but rounding. The other
is 0 in float32 and only rounding in 16 bits: it is the difference of two equal things.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.cause import Cause, How, cause_in_float32, cause_of
from optax_lossscale._diagnosis.figures import LARGE_SHARE, TOLERANCE
from optax_lossscale._diagnosis.notes import (
    A_VALUE_INSIDE,
    SUMS,
    THE_LOSS,
    Note,
    back_from,
    least_normal,
)
from optax_lossscale._diagnosis.run import Run, Runs
from optax_lossscale._diagnosis.value import notes_of
from optax_lossscale._programs.values import is_narrow_dtype

# The least size to compare: smaller numbers may lack digits in float32.
_COMPARABLE = 2.0**-100
# If one of these is why a result is off that is 0 in float32, it is the difference of two
# equal things.
_OF_DIFFERENCES = (How.CANCELS, How.SATURATES)
_FAR_LESS = 3  # times: an error of float32 that is so much less than that of 16 bits
_NEAR = 4  # how many equations back from an infinity to look for a lost constant
_NOTHING_RIGHT = 0.5  # an error from which on a number has no digit that is right


class Wrong(NamedTuple):
    """A result that is off from float32, and why.

    Attributes:
      name: "the loss", the parameter whose gradient it is, or "a value inside".
      off: of the loss or a gradient, how far it is from float32's, relative to that: 1
        if only float32's is 0, and infinite if either is not finite. If `how` is "is not
        linear", it is how much the loss scale changes the gradient, relative to it. Of
        "a value inside", it is another figure, the share of its numbers that are off by
        more than 5%; or infinite, if the loss function returns the value beside the loss
        and it is not finite.
      how: what the equation at fault does to the numbers: "overflows", "vanishes",
        "cancels", "stagnates", "saturates", "rounds", "amplifies", "is undefined",
        "is a kernel", "is not linear" in the loss scale, or "adds up" if no equation is
        at fault.
      place: the result of the equation at fault; if none is, the wrong result itself.
      rounded: the values in 16 bits to whose rounding that equation is sensitive: the
        results of the nearest products, and what lies between these and the equation.
        If the result is not finite in float32 either, those that read a constant which
        rounding made 0 or infinite.
      is_inner: whether it is in a derivative that the loss function itself takes.
      is_in_float32: whether the result is not finite in float32 either.
    """

    name: str
    off: float
    how: How
    place: Note
    rounded: tuple[Note, ...] = ()
    is_inner: bool = False
    is_in_float32: bool = False

    @property
    def because(self) -> str:
        """The equation at fault and what it does, as the end of a sentence."""
        if self.how is How.ADDS_UP:
            return "rounding adds up over many lines"
        if self.place.is_argument:
            return f"there are NaNs or infinities in {self.place}"
        return f"{self.place} {self.how}"


def off_and_wrong(runs: Runs) -> tuple[dict[str, float], list[Wrong]]:
    """How far the loss and gradients are off, by name, and which of them are wrong.

    How far a result is off is left out if the result is not judged, and if it is not
    finite in float32. Of those that are wrong, the loss comes first, and then the
    gradient that is off the most.
    """
    run = runs.fitting
    off = {}
    wrong = []
    for name, value in run.results.items():
        note = value.note
        if note is None:  # it is a constant, and so exact
            if name == THE_LOSS:
                off[name] = 0.0
        elif not note.is_reference_finite:
            cause = _cause_of_infinity(runs, name, note)
            wrong.append(_wrong(name, math.inf, cause, run))
        elif _float32_determines(_in_float32(runs, name), note):
            how_far, cause = _off_and_cause(runs, name, note)
            if cause is None:
                off[name] = how_far
            elif note.typical or cause.how not in _OF_DIFFERENCES:
                off[name] = how_far
                wrong.append(_wrong(name, how_far, cause, run))
    wrong.sort(key=lambda result: (result.name != THE_LOSS, -result.off))
    return off, wrong


def wrong_inside(runs: Runs, dtypes: Sequence[np.dtype]) -> list[Wrong]:
    """The first value inside that is wrong, as a list of one; empty if none is.

    A value is wrong if more than a fifth of its numbers are off, and so are those of a
    later value that reads it. But it is not wrong if
    - float32 does not determine it,
    - the later values are below the normal numbers of float16, in a program that
      computes in float16,
    - no result is computed from it, as from the condition of a loop, or
    - it is the difference of numbers that are equal but for rounding to 16 bits.
    What the loss function returns beside the loss stands for a later value, and is itself
    wrong where it is not finite and float32's is.

    Args:
      runs: the runs of the gradient.
      dtypes: the dtypes of 16 bits and fewer that the program computes in.
    """
    run = runs.fitting
    aux = notes_of(run.aux)
    for note in aux:
        if note.bad:
            return [_wrong(A_VALUE_INSIDE, note.error, cause_of(note), run)]
    off_inside = _widely_off(runs)
    least = least_normal(np.float16) if np.float16 in dtypes else 0.0
    still_off_later = {
        read
        for note in [*off_inside, *aux]
        if note.typical >= least
        for read in back_from(note.reads, _moved_from)
    }
    eps = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)
    for note in off_inside:
        if note in still_off_later:
            cause = cause_of(note)
            if not _is_difference_of_equals(cause.note, eps):
                return [_wrong(A_VALUE_INSIDE, note.off_share, cause, run)]
    return []


def _wrong(name: str, off: float, cause: Cause, run: Run) -> Wrong:
    """The `Wrong` of a result with this cause, for the report."""
    at = cause.note
    # The loss depends on a derivative inside of its function, and not on one in a rule
    # for the backward pass.
    is_before_the_loss = at in back_from(notes_of([run.loss]))
    is_derivative = at.origin.is_derivative and not at.is_backward
    return Wrong(
        name,
        off,
        cause.how,
        place=at.row,
        rounded=tuple(note.row for note in cause.rounded),
        is_inner=is_derivative and is_before_the_loss,
        is_in_float32=cause.is_in_float32,
    )


# --- the loss and gradients ---


def _cause_of_infinity(runs: Runs, name: str, note: Note) -> Cause:
    """Why a result is not finite in float32 that makes the program's choices.

    By its own choices, float32 may be finite. Then the first number that 16 bits do not
    hold is at fault, as one that `logsumexp` finds infinite and does not subtract.
    """
    if runs.in_float32:
        by_own_choices = runs.in_float32.results[name].pair.actual
        if np.isfinite(by_own_choices).all():
            before = set(back_from([note]))
            for earlier in runs.fitting.notes:
                if earlier.bad and earlier in before:
                    return cause_of(earlier)
    cause = cause_in_float32(note)
    return cause._replace(rounded=_lost_constants(cause))


def _lost_constants(cause: Cause) -> tuple[Note, ...]:
    """The nearest equations before an infinity that read a constant lost to rounding.

    There are none if float32 is finite.
    """
    nearest = [cause.note] if cause.is_in_float32 else []
    for _ in range(_NEAR):
        with_constant = [note for note in nearest if note.origin.has_lost_constant]
        if with_constant:
            return tuple(with_constant)
        reads = [read for note in nearest for read in note.reads]
        nearest = list(dict.fromkeys(reads))
    return ()


def _in_float32(runs: Runs, name: str) -> Note | None:
    """The note of the loss or a gradient in float32, if the program ran in it."""
    return runs.in_float32.results[name].note if runs.in_float32 else None


def _float32_determines(in_float32: Note | None, note: Note) -> bool:
    """Whether float32 determines a value so well that 16 bits can be wrong about it.

    It does if it is off from float64 by 5% at most, or by far less than 16 bits are off
    from it. But a number of which float32 has no right digit is not determined.

    Args:
      in_float32: the note of the value in float32 beside float64, if there is one.
      note: its note in 16 bits beside float32.
    """
    if note.bad or in_float32 is None:
        return True
    far_less = min(note.error / _FAR_LESS, _NOTHING_RIGHT)
    return in_float32.error <= max(TOLERANCE, far_less)


def _off_and_cause(runs: Runs, name: str, note: Note) -> tuple[float, Cause | None]:
    """How far the loss or a gradient is off, and why; None for one that is right."""
    if note.error > TOLERANCE:
        cause = cause_of(note)
        if name == THE_LOSS and _is_wide_sum(cause.note) and _are_grads_right(runs):
            off = note.distance / max(_change_of_loss(runs), _COMPARABLE)
            if off <= TOLERANCE:
                return off, None
        return note.error, cause
    run = runs.fitting
    off = _out_of_proportion(runs.at_1.results[name].note, note, run.scale)
    if off <= TOLERANCE:
        return note.error, None
    at_1 = runs.at_1.by_result
    not_linear = (
        earlier
        for earlier in run.notes
        if _out_of_proportion(at_1.get(earlier.result), earlier, run.scale) > TOLERANCE
    )
    return off, Cause(How.IS_NOT_LINEAR, next(not_linear, note))


def _is_wide_sum(note: Note) -> bool:
    """Whether an equation adds or subtracts, and is not itself in 16 bits."""
    return note.is_any(SUMS) and not is_narrow_dtype(note.dtype)


def _are_grads_right(runs: Runs) -> bool:
    """Whether all gradients that float32 determines are right."""
    if runs.in_float32 is None:  # as nothing is off
        return True
    for name, value in runs.fitting.grads.items():
        note = value.note
        if note is None:
            continue
        is_off = note.error > TOLERANCE or not note.is_reference_finite
        is_determined = _float32_determines(runs.in_float32.results[name].note, note)
        if is_off and is_determined:
            return False
    return True


def _change_of_loss(runs: Runs) -> float:
    """How much the loss changes as the parameters do, for a loss that is about 0.

    That is the sum of the inner products of each parameter with its gradient. The loss
    of a policy in its first step is 0, as advantages add up to 0. What is left of it by
    rounding is nothing beside what a change of the parameters makes of it.
    """
    run = runs.fitting
    changes = []
    for name, x in runs.parameters.items():
        grad = np.asarray(run.grads[name].pair.reference)
        parameter = np.asarray(x).astype(grad.dtype)
        changes.append(abs(np.vdot(parameter, grad)))
    return float(sum(changes)) / run.scale


def _out_of_proportion(at_1: Note | None, note: Note, scale: float) -> float:
    """How far a result in float32 is from being in proportion to the loss scale."""
    if at_1 is None or not note.is_backward or at_1.typical < _COMPARABLE:
        return 0.0
    return abs(note.typical / (at_1.typical * scale) - 1)


# --- values inside ---


def _widely_off(runs: Runs) -> list[Note]:
    """The values of the forward pass of which a fifth is off.

    Those are left out that no result depends on, or that float32 does not determine.
    """
    run = runs.fitting
    used = set(back_from(notes_of([*run.results.values(), *run.aux])))
    in_float32 = runs.in_float32.by_result if runs.in_float32 else {}
    return [
        note
        for note in run.notes
        if note in used
        and not note.is_backward
        and note.off_share > LARGE_SHARE
        and _float32_determines(in_float32.get(note.result), note)
    ]


def _is_difference_of_equals(note: Note, eps: float) -> bool:
    """Whether a sum is of terms that 16 bits, which round by `eps`, do not tell apart.

    An example is the difference of the log-probabilities that a policy gives in training
    and gave when its data was collected, which is 0 but for rounding.
    """
    terms = max((read.typical for read in note.reads), default=0.0)
    size_of_sum = terms * math.sqrt(note.origin.terms)
    return _is_wide_sum(note) and note.typical < eps * size_of_sum


def _moved_from(note: Note) -> Sequence[Note]:
    """The notes of what a loop moved to make a value; none of an equation's result."""
    return () if note.is_computed else note.reads
