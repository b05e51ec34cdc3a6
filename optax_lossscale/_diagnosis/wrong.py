"""Which results are wrong: the loss and gradients, or else an intermediate value.

The loss or a gradient is *wrong* if one of these is true:

- It differs from float32's by more than 5%.
- It is not finite even in float32.
- It is a gradient that does not grow in proportion to the loss scale.

Two kinds of results are not judged, because 16 bits are not to blame for their errors:

- Results that float32 does not determine, because it differs from float64 as well. For
  example, the gradient of a bias before a normalization is nothing but rounding error.
- Differences of two equal values, which are 0 in float32 and only rounding error in 16
  bits.

If the loss and all gradients are right, `wrong_intermediate_value` looks for the first
intermediate value that is wrong. Why a result is wrong is found in `cause.py`.

All of this is read from *notes*. A note records how far one result of the run is off
and holds the notes of its operands (see `notes.py`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.cause import (
    Cause,
    How,
    cause_in_float32,
    cause_of,
    size_of_sum,
)
from optax_lossscale._diagnosis.figures import LARGE_SHARE, TOLERANCE
from optax_lossscale._diagnosis.notes import (
    AN_INTERMEDIATE_VALUE,
    SUMS,
    THE_LOSS,
    Note,
    back_from,
    least_normal,
)
from optax_lossscale._diagnosis.run import Run, Runs
from optax_lossscale._diagnosis.scale import COMPARABLE, out_of_proportion
from optax_lossscale._diagnosis.value import notes_of
from optax_lossscale._programs.values import is_narrow_dtype

# Why the difference of two equal values, which is 0 in float32, is off in 16 bits.
_DIFFERENCE_OF_EQUALS = (How.CANCELS, How.SATURATES)

# How many times smaller the error of float32 must be than that of 16 bits, so that
# float32 determines a result although it is itself off by more than 5%. A heuristic:
# with a larger value, fewer such results are judged; with a smaller one, 16 bits are
# blamed for more of the errors that float32 makes as well.
_FAR_LESS = 3

# How many equations to search for a lost constant, from an infinity back. A heuristic:
# a smaller value misses the constant to blame more often, and a larger one more often
# names constants that are not to blame.
_NEAR = 4

# A result that is off by more than this has no right digit, not even in binary.
_NO_RIGHT_DIGIT = 0.5


class Wrong(NamedTuple):
    """A result that is wrong, and why.

    Attributes:
      name: "the loss", the parameter whose gradient it is, or "an intermediate value".
      off: how wrong the result is. What it measures depends on the result:

        - For "an intermediate value", the share of its elements that are off by more
          than 5%, or infinity for a value in `aux` that is finite in float32 only.
        - For a gradient whose `how` is "is not linear", how much the loss scale changes
          it, relative to a gradient that is proportional to the loss scale.
        - Otherwise, the relative error of the loss or gradient against float32. It is 1
          if only float32's is 0, and infinite if either is not finite.
      how: what the equation at fault does: "overflows", "vanishes", "cancels",
        "stagnates", "saturates", "rounds", "amplifies", "is undefined", "is a kernel",
        "is not linear" in the loss scale, or "adds up" if no equation is at fault.
      place: the result of the equation at fault, or the wrong result itself if no
        equation is at fault. `place.source` is its line.
      rounded: results that explain the fault. Which ones they are depends on the fault:

        - If `is_in_float32`, the nearest results computed from a constant that is 0 or
          infinite in 16 bits, maybe because it was rounded.
        - Otherwise, if `how` is "cancels", "rounds", "amplifies" or "is undefined", the
          16-bit results to whose rounding the equation at fault is sensitive: the
          nearest products before it, and what is computed between these and it.
        - Otherwise, none.
      is_inner: whether the equation at fault belongs to a derivative that the loss
        function itself takes.
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
            return "rounding errors add up over many lines"
        if self.place.is_argument:
            return f"there are NaNs or infinities in {self.place}"
        return f"{self.place} {self.how.predicate}"


def off_and_wrong(runs: Runs) -> tuple[dict[str, float], list[Wrong]]:
    """Compares the loss and gradients with float32's.

    Returns:
      The error of each result, by name, and a list of those that are wrong, with the
      loss first and then the gradients, the worst first. Constant gradients and results
      that are not judged or not finite in float32 have no error.
    """
    run = runs.judged
    off = {}
    wrong = []
    if run.loss.note is None:  # a constant loss, which is exact
        off[THE_LOSS] = 0.0
    for name, value in run.results.items():
        note = value.note
        if note is None:
            continue
        if not note.is_reference_finite:
            cause = _cause_of_infinity(runs, name, note)
            wrong.append(_wrong_result(name, math.inf, cause, run))
        elif _float32_determines(_note_in_float32(runs, name), note):
            error, cause = _error_and_cause(runs, name, note)
            if cause is not None and _is_zero_in_float32(note, cause):
                continue  # the difference of two equal values is not judged
            off[name] = error
            if cause is not None:
                wrong.append(_wrong_result(name, error, cause, run))
    wrong.sort(key=lambda result: (result.name != THE_LOSS, -result.off))
    return off, wrong


