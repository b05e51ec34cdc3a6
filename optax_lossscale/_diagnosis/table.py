"""The table of a program's equations: how far each is from float32, and how large its numbers."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from optax_lossscale._arrays.names import natural
from optax_lossscale._diagnosis.notes import Note
from optax_lossscale._diagnosis.text import some, table


class Row(NamedTuple):
    """An equation of the gradient; in a loop, the round in which it is off the most.

    Attributes:
      primitive: its name in JAX, such as `dot_general`.
      source: the line that made it, as `model.py:12 (f)`.
      layer: the scope that it is in, or else the parameters nearest to it.
      rounds: the rounds of the loops around it, the outermost first, from 0.
      dtype: the dtype of its result.
      is_backward: whether it is of the backward pass, and so in proportion to the loss scale.
      before: how far its operands are from float32's: the norm of the difference, relative.
      error: how far its result is; infinite if it is not finite where float32's is.
      is_finite: whether float32's result is finite.
      lost: the share of its numbers that is zero where float32's is not.
      decided: of indices and conditions, the share that float32 decides otherwise.
      largest: the largest absolute value in float32, over all rounds.
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


class Table(NamedTuple):
    """A row for each equation, in the order of the program; print it."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        titles = ("line", "layer", "operation", "dtype", "before", "off", "lost", "largest")
        return "\n".join(table([titles, *map(_cells, self.rows)], text=(0, 1, 2, 3)))


def table_of(notes: Iterable[Note]) -> Table:
    """The table of all that was noted in a run."""
    worst: dict[tuple[int, Any], Note] = {}
    largest: dict[tuple[int, Any], float] = {}
    for note in notes:
        key = (note.number, note.dtype)
        if key not in worst or note.off > worst[key].off:
            worst[key] = note
        largest[key] = max(largest.get(key, 0.0), note.largest)
    order = sorted(worst, key=lambda key: key[0])
    return Table(tuple(_row(worst[key], largest[key]) for key in order))


def layer_of(note: Note) -> str:
    """The scope of a result, or else the parameters nearest to it."""
    if note.place.scope:
        return note.place.scope
    names = next(filter(None, map(_parameters, _levels(note))), [])
    return some(sorted(names, key=natural))


def where(note: Note) -> str:
    """`dot_general at model.py:12 (f) [blocks/w1, iteration 3]`."""
    inside = [layer_of(note), *(f"iteration {n}" for n in note.rounds)]
    layer = ", ".join(filter(None, inside))
    return f"{note.place.primitive} at {note.place.source}" + (f" [{layer}]" if layer else "")


def before(note: Note) -> float:
    """How far the operand is off that is off the most."""
    return max((read.off for read in note.reads), default=0.0)


def _row(note: Note, largest: float) -> Row:
    return Row(
        note.place.primitive,
        note.place.source,
        layer_of(note),
        note.rounds,
        note.dtype,
        note.seeded,
        before(note),
        note.off,
        not note.bad_true,
        note.lost,
        note.decided,
        largest,
        note.typical,
        note.count,
    )


def _levels(note: Note) -> Iterator[list[Note]]:
    """What a result was made of, the nearest first."""
    seen = {id(note)}
    level = [note]
    while level:
        yield level
        reads = [read for one in level for read in one.reads if id(read) not in seen]
        level = list({id(read): read for read in reads}.values())
        seen.update(map(id, level))


def _parameters(notes: Iterable[Note]) -> set[str]:
    return {note.place.name for note in notes if note.place.is_parameter}


def _cells(row: Row) -> tuple[str, ...]:
    layer = ", ".join([row.layer, *map(str, row.rounds)])
    shares = [f"{x:.1%}" for x in (row.before, row.error, row.lost)]
    name = row.primitive
    return row.source, layer, name, str(row.dtype), *shares, f"{row.largest:.3g}"
