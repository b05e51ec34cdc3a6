"""The runs of a gradient in pairs: at a loss scale of 1, and at the one that fits.

The magnitudes of the run at 1 say which scale fits. The run at that scale confirms it,
or is repeated at another, as a backward pass need not be linear in the scale. Where
something is off, there is one more run: of the program in float32, by its own choices,
beside float64. It tells what float32 determines.
"""

from collections.abc import Hashable
from typing import NamedTuple

import jax
import numpy as np

from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.gradient import Gradient
from optax_lossscale._diagnosis.loops import Value, notes_of
from optax_lossscale._diagnosis.notes import FIFTH, THE_LOSS, Note, Place
from optax_lossscale._diagnosis.pairs import AS_WRITTEN, IN_FLOAT32
from optax_lossscale._diagnosis.program import program_of
from optax_lossscale._diagnosis.scale import (
    HIGHEST,
    MARGIN,
    InitialScale,
    first_overflow,
)
from optax_lossscale._diagnosis.shadow import Shadow

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

    def is_finite(self, in_float32: bool = False) -> bool:
        """Whether loss and gradients are finite, in the program or in float32."""
        pairs = [result.pair for result in self.results.values()]
        numbers = [pair.true if in_float32 else pair.low for pair in pairs]
        return all(np.isfinite(x).all() for x in numbers)


class Runs(NamedTuple):
    """The runs of a gradient, and which loss scale fits."""

    at_1: Run  # at a loss scale of 1
    fitting: Run  # at the scale that fits; the run at 1, if none does
    # None if the loss or float32's results are not finite, or gradients at no scale
    fits: InitialScale | None = None
    overflow: Note | None = None  # the cause of the first one above the largest scale
    # The program in float32, with its own choices, beside float64, at the same scale as
    # `fitting`; None if there was no need for it
    in_float32: Run | None = None

    @property
    def passed(self) -> tuple[tuple[str, str], ...]:
        """What computes in 16 bits even in float32: each operation with its line."""
        passed = [note for note in self.at_1.notes if note.is_passed]
        return tuple(dict.fromkeys((one.primitive, one.source) for one in passed))


def runs_of(gradient: Gradient) -> Runs:
    """All runs of a gradient."""
    program = program_of(gradient.jaxpr, Place())
    runs = _as_written(Shadow(program, gradient.arguments, AS_WRITTEN), gradient)
    if _is_in_doubt(runs.fitting):
        with jax.enable_x64(True):
            shadow = Shadow(program, gradient.arguments, IN_FLOAT32)
            in_float32 = _run(shadow, gradient, runs.fitting.scale)
        return runs._replace(in_float32=in_float32)
    return runs


def _is_in_doubt(run: Run) -> bool:
    """Whether something is off, or float32 might have chosen otherwise."""
    results = notes_of(run.results.values())
    return any(note.error > TOLERANCE or not note.is_finite for note in results) or any(
        note.decided or (note.off_share > FIFTH and not note.is_backward)
        for note in run.notes
    )


def _as_written(shadow: Shadow, gradient: Gradient) -> Runs:
    """The runs of the program as it is."""
    at_1 = _run(shadow, gradient, 1.0)
    runs = Runs(at_1, at_1)
    if not at_1.is_finite(in_float32=True) or not np.isfinite(at_1.loss.pair.low):
        return runs
    first, overflow = first_overflow(at_1.notes, 1.0)
    runs = runs._replace(overflow=overflow)
    if any(note.is_backward and note.dtype == np.float16 for note in at_1.notes):
        return _fitting(shadow, gradient, runs, min(first - 1, HIGHEST) - MARGIN)
    if at_1.is_finite():
        return runs._replace(fits=_fits(first - 1 - MARGIN, first - 1))
    return runs


def _fitting(shadow: Shadow, gradient: Gradient, runs: Runs, exponent: int) -> Runs:
    """Adds the run at the scale that fits: 2**exponent, if the pass is linear."""
    most = HIGHEST  # the exponent of the largest scale that may still fit
    # A scale of 1 fits if none of those below does.
    if runs.at_1.is_finite():
        runs = runs._replace(fits=_fits(0, 0))
    for _ in range(_TRIES):
        run = _run(shadow, gradient, 2.0**exponent)
        if not run.is_finite():
            most = exponent - 1
            exponent -= 2 * MARGIN
            continue
        # The magnitudes of this run give the largest scale to the bit.
        first, overflow = first_overflow(run.notes, run.scale)
        largest = max(min(first - 1, most), exponent)
        runs = runs._replace(
            fitting=run,
            fits=_fits(min(exponent, largest - MARGIN), largest),
            overflow=overflow or runs.overflow,
        )
        is_linear = largest - MARGIN <= exponent + 1
        if is_linear or overflow is None:  # or nothing is left that could overflow
            break
        exponent = largest - MARGIN
    return runs


def _fits(exponent: int, largest: int) -> InitialScale:
    return InitialScale(2.0**exponent, 2.0**largest)


def _run(shadow: Shadow, gradient: Gradient, scale: float) -> Run:
    """One run at a loss scale."""
    results, notes = shadow(np.asarray(scale, np.float32))
    loss, *others = results
    names = [one.name for one in gradient.arguments if one.is_parameter]
    grads = dict(zip(names, others, strict=False))
    return Run(scale, loss, grads, others[len(names) :], notes)
