"""The table of a run: a row for each equation, with its error and magnitudes.

A note is made in each round of a loop. The row of an equation is its note of the round
in which it is off the most.
"""

import dataclasses
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from optax_lossscale._diagnosis.notes import Note, Notes, Place
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


def table_of(notes: Notes) -> Table:
    """The table of all notes of a run."""
    largest: dict[Place, float] = defaultdict(float)
    for place, most in zip(
        notes.places, notes.figures["largest"].tolist(), strict=True
    ):
        largest[place] = max(largest[place], most)
    worst = of_worst_rounds(notes, "error")
    rows = [
        dataclasses.replace(note.row, largest=largest[note.place]) for note in worst
    ]
    return Table(tuple(rows))


def of_worst_rounds(notes: Notes, column: str) -> list[Note]:
    """For each result of an equation, its note of the round in which it has the most."""
    order = np.argsort(-notes.figures[column], kind="stable")
    worst: dict[Place, int] = {}
    for row in order.tolist():
        place = notes.places[row]
        if place.primitive:
            worst.setdefault(place, row)
    rows = sorted(worst.values(), key=lambda row: notes.places[row].number)
    return [notes[row] for row in rows]


def _cells(row: Note) -> tuple[str, ...]:
    return (
        row.source,
        ", ".join([row.layer, *map(str, row.rounds)]),
        row.primitive,
        str(row.dtype),
        percent(row.before),
        percent(row.error),
        percent(row.lost),
        f"{row.largest:.3g}",
    )
