"""Choices that float32 would have made otherwise, and what follows from that.

A choice is an integer or boolean that depends on floats, such as an index, a mask or the
condition of a loop. Beside the program, float32 makes the choices of the program. In a
run of its own, the program in float32 makes its own.
"""

from collections.abc import Container, Mapping

import numpy as np

from optax_lossscale._diagnosis.figures import LARGE_SHARE, TOLERANCE
from optax_lossscale._diagnosis.notes import THE_LOSS, Note
from optax_lossscale._diagnosis.pairs import Pair
from optax_lossscale._diagnosis.run import Run, Runs
from optax_lossscale._diagnosis.table import rounds_of

_FEW = 0.01  # the share of choices that may differ, as near a tie either is as good


def off_by_choices(runs: Runs, determined: Container[str]) -> dict[str, float]:
    """How far results are off from float32 with its own choices, if by much.

    Args:
      runs: the runs of the gradient.
      determined: the names of the results that float32 determines.
    """
    any_differ = any(note.decided for note in runs.fitting.notes)
    if runs.in_float32 is None or not any_differ:
        return {}
    as_written = runs.fitting.results
    off = {}
    for name, in_float32 in runs.in_float32.results.items():
        pair = Pair(as_written[name].pair.actual, in_float32.pair.actual)
        error = pair.figures.error
        if name in determined and error > TOLERANCE:
            off[name] = error
    return off


def choices_of(run: Run, off_by_choices: Mapping[str, float]) -> list[Note]:
    """The choices that float32 would have made otherwise, each in its worst round.

    Those that differ most come first. All of them count if the loss is off by choices,
    or a gradient by more than a fifth. Otherwise, a mask counts if more than a fifth of
    it differs, and any other choice if more than 1% of it does. None does if the loss
    is not finite, as a comparison with NaN means nothing.
    """
    if not np.isfinite(run.loss.pair.actual):
        return []
    most = max(off_by_choices.values(), default=0.0)
    do_matter = THE_LOSS in off_by_choices or most > LARGE_SHARE
    choices = []
    for rounds in rounds_of(run.notes):
        note = max(rounds, key=lambda note: note.decided)
        least = 0.0 if do_matter else _tolerated(note)
        if note.decided > least:
            choices.append(note.row)
    return sorted(choices, key=lambda row: row.decided, reverse=True)


def _tolerated(choice: Note) -> float:
    """The share of a choice that may differ, as it changes no result by much."""
    is_mask = choice.dtype == np.bool_ and choice.count > 1
    return LARGE_SHARE if is_mask else _FEW
