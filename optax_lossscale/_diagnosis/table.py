"""The table of a run: a row for each computed result, with its error and magnitude.

A *note* records one result of one equation. An equation in a loop has a note for each
iteration, but each of its results has only one row in the table: the note of the
iteration in which the result is off the most.
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

    Print it to see where an error begins: look for the first row in which `off` is much
    larger than `before`. The columns are

    - `line`, `layer`, `operation` and `dtype`: what computed the result, and where.
      `layer` includes the number of the iteration, for each loop around the line.
    - `before`: how far the worst operand is off.
    - `off`: how far the result is off.
    - `lost`: the share of its elements that became 0, among those that are not 0 in
      float32.
    - `largest`: the largest finite magnitude in the result or in its float32 version.

    Attributes:
      rows: the note of each result, with the numbers that are printed and more. A
        result in a loop has the note of the iteration in which it is off the most, but
        its `largest` covers all iterations.
    """

    rows: tuple[Note, ...]

    def __str__(self) -> str:
        cells = [_cells(row) for row in self.rows]
        return "\n".join(aligned([_TITLES, *cells]))


def table_of(notes: Sequence[Note]) -> Table:
    """Builds the table from all notes of a run."""
    notes_of_results: dict[tuple[Origin, int], list[Note]] = defaultdict(list)
    for note in notes:
        notes_of_results[note.origin, note.position].append(note)
    rows = []
    for notes_of_result in notes_of_results.values():
        worst = max(notes_of_result, key=lambda note: note.error)
        largest = max(note.largest for note in notes_of_result)
        rows.append(dataclasses.replace(worst.row, largest=largest))
    return Table(tuple(rows))


def _cells(row: Note) -> tuple[str, ...]:
    """Formats the cells of a row, in the order of `_TITLES`."""
    place = [row.layer, *map(str, row.iterations)]
    return (
        row.source,
        ", ".join(filter(None, place)),
        row.primitive,
        str(row.dtype),
        percent(row.worst_operand_error),
        percent(row.error),
        percent(row.lost),
        f"{row.largest:.3g}",
    )
