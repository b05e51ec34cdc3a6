"""A value of the program: its numbers in a pair, and the note about them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from optax_lossscale._diagnosis.notes import Note, note_of
from optax_lossscale._diagnosis.pairs import Pair
from optax_lossscale._programs.values import Array, is_inexact


class Value(NamedTuple):
    """A value of the program with its note, which a constant does not have."""

    pair: Pair
    note: Note | None = None
    parts: Sequence[Note | None] = ()  # of each iteration, if a loop stacked them

    def each(self, function: Callable[[Any], Array]) -> "Value":
        """Applies a function to both arrays of the pair, and keeps the note, not `parts`."""
        return Value(jax.tree.map(function, self.pair), self.note)


def notes_of(values: Iterable[Value]) -> list[Note]:
    """The notes of those values that have one."""
    return [value.note for value in values if value.note is not None]


def with_own_note(pair: Pair, others: Iterable[Value]) -> Value:
    """A value moved from others, as in a stack, with a note of its own that reads theirs."""
    reads = notes_of(others)
    if not reads:
        return Value(pair)
    first = reads[0]
    if not is_inexact(pair.actual):
        return Value(pair, first)
    origin = first.origin.moved
    return Value(pair, note_of(pair.figures, origin, first.dtype, reads, first.rounds))
