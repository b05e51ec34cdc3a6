"""Choices that float32 would have made otherwise, and what follows from that.

A choice is an integer or boolean that depends on floats, such as an index, a mask or
the condition of a loop. Beside the program, float32 makes the choices of the program.
In a run of its own, the program in float32 makes its own.
"""

from collections.abc import Container, Mapping

import numpy as np

from optax_lossscale._diagnosis.figures import LARGE_SHARE, TOLERANCE
from optax_lossscale._diagnosis.notes import THE_LOSS, Note
from optax_lossscale._diagnosis.pairs import Pair
from optax_lossscale._diagnosis.run import Run, Runs


def off_by_choices(runs: Runs, right: Container[str]) -> dict[str, float]:
    """How far results are off from float32 with its own choices, if by much.

    Args:
      runs: the runs of the gradient.
      right: the names of the results that are right by the program's choices.
    """
    any_differ = any(note.decided for note in runs.fitting.notes)
    if runs.in_float32 is None or not any_differ:
        return {}
    as_written = runs.fitting.results
    off = {}
    for name, in_float32 in runs.in_float32.results.items():
        pair = Pair(as_written[name].pair.actual, in_float32.pair.actual)
        error = pair.figures.error
        if name in right and error > TOLERANCE:
            off[name] = error
    return off


def choices_of(run: Run, off: Mapping[str, float]) -> list[Note]:
    """The choices that float32 would have made otherwise: for each line, the worst.

    Those that differ most come first. All of them count if the loss is off by choices,
    or a gradient by more than a fifth. Otherwise, a mask counts if more than a fifth of
    it differs, and any other choice if more than 5% of it does: fewer are near a tie,
    where either choice is as good. None counts if the loss is not finite, as a
    comparison with NaN means nothing.
    """
    if not np.isfinite(run.loss.pair.actual):
        return []
    most = max(off.values(), default=0.0)
    all_count = THE_LOSS in off or most > LARGE_SHARE
    worst: dict[str, Note] = {}
    for note in sorted(run.notes, key=lambda note: note.decided, reverse=True):
        if note.decided > (0.0 if all_count else _tolerated(note)):
            worst.setdefault(note.line, note)
    return [note.row for note in worst.values()]


def _tolerated(choice: Note) -> float:
    """The share of a choice that may differ, as it changes no result by much."""
    is_mask = choice.dtype == np.bool_ and choice.count > 1
    return LARGE_SHARE if is_mask else TOLERANCE
