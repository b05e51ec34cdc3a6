"""The table of a run: a row for each equation, with its error and magnitudes.

A note is made in each round of a loop. The row of an equation is its note of the round
in which it is off the most.
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

    Print it for the table. Of each row, `before` is how far the worst operand is off,
    `off` how far the result is, `lost` the share of it that became 0, and `largest` its
    largest number.

    Attributes:
      rows: in a loop, the round in which the equation is off the most, but with the
        largest number of all rounds.
    """

    rows: tuple[Note, ...]

    def __str__(self) -> str:
        return "\n".join(aligned([_TITLES, *map(_cells, self.rows)]))


def table_of(notes: Sequence[Note]) -> Table:
    """The table of all notes of a run."""
    all_rounds: dict[tuple[Origin, int], list[Note]] = defaultdict(list)
    for note in notes:
        all_rounds[note.origin, note.position].append(note)
    rows = []
    for rounds in all_rounds.values():
        worst = max(rounds, key=lambda note: note.error)
        largest = max(note.largest for note in rounds)
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
