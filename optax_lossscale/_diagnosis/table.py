"""The table of a run: a row for each equation, with its error and magnitudes.

A note is made in each round of a loop. The row of an equation is its note of the round
in which it is off the most.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from optax_lossscale._diagnosis.notes import Note
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


def table_of(notes: Iterable[Note]) -> Table:
    """The table of all notes of a run."""
    worst: dict[tuple[int, Any], Note] = {}
    largest: dict[tuple[int, Any], float] = {}
    for note in notes:
        key = (note.place.number, note.dtype)
        if key not in worst or note.error > worst[key].error:
            worst[key] = note
        largest[key] = max(largest.get(key, 0.0), note.largest)
    in_order = sorted(worst, key=lambda key: key[0])
    return Table(
        tuple(
            dataclasses.replace(worst[key].row, largest=largest[key])
            for key in in_order
        )
    )


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
