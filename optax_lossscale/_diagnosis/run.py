"""The runs of a gradient beside float32: at a loss scale of 1, and at the one that fits."""

import math
from typing import NamedTuple

import numpy as np

from optax_lossscale._diagnosis.gradient import Gradient
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Note, measured
from optax_lossscale._diagnosis.scale import HIGHEST, MARGIN, InitialScale, first_overflow
from optax_lossscale._diagnosis.shadow import Shadow
from optax_lossscale._diagnosis.stretch import Pair

_TRIES = 4  # at a scale, each a little lower than the one before


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
        values = (value.pair[in_float32] for value in self.results.values())
        return all(np.isfinite(x).all() for x in values)


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
    passed = {n.place.source: n.place.primitive for n in at_1.notes if n.place.is_passed}
    if not at_1.is_finite(in_float32=True) or not np.isfinite(at_1.loss.pair.low):
        return Runs(at_1, at_1, None, None, passed)
    first, overflow = first_overflow(at_1.notes, 1.0)
    largest = first - 1
    halves = [n for n in at_1.notes if n.seeded and n.dtype == np.float16]
    if not halves:
        is_finite = at_1.is_finite()
        fits = InitialScale(2.0 ** (largest - MARGIN), 2.0**largest) if is_finite else None
        return Runs(at_1, at_1, fits, overflow, passed)
    largest = min(largest, HIGHEST)
    run = at_1
    for below in range(0, _TRIES * MARGIN, MARGIN):
        scale = 2.0 ** (largest - MARGIN - below)
        run = _run(shadow, gradient, scale)
        if run.is_finite():
            if not below:  # the program's own numbers say it to the bit
                first, overflow = first_overflow(run.notes, scale)
                largest = min(first - 1, HIGHEST)
            best = max(largest - below, exponent_of(scale))
            fits = InitialScale(min(scale, 2.0 ** (best - MARGIN)), 2.0**best)
            return Runs(at_1, run, fits, overflow, passed)
    return Runs(at_1, run, None, overflow, passed)


def _run(shadow: Shadow, gradient: Gradient, scale: float) -> Run:
    loss, *grads = shadow(gradient.values(scale))
    results = dict(zip(gradient.grad_names, map(_result, grads), strict=True))
    return Run(scale, _result(loss), results, shadow.notes)


def _result(value: Value) -> Value:
    """A result with an array for each number, noted by itself."""
    note = value.note
    pair = Pair(value.pair.low, value.pair.in_float32)
    if note is not None:  # what was noted may be of a stack that this is a part of
        (numbers,) = measured(pair.low[None], pair.true[None])
        note = Note(note.place, note.number, note.rounds, (note,), note.dtype, **numbers)
    return Value(pair, note)


def exponent_of(scale: float) -> int:
    """The exponent of a power of two."""
    return round(math.log2(scale))
