"""Loops and branches, run in Python round by round, with values in pairs.

So each round has notes of its own, which say in which round numbers go wrong. Which
branch is taken, and how long a loop goes on, is chosen by the program's values, not by
float32's.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.notes import Note, measured, note_of, worst
from optax_lossscale._diagnosis.pairs import Pair
from optax_lossscale._programs.values import is_float
from optax_lossscale._programs.walk import arguments_of, carried_by, programs_in


class Value(NamedTuple):
    """A value of the program with its note, which a constant does not have."""

    pair: Pair
    note: Note | None = None
    parts: Sequence[Note | None] = ()  # the note of each row, if a loop stacked them

    def each(self, function: Callable[[Any], Any]) -> "Value":
        """Applies a function to both arrays of the pair; the note stays."""
        return self._replace(pair=jax.tree.map(function, self.pair))


def noted_alone(value: Value) -> Value:
    """The value with a note about it alone, not that of a stack of which it is a row."""
    note = value.note
    if note is None or _is_key(value.pair.low):
        return value
    figures = measured(value.pair.low, value.pair.true)
    alone = note_of(figures, note.place, note.dtype, (note,), note.rounds)
    return Value(value.pair, alone)


RunsProgram = Callable[..., list[Value]]
"""Called with a program, its arguments and, in a loop, the number of the round."""


def scan(eqn: Any, ins: Sequence[Value], run: RunsProgram, axis: int) -> list[Value]:
    """The results of a `scan`.

    Args:
      eqn: the `scan`.
      ins: its operands.
      run: runs its body.
      axis: the axis of arrays along which the rounds lie.
    """
    (body,) = programs_in(eqn)
    carried = carried_by(eqn)
    consts = ins[: carried.start]
    carry = ins[carried.start : carried.stop]
    stacks = ins[carried.stop :]
    turns = range(eqn.params["length"])
    step = -1 if eqn.params["reverse"] else 1
    results = []
    for n in turns[::step]:
        rows = [_row(stack, n, axis) for stack in stacks]
        outs = run(body, [*consts, *_in_both(carry), *rows], n)
        carry = outs[: len(carried)]
        results.append(outs[len(carried) :])
    columns = zip(*results[::step], strict=True)
    return [*carry, *(_stack(column, axis) for column in columns)]


def while_loop(eqn: Any, ins: Sequence[Value], run: RunsProgram) -> list[Value]:
    """The results of a `while`; in a batch, each example ends by its own condition."""
    (condition, of_condition), (body, of_body) = arguments_of(eqn)
    start = carried_by(eqn).start
    consts = ins[:start]
    carry = _in_both(ins[start:])
    for n in itertools.count():
        every = [*consts, *carry]
        (flags,) = run(condition, [every[i] for i in of_condition], n)
        goes_on = np.asarray(flags.pair.low)
        if not goes_on.any():
            break
        every = [*consts, *_filled(goes_on, carry)]
        results = run(body, [every[i] for i in of_body], n)
        carry = _in_both(_where(goes_on, results, carry))
    return carry


def cond(eqn: Any, ins: Sequence[Value], run: RunsProgram) -> list[Value]:
    """The results of a `cond`, in which several devices may take different branches."""
    branches = programs_in(eqn)
    index, *operands = ins
    chosen = np.clip(index.pair.low, 0, len(branches) - 1)
    results: list[Value] = []
    for number in np.unique(chosen):
        here = np.asarray(chosen == number)
        outs = run(branches[number], _filled(here, operands))
        results = _where(here, outs, results or outs)
    return results


def _in_both(values: Sequence[Value]) -> list[Value]:
    """Values whose pairs have two arrays, if they are floats.

    What a loop carries may be the same in float32 at first, and differ in later rounds.
    So all rounds are compiled alike.
    """
    return [
        value._replace(pair=value.pair.both) if is_float(value.pair.low) else value
        for value in values
    ]


# A program whose rounds or branches differ between examples, or between devices, runs
# for all of them, and only those that count are noted.


def _filled(which: np.ndarray, values: Sequence[Value]) -> list[Value]:
    """Values in which the examples or devices that do not count copy the first."""
    if which.all():
        return list(values)
    return [value.each(lambda x: _chosen(which, x, x[which][0])) for value in values]


def _where(
    which: np.ndarray, new: Sequence[Value], old: Sequence[Value]
) -> list[Value]:
    """The new values for the examples or devices that count, and else the old ones."""
    if which.all():
        return list(new)
    choose = functools.partial(_chosen, which)
    return [_joined(choose, pair) for pair in zip(new, old, strict=True)]


def _chosen(which: np.ndarray, x: Any, y: Any) -> jax.Array:
    """The numbers of `x` where a flag for leading axes is set, else those of `y`."""
    flags = np.expand_dims(which, tuple(range(which.ndim, np.ndim(x))))
    return jnp.where(flags, x, y)


def _row(stack: Value, n: int, axis: int) -> Value:
    """The row of one round in a stack, with a note of its own."""
    at = (slice(None),) * axis + (n,)
    row = stack.each(lambda x: x[at] if _is_key(x) else np.asarray(x)[at])
    return Value(row.pair, stack.parts[n]) if stack.parts else noted_alone(row)


def _stack(rows: Sequence[Value], axis: int) -> Value:
    """Stacks the values of all rounds, and keeps the note of each."""

    def stack(*arrays):
        numpy = jnp if _is_key(arrays[0]) else np
        return numpy.stack(arrays, axis)

    return _joined(stack, rows)._replace(parts=[row.note for row in rows])


def _joined(join: Callable[..., Any], values: Sequence[Value]) -> Value:
    """Joins several values by a function of their arrays; the worst note stays."""
    pairs = [value.pair for value in values]
    if any(pair.true is not None for pair in pairs):
        pairs = [pair.both for pair in pairs]
    pair = jax.tree.map(join, *pairs)
    return Value(pair, worst(value.note for value in values))


def _is_key(x: Any) -> bool:
    """Whether an array holds random keys, which NumPy does not know."""
    return not isinstance(x.dtype, np.dtype)
