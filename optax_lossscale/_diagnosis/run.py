"""The runs of a gradient in pairs: at a loss scale of 1, and at the one that fits.

The magnitudes of the run at 1 say which scale fits. The run at that scale confirms it,
or is repeated at another, as a backward pass need not be linear in the scale. If
float32 would have made other choices, there is one more run, in which it makes them.
"""

from typing import NamedTuple

import numpy as np

from optax_lossscale._diagnosis.gradient import Gradient
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Note, measured, note_of
from optax_lossscale._diagnosis.pairs import Pair
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
    notes: list[Note]

    @property
    def results(self) -> dict[str, Value]:
        """The loss and the gradients, by name."""
        return {"the loss": self.loss, **self.grads}

    def is_finite(self, in_float32: bool = False) -> bool:
        """Whether loss and gradients are finite, in the program or in float32."""
        pairs = [value.pair for value in self.results.values()]
        numbers = [pair.true if in_float32 else pair.low for pair in pairs]
        return all(np.isfinite(x).all() for x in numbers)


class Runs(NamedTuple):
    """The runs of a gradient, and which loss scale fits."""

    at_1: Run  # at a loss scale of 1
    fitting: Run  # at the scale that fits; the run at 1, if none does
    fits: InitialScale | None  # None if gradients are finite at no scale
    overflow: Note | None  # the cause of the first overflow, at twice the largest scale
    passed: dict[str, str]  # by line, the operation that computes in 16 bits only
    # At the scale of `fitting`, with float32's own choices; None if they are the same
    own_choices: Run | None = None

    @property
    def growth(self) -> float:
        """The factor by which gradients grow from the run at 1 to the one that fits."""
        return self.fitting.scale / self.at_1.scale


def runs_of(gradient: Gradient) -> Runs:
    """All runs of a gradient, that with float32's own choices included."""
    runs = _following_choices(gradient)
    if any(note.decided for note in runs.fitting.notes):
        shadow = Shadow(gradient.jaxpr, follows=False)
        own_choices = _run(shadow, gradient, runs.fitting.scale)
        runs = runs._replace(own_choices=own_choices)
    return runs


def _following_choices(gradient: Gradient) -> Runs:
    """The runs in which float32 follows the program's choices."""
    shadow = Shadow(gradient.jaxpr)
    at_1 = _run(shadow, gradient, 1.0)
    passed = {n.place.source: n.place.primitive for n in at_1.notes if n.is_passed}
    runs = Runs(at_1, at_1, None, None, passed)
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
    loss, *grads = shadow(gradient.values(scale))
    results = dict(zip(gradient.grad_names, map(_result, grads), strict=True))
    return Run(scale, _result(loss), results, shadow.notes)


def _result(value: Value) -> Value:
    """A result of the program with two arrays, and with a note about these alone."""
    note = value.note
    pair = Pair(np.asarray(value.pair.low), np.asarray(value.pair.in_float32))
    if note is not None:  # which may be about a stack with this as one row
        figures = measured(pair.low, pair.true)
        note = note_of(figures, note.place, note.dtype, (note,), note.rounds)
    return Value(pair, note)
