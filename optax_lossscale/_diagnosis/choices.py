"""Finds choices that float32 would make differently, and the results that they change.

A choice is an integer or boolean that depends on floats, such as an index, a mask or
the condition of a loop. In float16, `argmax([1.0, 1.0001])` is 0, because both elements
are rounded to 1. In float32 it is 1. If the program looks up a row by this index, the
float32 reference must look up the same row, because otherwise the two could not be
compared. It therefore takes two runs to see what choices change:

- In the run of the program as it is, the float32 reference follows the program's
  choices. The note of a choice records in which share of its elements float32 would
  choose differently.
- In the run in float32, the program makes the choices of float32.

If a result agrees with its reference in the first run but not with the second run, it
is off because of choices.
"""

from collections.abc import Container, Mapping

import numpy as np

from optax_lossscale._diagnosis.figures import LARGE_SHARE, TOLERANCE
from optax_lossscale._diagnosis.notes import THE_LOSS, Note
from optax_lossscale._diagnosis.pairs import Pair
from optax_lossscale._diagnosis.run import Run, Runs


def off_by_choices(runs: Runs, right: Container[str]) -> dict[str, float]:
    """Finds how far the loss and gradients are from those with the choices of float32.

    Args:
      runs: the runs of the gradient.
      right: the names of the results that are right, compared with references that
        follow the program's choices.

    Returns:
      The errors above 5% of results in `right`, by name.
    """
    any_differ = any(note.differing for note in runs.judged.notes)
    if runs.in_float32 is None or not any_differ:
        return {}
    as_written = runs.judged.results
    errors = {}
    for name, value in runs.in_float32.results.items():
        actual = as_written[name].pair.actual
        with_own_choices = value.pair.actual
        error = Pair(actual, with_own_choices).figures.error
        if name in right and error > TOLERANCE:
            errors[name] = error
    return errors


def choices_of(run: Run, off: Mapping[str, float]) -> list[Note]:
    """Lists choices that float32 would make differently, the worst choice of each line.

    A few such choices do no harm: whether a ReLU passes an element that is 0 up to
    rounding hardly matters. A mask is therefore listed only if more than a fifth of it
    differs, and any other choice only if more than 5% of it does. But if choices change
    the loss by more than 5%, or a gradient by more than a fifth, every choice that
    differs is listed. If the loss is not finite, none is listed, because a comparison
    with NaN means nothing.

    Args:
      run: the run whose choices to list.
      off: what `off_by_choices` returned.

    Returns:
      Notes for a report, the choice that differs most first.
    """
    if not np.isfinite(run.loss.pair.actual):
        return []
    all_count = THE_LOSS in off or max(off.values(), default=0.0) > LARGE_SHARE
    worst_first = sorted(run.notes, key=lambda note: note.differing, reverse=True)
    worst_by_line: dict[str, Note] = {}
    for note in worst_first:
        tolerated = 0.0 if all_count else _tolerated(note)
        if note.differing > tolerated:
            worst_by_line.setdefault(note.line, note)
    return [note.row for note in worst_by_line.values()]


def _tolerated(choice: Note) -> float:
    """Returns the share of a choice that may differ before the choice is listed."""
    is_mask = choice.dtype == np.bool_ and choice.count > 1
    return LARGE_SHARE if is_mask else TOLERANCE
