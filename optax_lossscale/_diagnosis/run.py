"""The runs of a gradient beside float32: at a loss scale of 1, and at the one that fits."""

from typing import NamedTuple

import numpy as np

from optax_lossscale._diagnosis.gradient import Gradient
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Note, measured
from optax_lossscale._diagnosis.pairs import Pair
from optax_lossscale._diagnosis.scale import (
    HIGHEST,
    MARGIN,
    InitialScale,
    first_overflow,
)
from optax_lossscale._diagnosis.shadow import Shadow

_TRIES = 6  # of scales, where the backward pass is not linear in them


class Run(NamedTuple):
    """A gradient beside float32's at one loss scale."""

    scale: float
    loss: Value
    grads: dict[str, Value]  # scaled, by the names of the parameters
    notes: list[Note]

    @property
    def results(self) -> dict[str, Value]:
        """The loss and the gradients."""
        return {"the loss": self.loss, **self.grads}

    def is_finite(self, in_float32: bool = False) -> bool:
        """Whether the loss and all gradients are, in the program or in float32."""
        pairs = [value.pair for value in self.results.values()]
        numbers = [pair.true if in_float32 else pair.low for pair in pairs]
        return all(np.isfinite(x).all() for x in numbers)


class Runs(NamedTuple):
    """What the runs of a gradient say."""

    at_1: Run
    fitting: Run  # at the scale that fits; at a scale of 1, if none does
    fits: InitialScale | None  # None if gradients are finite at no scale
    overflow: Note | None  # what becomes infinite first, at twice the largest scale
    passed: dict[str, str]  # what computes in 16 bits only: the operation, by its line


def runs_of(gradient: Gradient) -> Runs:
    """The run at a loss scale of 1, and one at the scale that follows from it."""
    shadow = Shadow(gradient.jaxpr)
    at_1 = _run(shadow, gradient, 1.0)
    passed = {n.place.source: n.place.primitive for n in at_1.notes if n.is_passed}
    if not at_1.is_finite(in_float32=True) or not np.isfinite(at_1.loss.pair.low):
        return Runs(at_1, at_1, None, None, passed)
    first, overflow = first_overflow(at_1.notes, 1.0)
    if any(note.seeded and note.dtype == np.float16 for note in at_1.notes):
        largest = min(first - 1, HIGHEST)
        return _fitting(
            shadow, gradient, Runs(at_1, at_1, None, overflow, passed), largest
        )
    fits = _fits(first - 1 - MARGIN, first - 1) if at_1.is_finite() else None
    return Runs(at_1, at_1, fits, overflow, passed)


def _fitting(shadow: Shadow, gradient: Gradient, runs: Runs, largest: int) -> Runs:
    """The same, with the run at the scale that fits, if `largest` is what a linear pass allows."""
    exponent = largest - MARGIN
    finite = None  # the largest exponent of a scale that is known to fit
    infinite = HIGHEST + 1  # the least of one that is known to be too large
    if runs.at_1.is_finite():
        finite = 0
        runs = runs._replace(fits=_fits(0, 0))
    for _ in range(_TRIES):
        run = _run(shadow, gradient, 2.0**exponent)
        if run.is_finite():
            finite = exponent
            # The program's own numbers say it to the bit.
            first, overflow = first_overflow(run.notes, run.scale)
            largest = max(min(first, infinite) - 1, exponent)
            fits = _fits(min(exponent, largest - MARGIN), largest)
            runs = runs._replace(
                fitting=run, fits=fits, overflow=overflow or runs.overflow
            )
            is_linear = largest - MARGIN <= exponent + 1
            if is_linear or overflow is None:  # or nothing is left that could overflow
                break
            exponent = largest - MARGIN
        elif finite is None:
            infinite = exponent
            exponent -= 2 * MARGIN
        else:
            infinite = exponent
            exponent = (finite + exponent) // 2
            if exponent <= finite:
                break
    return runs


def _fits(exponent: int, largest: int) -> InitialScale:
    return InitialScale(2.0**exponent, 2.0**largest)


def _run(shadow: Shadow, gradient: Gradient, scale: float) -> Run:
    loss, *grads = shadow(gradient.values(scale))
    results = dict(zip(gradient.grad_names, map(_result, grads), strict=True))
    return Run(scale, _result(loss), results, shadow.notes)


def _result(value: Value) -> Value:
    """A result with an array for each number, noted by itself."""
    note = value.note
    pair = Pair(np.asarray(value.pair.low), np.asarray(value.pair.in_float32))
    if note is not None:  # what was noted may be of a stack that this is a part of
        numbers = measured(pair.low, pair.true)
        note = Note(note.place, note.rounds, (note,), note.dtype, **numbers)
    return Value(pair, note)
