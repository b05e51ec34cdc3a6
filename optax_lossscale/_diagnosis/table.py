"""The table of a run: a row for each equation, with its error and magnitudes.

A note is made in each round of a loop. The row of an equation is its note of the round
in which it is off the most.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from optax_lossscale._diagnosis.notes import Note, Place
from optax_lossscale._diagnosis.text import aligned, percent

_TITLES = ("line", "layer", "operation", "dtype", "before", "off", "lost", "largest")


class Table(NamedTuple):
    """A row for each equation of the gradient, in the program's order; print it.

    Attributes:
      rows: in a loop, the round in which the equation is off the most, but with the
        largest number of all rounds.
    """

    rows: tuple[Note, ...]

    def __str__(self) -> str:
        return "\n".join(aligned([_TITLES, *map(_cells, self.rows)]))


def table_of(notes: Sequence[Note]) -> Table:
    """The table of all notes of a run."""
    largest: dict[tuple[Place, int], float] = defaultdict(float)
    for note in notes:
        largest[note.of_any_round] = max(largest[note.of_any_round], note.largest)
    worst = of_worst_rounds(notes, lambda note: note.error)
    rows = [
        dataclasses.replace(note.row, largest=largest[note.of_any_round])
        for note in worst
    ]
    return Table(tuple(rows))


def of_worst_rounds(notes: Sequence[Note], key: Callable[[Note], float]) -> list[Note]:
    """For each result of an equation, its note of the round in which `key` is largest."""
    worst: dict[tuple[Place, int], Note] = {}
    for note in notes:
        worst[note.of_any_round] = max(
            worst.get(note.of_any_round, note), note, key=key
        )
    return list(worst.values())


def _cells(row: Note) -> tuple[str, ...]:
    return (
        row.source,
        ", ".join(filter(None, [row.layer, *map(str, row.rounds)])),
        row.primitive,
        str(row.dtype),
        percent(row.before),
        percent(row.error),
        percent(row.lost),
        f"{row.largest:.3g}",
    )
