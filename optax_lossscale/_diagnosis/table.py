"""The table of a run: a row for each equation, with its error and magnitudes.

A note is made in each iteration of a loop. The row of an equation is its note of the
iteration in which it is off the most.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from optax_lossscale._diagnosis.notes import Note, Origin
from optax_lossscale._diagnosis.text import aligned, percent

_TITLES = ("line", "layer", "operation", "dtype", "before", "off", "lost", "largest")


class Table(NamedTuple):
    """A row for each computed result of the gradient, in the program's order.

    Print it for the table. Of each row, `layer` has the numbers of the iterations, too,
    `before` is how far the worst operand is off, `off` how far the result is, `lost` the
    share of it that became 0, and `largest` its largest number.

    Attributes:
      rows: the note of each equation. Of one in a loop, it is the note of the iteration
        in which it is off the most, but with the largest number of all iterations.
    """

    rows: tuple[Note, ...]

    def __str__(self) -> str:
        return "\n".join(aligned([_TITLES, *map(_cells, self.rows)]))


def table_of(notes: Sequence[Note]) -> Table:
    """The table of all notes of a run."""
    of_each: dict[tuple[Origin, int], list[Note]] = defaultdict(list)
    for note in notes:
        of_each[note.origin, note.position].append(note)
    rows = []
    for iterations in of_each.values():
        worst = max(iterations, key=lambda note: note.error)
        largest = max(note.largest for note in iterations)
        rows.append(dataclasses.replace(worst.row, largest=largest))
    return Table(tuple(rows))


def _cells(row: Note) -> tuple[str, ...]:
    """The cells of a row, under `_TITLES`."""
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
