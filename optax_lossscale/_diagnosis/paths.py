"""Paths through the graph of notes, from a result back toward the arguments.

A note holds the notes of its operands. `path_from` goes from a note to that of one
operand, such as the operand that is off the most, from there to one of its operands,
and so on. `jump` finds where a measure grows most on the path: `fault` looks for a jump
of the error, and `scale` for a jump of the largest magnitude.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from optax_lossscale._diagnosis.notes import Note


def path_from(note: Note, step: Callable[[Note], Note | None]) -> list[Note]:
    """Follows `step` from note to note until it returns None.

    Returns:
      `note`, `step(note)`, `step(step(note))` and so on.
    """
    path = []
    current: Note | None = note
    while current is not None:
        path.append(current)
        current = step(current)
    return path


def jump(
    path: Sequence[Note], measures: Sequence[float], min_factor: float
) -> Note | None:
    """Finds the note on a path at which a measure, such as the error, grows most.

    A path leads back from a result, so the measure grows from its end to its beginning.
    The measures 8, 8 and 1 for the path `[c, b, a]` grow at `b`, by a factor of 8.

    Args:
      path: the notes, from a result back.
      measures: a positive number for each note. One more may follow, with which that of
        the last note is compared. Without it, nothing can grow at the last note.
      min_factor: the smallest factor that counts as growth.

    Returns:
      The note, or None if the measure grows nowhere by a factor of `min_factor` or
      more.
    """
    growth = [measure / earlier for measure, earlier in pairwise(measures)]
    most = max(growth, default=0.0)
    return path[growth.index(most)] if most >= min_factor else None
