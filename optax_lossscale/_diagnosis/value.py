"""The values that a run computes: pairs of arrays, each with a note about its error.

A run stores a `Value` for each variable of the program. `moved_value` builds a value
that a loop or branch slices, stacks or selects from others.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from optax_lossscale._diagnosis.notes import Note, note_of
from optax_lossscale._diagnosis.pairs import Pair
from optax_lossscale._programs.values import Array, is_inexact


class Value(NamedTuple):
    """The value of a variable and its reference, with a note.

    Attributes:
      pair: the value and its reference.
      note: how far the two are apart, and from what they were computed. It is None for
        constants, and for moved constants and integers computed from constants alone:
        all of these are exact.
      row_notes: the note of each row, if a loop stacked the value from its iterations.
    """

    pair: Pair
    note: Note | None = None
    row_notes: Sequence[Note | None] = ()

    def map(self, function: Callable[[Any], Array]) -> "Value":
        """Applies a function to both arrays; keeps the note, but not `row_notes`."""
        return Value(jax.tree.map(function, self.pair), self.note)


def notes_of(values: Iterable[Value]) -> list[Note]:
    """Collects the notes of those values that have one."""
    return [value.note for value in values if value.note is not None]


def moved_value(pair: Pair, sources: Iterable[Value]) -> Value:
    """Builds a value from elements of others, such as a stack from its rows.

    Floats get a new note, which reads the notes of the sources. Integers and booleans
    keep the note of the first source that has one.
    """
    reads = notes_of(sources)
    if not reads:
        return Value(pair)
    first = reads[0]
    if not is_inexact(pair.actual):
        return Value(pair, first)
    origin = first.origin.moved
    note = note_of(pair.figures, origin, first.dtype, reads, first.iterations)
    return Value(pair, note)
