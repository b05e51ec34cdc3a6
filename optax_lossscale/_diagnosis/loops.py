"""Loops and branches, run in Python round by round, with values in pairs.

So each round has notes of its own, which say in which round numbers go wrong. Which
branch is taken, and how long a loop goes on, is chosen by the program's values, not by
float32's.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.notes import Note, note_of
from optax_lossscale._diagnosis.pairs import Pair
from optax_lossscale._diagnosis.program import Instruction
from optax_lossscale._programs.values import Array, is_float
from optax_lossscale._programs.walk import arguments_of, carried_by


class Value(NamedTuple):
    """A value of the program with its note, which a constant does not have."""

    pair: Pair
    note: Note | None = None
    parts: Sequence[Note | None] = ()  # the note of each round, if a loop stacked them

    def each(self, function: Callable[[Any], Array]) -> "Value":
        """Applies a function to both arrays of the pair; the note of the whole stays."""
        return Value(jax.tree.map(function, self.pair), self.note)


def notes_of(values: Iterable[Value]) -> list[Note]:
    """The notes of those values that have one."""
    return [value.note for value in values if value.note is not None]


def noted_alone(pair: Pair, others: Iterable[Value]) -> Value:
    """A value whose numbers were moved from others, with a note about it alone."""
    reads = notes_of(others)
    if not reads:
        return Value(pair)
    first = reads[0]
    if not is_float(pair.low):
        return Value(pair, first)
    with np.errstate(over="ignore"):
        figures = pair.compared().figures
    return Value(
        pair, note_of(figures, first.place.moved, first.dtype, reads, first.rounds)
    )


RunsProgram = Callable[..., list[Value]]
"""Called with a program, its arguments and, in a loop, the number of the round."""


def scan(
    instruction: Instruction, ins: Sequence[Value], run: RunsProgram, axis: int
) -> list[Value]:
    """The results of a `scan`.

    Args:
      instruction: the `scan`.
      ins: its operands.
      run: runs its body.
      axis: the axis of arrays along which the rounds lie.
    """
    (body,) = instruction.programs
    carried = carried_by(instruction.eqn)
    consts = ins[: carried.start]
    carry = ins[carried.start : carried.stop]
    turns = range(instruction.eqn.params["length"])
    order = -1 if instruction.eqn.params["reverse"] else 1
    columns = [_rows(stack, len(turns), axis) for stack in ins[carried.stop :]]
    results = []
    for n in turns[::order]:
        outs = run(body, [*consts, *carry, *(column[n] for column in columns)], n)
        carry = outs[: len(carried)]
        results.append(outs[len(carried) :])
    stacked = zip(*results[::order], strict=True)
    return [*carry, *(_stack(column, axis) for column in stacked)]


def while_loop(
    instruction: Instruction, ins: Sequence[Value], run: RunsProgram
) -> list[Value]:
    """The results of a `while`; in a batch, each example ends by its own condition."""
    condition, body = instruction.programs
    (_, of_condition), (_, of_body) = arguments_of(instruction.eqn)
    start = carried_by(instruction.eqn).start
    consts = ins[:start]
    carry = ins[start:]
    for n in itertools.count():
        every = [*consts, *carry]
        (flags,) = run(condition, [every[i] for i in of_condition], n)
        goes_on = np.asarray(flags.pair.low)
        if not goes_on.any():
            break
        every = [*consts, *_filled(goes_on, carry)]
        results = run(body, [every[i] for i in of_body], n)
        carry = _where(goes_on, results, carry)
    return list(carry)


def cond(
    instruction: Instruction, ins: Sequence[Value], run: RunsProgram
) -> list[Value]:
    """The results of a `cond`, in which several devices may take different branches."""
    branches = instruction.programs
    index, *operands = ins
    chosen = np.clip(index.pair.low, 0, len(branches) - 1)
    results: list[Value] = []
    for number in np.unique(chosen):
        here = np.asarray(chosen == number)
        outs = run(branches[number], _filled(here, operands))
        results = _where(here, outs, results or outs)
    return results


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
    joined = []
    for x, y in zip(new, old, strict=True):
        pair = jax.tree.map(functools.partial(_chosen, which), x.pair, y.pair)
        joined.append(noted_alone(pair, [x, y]))
    return joined


def _chosen(which: np.ndarray, x: Array, y: Array) -> jax.Array:
    """The numbers of `x` where a flag for leading axes is set, else those of `y`."""
    flags = np.expand_dims(which, tuple(range(which.ndim, np.ndim(x))))
    return jnp.where(flags, x, y)


def _rows(stack: Value, length: int, axis: int) -> Sequence[Value]:
    """The row of each round in a stack, with a note of its own."""
    whole = stack.each(lambda x: x if _is_key(x) else np.asarray(x)).pair
    at = (slice(None),) * axis
    pairs = [jax.tree.map(lambda x, n=n: x[*at, n], whole) for n in range(length)]
    if stack.parts:
        return list(map(Value, pairs, stack.parts))
    return [noted_alone(pair, [stack]) for pair in pairs]


def _stack(rows: Sequence[Value], axis: int) -> Value:
    """Stacks the values of all rounds, and keeps the note of each."""

    def stack(*arrays):
        numpy = jnp if _is_key(arrays[0]) else np
        return numpy.stack(arrays, axis)

    pair = jax.tree.map(stack, *(row.pair for row in rows))
    return noted_alone(pair, rows)._replace(parts=[row.note for row in rows])


def _is_key(x: Array) -> bool:
    """Whether an array holds random keys, which NumPy does not know."""
    return not isinstance(x.dtype, np.dtype)
