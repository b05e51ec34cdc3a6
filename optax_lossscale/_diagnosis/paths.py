"""Paths through the graph of notes, from a result back towards the arguments.

A note holds the notes of its operands. `path_from` goes from a note to the note of one
operand, for example of the one that is off the most, and so on. `jump` finds where on
the path a size, such as the error, grows most. `fault` looks for a jump of the error,
and `scale` for a jump of the largest number.
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
    path: Sequence[Note], sizes: Sequence[float], min_factor: float
) -> Note | None:
    """Finds the note on a path at which a size grows most.

    A path leads back from a result, so sizes grow from its end to its beginning. The
    sizes 8, 8 and 1 for the path `[c, b, a]` grow at `b`, by a factor of 8.

    Args:
      path: the notes, from a result back.
      sizes: a positive size for each note. One more may follow, to compare the size of
        the last note with. Without it, nothing can grow at the last note.
      min_factor: the smallest factor that counts as growth.

    Returns:
      The note, or None if no size grows by a factor of `min_factor` or more.
    """
    growth = [size / earlier for size, earlier in pairwise(sizes)]
    most = max(growth, default=0.0)
    return path[growth.index(most)] if most >= min_factor else None