def wrong_intermediate_value(runs: Runs, dtypes: Sequence[np.dtype]) -> list[Wrong]:
    """Finds the first intermediate value that is wrong, as a list of one or none.

    A value in the `aux` of the loss function is wrong if it is not finite where
    float32's is. If `aux` holds no such value, a value is wrong if more than a fifth of
    its elements are off by more than 5%, and if the same is true of a later value that
    reads it, so that the error does not vanish at once. Each value in `aux` counts as a
    later value that is off. But a value is not wrong if

    - float32 does not determine it,
    - the program computes in float16, and the later values are below the normal numbers
      of float16,
    - no result depends on it, such as where only the condition of a loop reads it, or
    - it is the difference of values that are equal except for rounding to 16 bits.

    Args:
      runs: the runs of the gradient.
      dtypes: the dtypes of 16 bits and fewer that the program computes in.
    """
    name = AN_INTERMEDIATE_VALUE
    run = runs.judged
    aux = notes_of(run.aux)
    for note in aux:
        if note.bad:
            return [_wrong_result(name, note.error, cause_of(note), run)]
    candidates = _widely_off(runs)
    least = least_normal(np.float16) if np.float16 in dtypes else 0.0
    later = [note for note in [*candidates, *aux] if note.rms >= least]
    reads = [read for note in later for read in note.reads]
    still_off_later = set(back_from(reads, _moved_from))
    eps = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)
    for note in candidates:
        if note in still_off_later:
            cause = cause_of(note)
            if not _is_difference_of_equals(cause.note, eps):
                return [_wrong_result(name, note.off_share, cause, run)]
    return []


def _wrong_result(name: str, off: float, cause: Cause, run: Run) -> Wrong:
    """Builds the `Wrong` of a result that is off for this cause."""
    at_fault = cause.note
    # The loss depends on the derivatives that the loss function takes. It does not
    # depend on those in a custom rule for the backward pass.
    is_before_the_loss = at_fault in back_from(notes_of([run.loss]))
    is_derivative = at_fault.origin.is_derivative and not at_fault.is_backward
    return Wrong(
        name,
        off,
        cause.how,
        place=at_fault.row,
        rounded=tuple(note.row for note in cause.rounded),
        is_inner=is_derivative and is_before_the_loss,
        is_in_float32=cause.is_in_float32,
    )


# --- the loss and gradients ---


def _is_zero_in_float32(note: Note, cause: Cause) -> bool:
    """Whether a result is a difference of equal values, and so 0 in float32."""
    return note.rms == 0 and cause.how in _DIFFERENCE_OF_EQUALS


def _cause_of_infinity(runs: Runs, name: str, note: Note) -> Cause:
    """Finds why a result is not finite in float32 with the program's choices.

    With its own choices, float32 may be finite. In this case, the first value that is
    finite in float32 only is at fault. For example, where the largest logit overflows
    float16, `logsumexp` chooses not to subtract it, and float32 follows that choice.
    """
    if _is_finite_by_own_choices(runs, name):
        ancestors = set(back_from([note]))
        for earlier in runs.judged.notes:
            if earlier.bad and earlier in ancestors:
                return cause_of(earlier)
    cause = cause_in_float32(note)
    if not cause.is_in_float32:  # a kernel, whose constants are not known
        return cause
    return cause._replace(rounded=_near_lost_constants(cause.note))


def _is_finite_by_own_choices(runs: Runs, name: str) -> bool:
    """Whether float32 ran with its own choices, and its result is finite."""
    if runs.in_float32 is None:
        return False
    with_own_choices = runs.in_float32.results[name].pair.actual
    return bool(np.isfinite(with_own_choices).all())


def _near_lost_constants(note: Note) -> tuple[Note, ...]:
    """Finds the equations nearest before `note` that read a constant lost to rounding.

    The search begins with the equation of `note` and goes back `_NEAR` equations.
    """
    nearest = [note]
    for _ in range(_NEAR):
        with_constant = [near for near in nearest if near.origin.has_lost_constant]
        if with_constant:
            return tuple(with_constant)
        reads = [read for near in nearest for read in near.reads]
        nearest = list(dict.fromkeys(reads))
    return ()


