"""Runs loops and branches in Python, one iteration after the other, on pairs.

Each iteration makes its own notes, so the notes show in which iteration values go
wrong. Which branch runs, and when a loop ends, depends on the values that the program
computes, not on their references.

The examples of a `while` under `vmap` may need different numbers of iterations, and so
may the devices of a `shard_map`, which may also take different branches. The body or
branch then runs on the whole array, but its results are kept only for the *active*
examples or devices: those whose loop continues, or that take this branch. If a loop
halves `x` while `x > 1`, an iteration for three examples is

    carry      [0.8, 5.0, 9.0]    the first example is inactive
    body of    [5.0, 5.0, 9.0]    a copy of an active example takes its place
    returns    [2.5, 2.5, 4.5]
    new carry  [0.8, 2.5, 4.5]    the results of active examples only

Without the copies, the body would run on the 0.8 as well. In another loop, this might
overflow, and a note would report an overflow that does not happen in the program.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.old_walk import carry_positions, first_inner_operand
from optax_lossscale._diagnosis.pairs import Pair
from optax_lossscale._diagnosis.program import Instruction
from optax_lossscale._diagnosis.value import Value, moved_value
from optax_lossscale._programs.values import Array

RunsProgram = Callable[..., list[Value]]
"""A function that runs a program on values: `run(program, values)`.

For iteration `n` of a loop, call `run(program, values, (n,))`, so that its notes
contain `n`.
"""


def scan(
    instruction: Instruction, operands: Sequence[Value], run: RunsProgram, axis: int
) -> list[Value]:
    """Runs a `scan`.

    Args:
      instruction: the `scan`.
      operands: its operands: the constants, the initial carry, and the arrays to scan.
      run: runs the body.
      axis: the axis of the arrays along which the iterations lie. Before it, there is
        one axis of devices for each `shard_map` around the loop.
    """
    (body,) = instruction.programs
    eqn = instruction.eqn
    carried = carry_positions(eqn)
    consts = operands[: carried.start]
    carry = operands[carried.start : carried.stop]
    stacks = operands[carried.stop :]
    length = eqn.params["length"]
    rows_of_stacks = [_unstack(stack, length, axis) for stack in stacks]
    iterations = range(length)
    if eqn.params["reverse"]:
        iterations = reversed(iterations)
    ys = {}  # by iteration, its results without the carry
    for n in iterations:
        xs = [rows[n] for rows in rows_of_stacks]
        results = run(body, [*consts, *carry, *xs], (n,))
        carry = results[: len(carried)]
        ys[n] = results[len(carried) :]
    in_order = [ys[n] for n in range(length)]
    stacked = [_stack(rows, axis) for rows in zip(*in_order, strict=True)]
    return [*carry, *stacked]


def while_loop(
    instruction: Instruction, operands: Sequence[Value], run: RunsProgram
) -> list[Value]:
    """Runs a `while` until its condition holds for no example and on no device."""
    condition, body = instruction.programs
    n_cond_consts = first_inner_operand(instruction.eqn)
    n_consts = carry_positions(instruction.eqn).start
    cond_consts = operands[:n_cond_consts]
    body_consts = operands[n_cond_consts:n_consts]
    carry = list(operands[n_consts:])
    for n in itertools.count():
        (continues,) = run(condition, [*cond_consts, *carry], (n,))
        active = np.asarray(continues.pair.actual)
        if not active.any():
            break
        active_carry = _with_inactive_filled(active, carry)
        results = run(body, [*body_consts, *active_carry], (n,))
        carry = _select(active, results, carry)
    return carry


def cond(
    instruction: Instruction, operands: Sequence[Value], run: RunsProgram
) -> list[Value]:
    """Runs the branch that the index of a `cond` selects.

    If the index differs between devices, each branch that a device selects runs.
    """
    branches = instruction.programs
    index, *branch_operands = operands
    chosen = np.clip(index.pair.actual, 0, len(branches) - 1)
    results: list[Value] = []
    for number in np.unique(chosen):
        active = np.asarray(chosen == number)
        active_operands = _with_inactive_filled(active, branch_operands)
        branch_results = run(branches[number], active_operands)
        # For the first branch, there are no earlier results for the inactive devices.
        results = _select(active, branch_results, results or branch_results)
    return results


def _with_inactive_filled(active: np.ndarray, values: Sequence[Value]) -> list[Value]:
    """Copies the first active example or device over the inactive ones."""
    if active.all():
        return list(values)

    def fill(x):
        first_active = _on_host(x)[active][0]
        return _where(active, x, first_active)

    return [value.map(fill) for value in values]


def _select(
    active: np.ndarray, new: Sequence[Value], old: Sequence[Value]
) -> list[Value]:
    """Takes new values for active examples or devices, and old ones for the others."""
    if active.all():
        return list(new)
    selected = []
    for sources in zip(new, old, strict=True):
        new_pair, old_pair = [source.pair for source in sources]
        actual = _where(active, new_pair.actual, old_pair.actual)
        reference = _where(active, new_pair.reference, old_pair.reference)
        selected.append(moved_value(Pair(actual, reference), sources))
    return selected


def _where(condition: np.ndarray, x: Array, y: Array) -> jax.Array:
    """Applies `jnp.where` to a condition that has only the first axes of the arrays."""
    trailing_axes = tuple(range(condition.ndim, np.ndim(x)))
    condition = np.expand_dims(condition, trailing_axes)
    return jnp.where(condition, _on_host(x), _on_host(y))


# --- The arrays that a scan slices and stacks ---


def _unstack(stack: Value, length: int, axis: int) -> list[Value]:
    """Slices a stack into a value for each iteration.

    If a loop made the stack, each row gets back the note that it had in that loop, so
    that errors in a backward pass can be followed back into the iteration of the
    forward pass that made them.
    """
    pair = jax.tree.map(_on_host, stack.pair)
    all_devices = [slice(None)] * axis
    rows = []
    for n in range(length):
        index = (*all_devices, n)
        row = Pair(pair.actual[index], pair.reference[index])
        if stack.row_notes:
            rows.append(Value(row, stack.row_notes[n]))
        else:
            rows.append(moved_value(row, [stack]))
    return rows


def _stack(rows: Sequence[Value], axis: int) -> Value:
    """Stacks the values of all iterations; keeps the note of each."""

    def stack_arrays(*arrays):
        xp = jnp if _is_key(arrays[0]) else np
        return xp.stack(arrays, axis)

    pairs = [row.pair for row in rows]
    pair = jax.tree.map(stack_arrays, *pairs)
    row_notes = [row.note for row in rows]
    return moved_value(pair, rows)._replace(row_notes=row_notes)


def _on_host(x: Array) -> Array:
    """Copies an array from its devices to NumPy, unless it holds random keys."""
    return x if _is_key(x) else np.asarray(x)


def _is_key(x: Array) -> bool:
    """Whether an array holds random keys, a dtype that NumPy does not have."""
    return not isinstance(x.dtype, np.dtype)
