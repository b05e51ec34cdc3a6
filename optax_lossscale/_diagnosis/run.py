"""Runs a gradient on pairs: at a loss scale of 1, and at others until one fits.

The run at 1 predicts which scale fits. If the largest element of its backward pass is
2**6, a scale of 2**10 overflows in float16, so the largest usable scale is 2**9, and
the scale that fits is `MARGIN` bits smaller. The prediction is right if the backward
pass is linear in the scale. One that clips in a custom derivative is not, so if the
backward pass computes in float16, the gradient also runs at the predicted scale. That
run confirms the prediction or predicts another scale to try.

One of these runs is *judged*: the report compares its results with float32's. It is
the last one whose gradients are finite, or the run at 1 if there is none. Its scale is
not always the one that fits.

The program runs once more, in float32 with its own choices, beside float64, if a result
is off, not finite in float32, or not in proportion to the scale, or if float32 would
choose differently. If float32 and float64 are far apart as well, then float32 does not
determine the result, and 16 bits are not to blame for its error.
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import jax
import numpy as np

from optax_lossscale._diagnosis.figures import LARGE_SHARE, TOLERANCE
from optax_lossscale._diagnosis.gradient import Gradient
from optax_lossscale._diagnosis.notes import THE_LOSS, Note, Origin
from optax_lossscale._diagnosis.pairs import AS_WRITTEN, IN_FLOAT32
from optax_lossscale._diagnosis.program import program_of
from optax_lossscale._diagnosis.scale import (
    HIGHEST,
    MARGIN,
    InitialScale,
    first_overflow,
    out_of_proportion,
)
from optax_lossscale._diagnosis.shadow import Argument, Shadow, run_to_seed
from optax_lossscale._diagnosis.value import Value
from optax_lossscale._programs.values import Array

# How many scales to try if the backward pass is not linear. A heuristic.
_TRIES = 6

# After a scale that overflows, the next scale to try is this many bits smaller, because
# an infinity does not show by how much the scale is too large. A heuristic: with a
# smaller step, `_TRIES` runs may not reach a scale without an overflow, and with a
# larger one, the scale that is found may be smaller than it needs to be.
_STEP_DOWN = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One run of a gradient, at one loss scale.

    Attributes:
      scale: the loss scale.
      loss: the loss, unscaled.
      grads: the scaled gradient of each parameter, by name.
      aux: the floats that the loss function returns beside the loss.
      notes: the notes of all results, in the order of execution.
    """

    scale: float
    loss: Value
    grads: dict[str, Value]
    aux: list[Value]
    notes: list[Note]

    @functools.cached_property
    def results(self) -> dict[str, Value]:
        """The loss and the gradients, by name."""
        return {THE_LOSS: self.loss, **self.grads}

    @functools.cached_property
    def by_result(self) -> dict[Hashable, Note]:
        """The notes by `Note.result`, which is the same in all runs."""
        return {note.result: note for note in self.notes}

    @property
    def is_finite(self) -> bool:
        """Whether the loss and gradients that the program computes are finite."""
        return _are_finite(x.pair.actual for x in self.results.values())

    @property
    def is_reference_finite(self) -> bool:
        """Whether the references of the loss and gradients are finite."""
        return _are_finite(x.pair.reference for x in self.results.values())


def _are_finite(arrays: Iterable[Array]) -> bool:
    """Whether every element of all arrays is finite."""
    return all(np.isfinite(x).all() for x in arrays)


class Fit(NamedTuple):
    """The loss scale that fits, and the run whose results are judged.

    Attributes:
      run: the last run with finite gradients, at `scale` or at a larger scale. It is
        the run at 1 if no other run has finite gradients, or if no other was needed.
      scale: the scale that fits. It is None if no run has finite gradients, if the loss
        is not finite, or if the reference of the loss or of a gradient is not finite.
      overflow: the cause of the first overflow at a larger scale, if there is one.
    """

    run: Run
    scale: InitialScale | None = None
    overflow: Note | None = None


class Runs(NamedTuple):
    """All runs of a gradient.

    Attributes:
      parameters: the array of each parameter, by name.
      at_1: the run at a loss scale of 1.
      fit: the loss scale that fits, with its run.
      in_float32: the run in float32, with its own choices, beside float64, at the loss
        scale of `judged`. It is None unless `judged` has a value that is off, a loss
        or gradient that is not finite in float32, a gradient that is not in proportion
        to the scale, or a choice that float32 would make differently.
    """

    parameters: dict[str, Array]
    at_1: Run
    fit: Fit
    in_float32: Run | None

    @property
    def judged(self) -> Run:
        """The run whose results are judged, as `Fit.run` describes."""
        return self.fit.run

    @property
    def not_compared(self) -> tuple[tuple[str, str], ...]:
        """The name and source line of each operation that has no float32 version."""
        operations = {}  # an ordered set
        for note in self.at_1.notes:
            if note.stays_narrow or note.is_shared:
                operations[note.primitive, note.source] = None
        return tuple(operations)


