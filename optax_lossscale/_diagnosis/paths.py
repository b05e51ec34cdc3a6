"""Paths from a note back, each step to one of the notes that it reads."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from optax_lossscale._diagnosis.notes import Note


def path_from(note: Note, step: Callable[[Note], Note | None]) -> list[Note]:
    """A note, the one that `step` gives for it, and so on, until it gives None."""
    path = []
    at: Note | None = note
    while at is not None:
        path.append(at)
        at = step(at)
    return path


def jump(path: Sequence[Note], sizes: Sequence[float], least: float) -> Note | None:
    """The note of a path at which a size grows most, if that is `least` times or more.

    Args:
      path: the notes, from a result back.
      sizes: the positive size of each, and perhaps of what comes before the last one.
      least: the least growth that counts.
    """
    growth = [size / earlier for size, earlier in pairwise(sizes)]
    most = max(growth, default=0.0)
    return path[growth.index(most)] if most >= least else None
