"""The table of a run: a row for each equation, with its error and magnitudes.

A note is made in each round of a loop; a row stands for all rounds, and has the figures
of the one in which the equation is off the most.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._arrays.names import natural
from optax_lossscale._diagnosis.notes import Note
from optax_lossscale._diagnosis.text import aligned, percent, some

_NEAR = 200  # how many equations back a parameter is looked for


class Row(NamedTuple):
    """An equation of the gradient; in a loop, the round in which it is off the most.

    Attributes:
      primitive: its name in JAX, such as `dot_general`; of an argument, its path.
      source: the line that made it, as `model.py:12 (f)`; of an argument, "".
      layer: the scope that it is in, or else the parameters nearest to it.
      rounds: the rounds of the loops around it, the outermost first, from 0.
      dtype: the dtype of its result.
      is_backward: whether it is of the backward pass, and so in proportion to the loss
        scale.
      before: how far the worst of its operands is from float32's, as `error` is.
      error: how far its result is from float32's: the norm of the difference, relative
        to the norm of float32's; infinite if it is not finite where float32's is.
      is_finite: whether float32's result is finite.
      lost: the share of its numbers that is zero where float32's is not.
      decided: of indices and conditions, the share that float32 decides otherwise.
      largest: the largest absolute value, of the program or in float32, over all
        rounds.
      typical: the root mean square in float32.
      count: how many numbers the result has.
    """

    primitive: str
    source: str
    layer: str
    rounds: tuple[int, ...]
    dtype: np.dtype
    is_backward: bool
    before: float
    error: float
    is_finite: bool
    lost: float
    decided: float
    largest: float
    typical: float
    count: int

    @property
    def line(self) -> str:
        """The operation and its line, as `dot_general at model.py:12 (f)`."""
        return f"{self.primitive} at {self.source}" if self.source else self.primitive

    def __str__(self) -> str:
        inside = [self.layer, *(f"iteration {n}" for n in self.rounds)]
        layer = ", ".join(filter(None, inside))
        return f"{self.line} [{layer}]" if layer else self.line


class Table(NamedTuple):
    """A row for each equation, in the order of the program; print it."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        titles = (
            "line",
            "layer",
            "operation",
            "dtype",
            "before",
            "off",
            "lost",
            "largest",
        )
        return "\n".join(aligned([titles, *map(_cells, self.rows)]))


def table_of(notes: Iterable[Note]) -> Table:
    """The table of all notes of a run."""
    worst: dict[tuple[int, Any], Note] = {}
    largest: dict[tuple[int, Any], float] = {}
    for note in notes:
        key = (note.place.number, note.dtype)
        if key not in worst or note.off > worst[key].off:
            worst[key] = note
        largest[key] = max(largest.get(key, 0.0), note.largest)
    in_order = sorted(worst, key=lambda key: key[0])
    return Table(
        tuple(row_of(worst[key])._replace(largest=largest[key]) for key in in_order)
    )


def row_of(note: Note) -> Row:
    """The row of one note."""
    return Row(
        primitive=note.place.primitive or note.place.name,
        source=note.place.source,
        layer=_layer(note),
        rounds=note.rounds,
        dtype=note.dtype,
        is_backward=note.seeded,
        before=max((read.off for read in note.reads), default=0.0),
        error=note.off,
        is_finite=not note.bad_true,
        lost=note.lost,
        decided=note.decided,
        largest=note.largest,
        typical=note.typical,
        count=note.count,
    )


def _layer(note: Note) -> str:
    """The scope of a result, or else the nearest parameters that it depends on."""
    if note.place.scope:
        return note.place.scope
    level = [note]
    seen = set()
    for _ in range(_NEAR):
        names = {note.place.name for note in level if note.place.is_parameter}
        if names:
            return some(sorted(names, key=natural))
        reads = {id(read): read for note in level for read in note.reads}
        level = [read for key, read in reads.items() if key not in seen]
        seen.update(reads)
    return ""


def _cells(row: Row) -> tuple[str, ...]:
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