def runs_of(gradient: Gradient) -> Runs:
    """Runs a gradient at scale 1 and, if needed, at other scales and in float32."""
    program = program_of(gradient.jaxpr, Origin())
    shadow = run_to_seed(program, gradient.arguments, AS_WRITTEN)
    at_1 = _run(shadow, gradient, 1.0)
    fit = _fit(shadow, gradient, at_1)
    in_float32 = None
    if _is_in_doubt(at_1, fit.run):
        with jax.enable_x64(True):
            shadow = run_to_seed(program, gradient.arguments, IN_FLOAT32)
            in_float32 = _run(shadow, gradient, fit.run.scale)
    return Runs(gradient.parameters, at_1, fit, in_float32)


def _is_in_doubt(at_1: Run, run: Run) -> bool:
    """Whether anything may be wrong, or float32 would choose differently.

    Args:
      at_1: the run at a loss scale of 1, which shows what is not linear in the scale.
      run: the run whose results are judged.
    """
    for name, value in run.results.items():
        note = value.note
        if note is None:
            continue
        deviation = out_of_proportion(at_1.results[name].note, note, run.scale)
        is_off = max(note.error, deviation) > TOLERANCE
        if is_off or not note.is_reference_finite:
            return True
    for note in run.notes:
        is_off_inside = note.off_share > LARGE_SHARE and not note.is_backward
        if note.differing or is_off_inside:
            return True
    return False


def _fit(shadow: Shadow, gradient: Gradient, at_1: Run) -> Fit:
    """Finds the scale that fits.

    The run at 1 predicts it. If the backward pass computes in float16, further runs
    test the prediction.
    """
    if not at_1.is_reference_finite or not np.isfinite(at_1.loss.pair.actual):
        return Fit(at_1)
    overflow_exponent, overflow = first_overflow(at_1.notes, at_1.scale)
    largest = overflow_exponent - 1
    predicted = largest - MARGIN
    if any(note.is_backward and note.dtype == np.float16 for note in at_1.notes):
        # If no run at another scale has finite gradients, a scale of 1 is what fits.
        scale = _initial_scale(0, 0) if at_1.is_finite else None
        return _fit_by_trial(shadow, gradient, Fit(at_1, scale, overflow), predicted)
    scale = _initial_scale(predicted, largest) if at_1.is_finite else None
    return Fit(at_1, scale, overflow)


def _fit_by_trial(shadow: Shadow, gradient: Gradient, fit: Fit, exponent: int) -> Fit:
    """Runs at the predicted scale and then at others until a run confirms its scale.

    A run with finite gradients confirms its scale if it predicts either no overflow at
    all, or a scale that is at most twice as large. If the backward pass is linear in
    the scale, the first run confirms the prediction. If it is not, the magnitudes in
    each run predict the next scale to try.

    Args:
      shadow: the gradient, which has run up to its seed.
      gradient: the same gradient.
      fit: what to return if no run has finite gradients.
      exponent: the predicted scale is 2**exponent.

    Returns:
      The fit of the first run that confirms its scale. If none of `_TRIES` runs does,
      the fit of the last run with finite gradients, or `fit` if there is no such run.
    """
    bound = HIGHEST  # no scale above 2**bound fits: it overflows, or is not allowed
    for _ in range(_TRIES):
        run = _run(shadow, gradient, 2.0**exponent)
        if not run.is_finite:
            bound = exponent - 1
            exponent -= _STEP_DOWN
            continue
        overflow_exponent, overflow = first_overflow(run.notes, run.scale)
        largest = min(overflow_exponent - 1, bound)
        largest = max(largest, exponent)  # this run is finite at 2**exponent
        predicted = largest - MARGIN
        scale = _initial_scale(min(exponent, predicted), largest)
        is_confirmed = overflow is None or predicted <= exponent + 1
        # An overflow of an earlier run counts even if this run predicts none.
        if bound < HIGHEST:
            overflow = overflow or fit.overflow
        fit = Fit(run, scale, overflow)
        if is_confirmed:
            break
        exponent = predicted
    return fit


def _initial_scale(exponent: int, largest: int) -> InitialScale:
    """Builds the `InitialScale` 2**exponent, with 2**largest as the largest scale."""
    return InitialScale(2.0**exponent, 2.0**largest)


def _run(shadow: Shadow, gradient: Gradient, scale: float) -> Run:
    """Runs the gradient from the seed on, at a loss scale."""
    cotangent = np.asarray(scale, np.float32)
    seed = Argument("the loss scale", cotangent, is_seed=True)
    (loss, *grads_and_aux), notes = shadow(seed)
    n_grads = len(gradient.parameters)
    grads = dict(zip(gradient.parameters, grads_and_aux[:n_grads], strict=True))
    aux = grads_and_aux[n_grads:]
    return Run(scale, loss, grads, aux, notes)
