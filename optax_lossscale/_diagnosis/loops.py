"""Loops and branches, run in Python round by round, with values in pairs.

So each round has notes of its own, which say in which round numbers go wrong. Which
branch is taken, and how long a loop goes on, is chosen by the program's values, not by
float32's.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.notes import Note, worst
from optax_lossscale._diagnosis.pairs import Pair, holds_floats
from optax_lossscale._diagnosis.pieces import Piece
from optax_lossscale._programs.versions import scan_sizes


class Value(NamedTuple):
    """A value of the program with its note, which a constant does not have."""

    pair: Pair
    note: Note | None = None
    parts: Sequence[Note | None] = ()  # the note of each row, if a loop stacked them

    def each(self, function: Callable[[Any], Any]) -> "Value":
        """Applies a function to both arrays of the pair; the note stays."""
        return self._replace(pair=jax.tree.map(function, self.pair))


RunsProgram = Callable[..., list[Value]]
"""Called with a program, its arguments and, in a loop, the number of the round."""


def scan(
    piece: Piece,
    ins: Sequence[Value],
    run: RunsProgram,
    constant: Callable[[np.ndarray], Value],
    axis: int,
) -> list[Value]:
    """The results of a `scan`.

    Args:
      piece: the piece of the `scan`.
      ins: its operands.
      run: runs its body.
      constant: makes a value of an array.
      axis: the axis of arrays along which the rounds lie.
    """
    (eqn,) = piece.eqns
    (body,) = piece.programs
    n_consts, n_carry = scan_sizes(eqn)
    consts = ins[:n_consts]
    carry = ins[n_consts:][:n_carry]
    stacks = ins[n_consts + n_carry :]
    turns = range(eqn.params["length"])
    if not turns:
        empty = [np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        return [*carry, *map(constant, empty[n_carry:])]
    in_order = turns[::-1] if eqn.params["reverse"] else turns
    results = {}
    for n in in_order:
        rows = [_row(stack, n, axis) for stack in stacks]
        outs = run(body, [*consts, *_in_both(carry), *rows], n)
        carry = outs[:n_carry]
        results[n] = outs[n_carry:]
    columns = zip(*(results[n] for n in turns), strict=True)
    return [*carry, *(_stack(column, axis) for column in columns)]


def while_loop(piece: Piece, ins: Sequence[Value], run: RunsProgram) -> list[Value]:
    """The results of a `while`; in a batch, each example ends by its own condition."""
    (eqn,) = piece.eqns
    condition, body = piece.programs
    n_condition = eqn.params["cond_nconsts"]
    n_consts = n_condition + eqn.params["body_nconsts"]
    carry = _in_both(ins[n_consts:])
    n = 0
    while True:
        (flags,) = run(condition, [*ins[:n_condition], *carry], n)
        goes_on = np.asarray(flags.pair.low)
        if not goes_on.any():
            return carry
        going = _filled(goes_on, carry)
        results = run(body, [*ins[n_condition:n_consts], *going], n)
        carry = _in_both(_where(goes_on, results, carry))
        n += 1


def cond(piece: Piece, ins: Sequence[Value], run: RunsProgram) -> list[Value]:
    """The results of a `cond`, in which several devices may take different branches."""
    index, *operands = ins
    chosen = np.clip(index.pair.low, 0, len(piece.programs) - 1)
    results: list[Value] = []
    for number in np.unique(chosen):
        here = np.asarray(chosen == number)
        outs = run(piece.programs[number], _filled(here, operands))
        before = results or outs  # from the branches of other devices
        results = [
            value._replace(note=worst([new.note, old.note]))
            for value, new, old in zip(
                _where(here, outs, before), outs, before, strict=True
            )
        ]
    return results


def _in_both(values: Sequence[Value]) -> list[Value]:
    """Values whose pairs have two arrays, if they are floats.

    What a loop carries may be the same in float32 at first, and differ in later rounds.
    """
    return [
        value._replace(pair=value.pair.both)
        if holds_floats(value.pair.low.dtype)
        else value
        for value in values
    ]


def _filled(which: np.ndarray, values: Sequence[Value]) -> list[Value]:
    """Values in which only some examples or devices count; the others copy the first.

    So a program can run for all of them, and its notes are about those that count.
    """
    if which.all():
        return list(values)
    first = np.unravel_index(which.argmax(), which.shape)
    return [value.each(lambda x: _chosen(which, x, x[first])) for value in values]


def _where(
    which: np.ndarray, new: Sequence[Value], old: Sequence[Value]
) -> list[Value]:
    """The new values for some examples or devices, and the old ones for the others."""
    if which.all():
        return list(new)
    return [
        x._replace(pair=_joined([x, y], lambda arrays: _chosen(which, *arrays)))
        for x, y in zip(new, old, strict=True)
    ]


def _chosen(which: np.ndarray, x: Any, y: Any) -> Any:
    """The numbers of `x` where a flag for leading axes is set, else those of `y`."""
    flags = np.expand_dims(which, tuple(range(which.ndim, np.ndim(x))))
    return _numpy(x).where(flags, x, y)


def _row(stack: Value, n: int, axis: int) -> Value:
    """The row of one round in a stack, with a note of its own if there is one."""
    at = (slice(None),) * axis + (n,)
    row = stack.each(lambda x: _on_host(x)[at])
    return Value(row.pair, stack.parts[n] if stack.parts else stack.note)


def _stack(values: Sequence[Value], axis: int) -> Value:
    """Stacks the values of all rounds, and keeps the note of each."""
    notes = [value.note for value in values]
    pair = _joined(values, lambda arrays: _numpy(arrays[0]).stack(arrays, axis))
    return Value(pair, worst(notes), notes)


def _joined(values: Sequence[Value], join: Callable[[Sequence[Any]], Any]) -> Pair:
    """Joins the pairs of several values by a function of their arrays."""
    pairs = [value.pair for value in values]
    if any(pair.true is not None for pair in pairs):
        pairs = [pair.both for pair in pairs]
    return jax.tree.map(lambda *xs: join(xs), *pairs)


def _numpy(x: Any) -> Any:
    """NumPy for the dtypes that it knows, else `jax.numpy`, as for random keys."""
    return np if isinstance(x.dtype, np.dtype) else jnp


def _on_host(x: Any) -> Any:
    """A NumPy array, whose rows need no compilation; a random key as it is."""
    return np.asarray(x) if isinstance(x.dtype, np.dtype) else x
