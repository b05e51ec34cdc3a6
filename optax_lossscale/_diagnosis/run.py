"""The runs of a gradient in pairs: at a loss scale of 1, and at the one that fits.

The magnitudes of the run at 1 say which scale fits. In float16, a run at that scale
confirms it, or is repeated at another, as a backward pass need not be linear in the
scale. Where something is off, there is one more run: of the program in float32, by its
own choices, beside float64. It tells what float32 determines.
"""

from collections.abc import Hashable
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
)
from optax_lossscale._diagnosis.shadow import Argument, Shadow, run_to_seed
from optax_lossscale._diagnosis.value import Value, notes_of
from optax_lossscale._programs.values import Array

_TRIES = 6  # how many scales are tried, if the backward pass is not linear


class Run(NamedTuple):
    """One run of a gradient in pairs."""

    scale: float  # the loss scale
    loss: Value
    grads: dict[str, Value]  # the scaled gradients, by the names of the parameters
    aux: list[Value]  # what the loss function returns beside the loss
    notes: list[Note]

    @property
    def results(self) -> dict[str, Value]:
        """The loss and the gradients, by name."""
        return {THE_LOSS: self.loss, **self.grads}

    @property
    def by_result(self) -> dict[Hashable, Note]:
        """The notes by what they are of, to be found in another run."""
        return {note.result: note for note in self.notes}

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite as the program computes them."""
        return all(np.isfinite(x.pair.actual).all() for x in self.results.values())

    @property
    def is_reference_finite(self) -> bool:
        """Whether the references of loss and gradients are finite."""
        return all(np.isfinite(x.pair.reference).all() for x in self.results.values())


class Fit(NamedTuple):
    """Which loss scale fits, and the run that confirms it."""

    run: Run  # at the scale that fits, or at a larger one; at 1 if none is confirmed
    # None if no scale gives finite gradients, or if the loss, or a result of the
    # reference, is not finite
    scale: InitialScale | None = None
    overflow: Note | None = None  # what overflows first above the largest scale


class Runs(NamedTuple):
    """The runs of a gradient."""

    parameters: dict[str, Array]  # by name
    at_1: Run  # at a loss scale of 1
    fit: Fit
    # The program in float32, with its own choices, beside float64, at the same scale as
    # the run of `fit`. It is None if nothing was in doubt.
    in_float32: Run | None

    @property
    def fitting(self) -> Run:
        """The run that confirms the scale that fits, or the one at 1 if none does."""
        return self.fit.run

    @property
    def not_compared(self) -> tuple[tuple[str, str], ...]:
        """Each operation that has no float32 version, with its line."""
        operations = [
            (note.primitive, note.source)
            for note in self.at_1.notes
            if note.stays_narrow or note.is_shared
        ]
        return tuple(dict.fromkeys(operations))


def runs_of(gradient: Gradient) -> Runs:
    """All runs of a gradient."""
    program = program_of(gradient.jaxpr, Origin())
    shadow = run_to_seed(program, gradient.arguments, AS_WRITTEN)
    at_1 = _run(shadow, gradient, 1.0)
    fit = _fit(shadow, gradient, at_1)
    if not _is_in_doubt(fit.run):
        return Runs(gradient.parameters, at_1, fit, None)
    with jax.enable_x64(True):
        shadow = run_to_seed(program, gradient.arguments, IN_FLOAT32)
        in_float32 = _run(shadow, gradient, fit.run.scale)
    return Runs(gradient.parameters, at_1, fit, in_float32)


def _is_in_doubt(run: Run) -> bool:
    """Whether something is off, or float32 might have chosen otherwise."""
    for note in notes_of(run.results.values()):
        if note.error > TOLERANCE or not note.is_reference_finite:
            return True
    for note in run.notes:
        is_off_inside = note.off_share > LARGE_SHARE and not note.is_backward
        if note.decided or is_off_inside:
            return True
    return False


def _fit(shadow: Shadow, gradient: Gradient, at_1: Run) -> Fit:
    """Which scale fits, by the run at a loss scale of 1 and perhaps further ones."""
    if not at_1.is_reference_finite or not np.isfinite(at_1.loss.pair.actual):
        return Fit(at_1)
    first, overflow = first_overflow(at_1.notes, at_1.scale)
    largest = first - 1
    exponent = largest - MARGIN
    is_scaled = any(x.is_backward and x.dtype == np.float16 for x in at_1.notes)
    # A scale of 1 fits unless a run confirms another.
    scale = _initial_scale(0, 0) if is_scaled else _initial_scale(exponent, largest)
    fit = Fit(at_1, scale if at_1.is_finite else None, overflow)
    return _confirmed(shadow, gradient, fit, exponent) if is_scaled else fit


def _confirmed(shadow: Shadow, gradient: Gradient, fit: Fit, exponent: int) -> Fit:
    """The fit that a run at its scale confirms, or `fit` if none does.

    2**exponent fits if the backward pass is linear in the scale. If it is not, the next
    try is at the scale that the magnitudes of this run suggest. After `_TRIES` of them,
    the fit is the last one that a run confirmed.
    """
    most = HIGHEST  # no scale above 2**most fits
    for _ in range(_TRIES):
        run = _run(shadow, gradient, 2.0**exponent)
        if not run.is_finite:
            most = exponent - 1
            exponent -= 2 * MARGIN
            continue
        # The magnitudes of this run give the largest scale to the bit.
        first, overflow = first_overflow(run.notes, run.scale)
        largest = max(min(first - 1, most), exponent)
        fitting = largest - MARGIN
        may_overflow = overflow is not None
        if largest < HIGHEST:  # A larger scale did overflow.
            overflow = overflow or fit.overflow
        fit = Fit(run, _initial_scale(min(exponent, fitting), largest), overflow)
        is_near = fitting <= exponent + 1
        if is_near or not may_overflow:
            break
        exponent = fitting
    return fit


def _initial_scale(exponent: int, largest: int) -> InitialScale:
    """The loss scale 2**exponent to begin with, where 2**largest is the largest."""
    return InitialScale(2.0**exponent, 2.0**largest)


def _run(shadow: Shadow, gradient: Gradient, scale: float) -> Run:
    """One run at a loss scale."""
    seed = Argument("the loss scale", np.asarray(scale, np.float32), is_seed=True)
    (loss, *others), notes = shadow(seed)
    n = len(gradient.parameters)
    grads = dict(zip(gradient.parameters, others[:n], strict=True))
    return Run(scale, loss, grads, others[n:], notes)