def _note_in_float32(runs: Runs, name: str) -> Note | None:
    """Returns the note of a result in the run in float32, if there was one."""
    return runs.in_float32.results[name].note if runs.in_float32 else None


def _float32_determines(in_float32: Note | None, note: Note) -> bool:
    """Whether float32 determines a value well enough to judge 16 bits by it.

    Float32 determines a value if float32 and float64 differ by at most 5%, or if they
    differ by far less than 16 bits and float32 do. In the second case, at least one
    digit of the value must be right in float32. This returns True for a value that is
    not finite in 16 bits although float32's is, and for every value if there was no run
    in float32.

    Args:
      in_float32: the note of the value in float32 beside float64, if there is one.
      note: its note in 16 bits beside float32.
    """
    if note.bad or in_float32 is None:
        return True
    far_less = min(note.error / _FAR_LESS, _NO_RIGHT_DIGIT)
    return in_float32.error <= max(TOLERANCE, far_less)


def _error_and_cause(runs: Runs, name: str, note: Note) -> tuple[float, Cause | None]:
    """Returns how far the loss or a gradient is off, and why.

    The cause is None if the result is right.

    A loss whose terms cancel may be off only because it is about 0. If all gradients
    are right, its distance from float32's is therefore compared with how much the loss
    changes with the parameters, not with its magnitude.
    """
    if note.error <= TOLERANCE:
        return _deviation_and_cause(runs, name, note)
    cause = cause_of(note)
    may_be_near_0 = name == THE_LOSS and _is_wide_sum(cause.note)
    if may_be_near_0 and _are_grads_right(runs):
        change = max(_change_of_loss(runs), COMPARABLE)
        if note.distance / change <= TOLERANCE:
            return note.distance / change, None
    return note.error, cause


def _deviation_and_cause(
    runs: Runs, name: str, note: Note
) -> tuple[float, Cause | None]:
    """Returns how far a result is off that agrees with float32's, and why.

    If it is in proportion to the loss scale, the cause is None. Otherwise, the error is
    the deviation from that proportion, and the cause is the first equation in the
    program whose result is not in proportion either.
    """
    scale = runs.judged.scale
    deviation = out_of_proportion(runs.at_1.results[name].note, note, scale)
    if deviation <= TOLERANCE:
        return note.error, None
    at_1 = runs.at_1.by_result
    for earlier in runs.judged.notes:
        same_at_1 = at_1.get(earlier.result)
        if out_of_proportion(same_at_1, earlier, scale) > TOLERANCE:
            return deviation, Cause(How.IS_NOT_LINEAR, earlier)
    return deviation, Cause(How.IS_NOT_LINEAR, note)


def _is_wide_sum(note: Note) -> bool:
    """Whether an equation adds or subtracts in more than 16 bits."""
    return note.has_any(SUMS) and not is_narrow_dtype(note.dtype)


def _are_grads_right(runs: Runs) -> bool:
    """Whether all gradients that float32 determines are right."""
    for name, value in runs.judged.grads.items():
        note = value.note
        if note is None:
            continue
        is_off = note.error > TOLERANCE or not note.is_reference_finite
        if is_off and _float32_determines(_note_in_float32(runs, name), note):
            return False
    return True


def _change_of_loss(runs: Runs) -> float:
    """Measures how much the loss changes with the parameters, for a loss near 0.

    For example, the loss of a policy is 0 in its first step, because advantages add up
    to 0. Relative to 0, any rounding error is infinite, but it does not matter if a
    change of the parameters changes the loss by far more. The measure is
    the sum, over the parameters, of the absolute inner product of a parameter and its
    gradient.
    """
    run = runs.judged
    change = 0.0
    for name, x in runs.parameters.items():
        grad = np.asarray(run.grads[name].pair.reference)
        parameter = np.asarray(x).astype(grad.dtype)
        change += abs(np.vdot(parameter, grad))
    return float(change) / run.scale


# --- intermediate values ---


def _widely_off(runs: Runs) -> list[Note]:
    """Finds forward values of which more than a fifth of the elements are off.

    Values that no result depends on, or that float32 does not determine, are left out.
    """
    run = runs.judged
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
    """Whether a sum is smaller than the rounding of its terms to 16 bits.

    For example, the log-probabilities of a policy in training may be equal, except for
    rounding, to those at the time when its data was collected. Their difference is then
    nothing but rounding error.

    Args:
      note: the note of the sum.
      eps: the distance from 1 to the next number in the 16-bit dtype.
    """
    return _is_wide_sum(note) and note.rms < eps * size_of_sum(note)


def _moved_from(note: Note) -> Sequence[Note]:
    """Returns the operands of a value that a loop moved, and none of a computed one."""
    return () if note.is_computed else note.reads
