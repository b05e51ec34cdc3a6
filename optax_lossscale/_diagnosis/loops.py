"""Loops and branches, run in Python iteration by iteration, with values in pairs.

So each iteration has notes of its own, which say where in a loop numbers go wrong. The
program's own values choose which branch is taken, and how long a loop goes on. The
reference follows them.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.program import Instruction
from optax_lossscale._diagnosis.value import Value, with_own_note
from optax_lossscale._programs.values import Array
from optax_lossscale._programs.walk import carried_by, first_inside

RunsProgram = Callable[..., list[Value]]
"""Runs a program.

It is called with the program, its arguments and, in a loop, the number of the iteration,
in a tuple.
"""


def scan(
    instruction: Instruction, ins: Sequence[Value], run: RunsProgram, axis: int
) -> list[Value]:
    """The results of a `scan`.

    Args:
      instruction: the `scan`.
      ins: its operands.
      run: runs its body.
      axis: the axis of arrays along which the iterations lie.
    """
    (body,) = instruction.programs
    eqn = instruction.eqn
    carried = carried_by(eqn)
    consts = ins[: carried.start]
    carry = ins[carried.start : carried.stop]
    length = eqn.params["length"]
    columns = [_rows(stack, length, axis) for stack in ins[carried.stop :]]
    iterations = range(length)
    rows_of_each = {}
    for n in reversed(iterations) if eqn.params["reverse"] else iterations:
        rows = [column[n] for column in columns]
        results = run(body, [*consts, *carry, *rows], (n,))
        carry = results[: len(carried)]
        rows_of_each[n] = results[len(carried) :]
    stacks = zip(*(rows_of_each[n] for n in iterations), strict=True)
    return [*carry, *(_stack(rows, axis) for rows in stacks)]


def while_loop(
    instruction: Instruction, ins: Sequence[Value], run: RunsProgram
) -> list[Value]:
    """The results of a `while`; in a batch, each example ends by its own condition."""
    condition, body = instruction.programs
    first = first_inside(instruction.eqn)
    start = carried_by(instruction.eqn).start
    of_condition = ins[:first]
    of_body = ins[first:start]
    carry = list(ins[start:])
    for n in itertools.count():
        (flags,) = run(condition, [*of_condition, *carry], (n,))
        goes_on = np.asarray(flags.pair.actual)
        if not goes_on.any():
            break
        results = run(body, [*of_body, *_filled(goes_on, carry)], (n,))
        carry = _where(goes_on, results, carry)
    return carry


def cond(
    instruction: Instruction, ins: Sequence[Value], run: RunsProgram
) -> list[Value]:
    """The results of a `cond`, in which several devices may take different branches."""
    branches = instruction.programs
    index, *operands = ins
    chosen = np.clip(index.pair.actual, 0, len(branches) - 1)
    results: list[Value] = []
    for number in np.unique(chosen):
        here = np.asarray(chosen == number)
        of_branch = run(branches[number], _filled(here, operands))
        results = _where(here, of_branch, results or of_branch)
    return results


# Where iterations or branches differ between examples, or between devices, a program runs
# for all of them. Those whose loop has ended, or that take another branch, do not
# *count*: they copy one that does, so that no note is about numbers that the program
# never computes.


def _filled(counts: np.ndarray, values: Sequence[Value]) -> list[Value]:
    """Values in which the examples or devices that do not count copy one that does."""
    if counts.all():
        return list(values)

    def filled(x):
        first = _on_host(x)[counts][0]
        return _chosen(counts, x, first)

    return [value.each(filled) for value in values]


def _where(
    counts: np.ndarray, new: Sequence[Value], old: Sequence[Value]
) -> list[Value]:
    """The new values for the examples or devices that count, and else the old ones."""
    if counts.all():
        return list(new)
    choose = functools.partial(_chosen, counts)
    joined = []
    for x, y in zip(new, old, strict=True):
        pair = jax.tree.map(choose, x.pair, y.pair)
        joined.append(with_own_note(pair, [x, y]))
    return joined


def _chosen(which: np.ndarray, x: Array, y: Array) -> jax.Array:
    """The numbers of `x` where a flag for leading axes is set, else those of `y`."""
    further_axes = tuple(range(which.ndim, np.ndim(x)))
    return jnp.where(np.expand_dims(which, further_axes), _on_host(x), _on_host(y))


# --- stacks of what each iteration reads or makes ---


def _rows(stack: Value, length: int, axis: int) -> list[Value]:
    """The rows of a stack, one for each iteration, with notes of their own."""
    whole = stack.each(_on_host).pair
    rows = []
    for n in range(length):
        at = (*[slice(None)] * axis, n)
        pair = jax.tree.map(operator.itemgetter(at), whole)
        if stack.parts:
            rows.append(Value(pair, stack.parts[n]))
        else:
            rows.append(with_own_note(pair, [stack]))
    return rows


def _stack(rows: Sequence[Value], axis: int) -> Value:
    """The values of all iterations in a stack, which keeps the note of each."""

    def stack(*arrays):
        numpy = jnp if _is_key(arrays[0]) else np
        return numpy.stack(arrays, axis)

    pairs = [row.pair for row in rows]
    stacked = with_own_note(jax.tree.map(stack, *pairs), rows)
    return stacked._replace(parts=[row.note for row in rows])


def _on_host(x: Array) -> Array:
    """An array in NumPy, however it is placed on devices, unless it holds random keys."""
    return x if _is_key(x) else np.asarray(x)


def _is_key(x: Array) -> bool:
    """Whether an array holds random keys, which NumPy does not know."""
    return not isinstance(x.dtype, np.dtype)
