"""Loops and branches in Python, around programs that are run with float32 beside them.

Choices, of branches and of when to end, are those of the program.
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
    """A value of the program, and what was noted of it."""

    pair: Pair
    note: Note | None = None
    parts: Sequence[Note | None] = ()  # of a stack of the results of a loop

    def each(self, function: Callable[[Any], Any]) -> "Value":
        """A function of both numbers, noted as they are."""
        return self._replace(pair=jax.tree.map(function, self.pair))


RunsProgram = Callable[..., list[Value]]
"""Runs a program of an equation for some values; in a loop, it is given the round, too."""


def scan(
    piece: Piece,
    ins: Sequence[Value],
    run: RunsProgram,
    constant: Callable[[np.ndarray], Value],
    axis: int,
) -> list[Value]:
    """The results of a `scan`, whose rounds lie along an axis."""
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
    """The results of a `while`; of a batch, each element goes on until it has ended."""
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
    """The results of a `cond`, of which several devices may choose different branches."""
    index, *operands = ins
    chosen = np.clip(index.pair.low, 0, len(piece.programs) - 1)
    results: list[Value] = []
    for number in np.unique(chosen):
        here = np.asarray(chosen == number)
        outs = run(piece.programs[number], _filled(here, operands))
        before = results or outs  # of the branches that other devices chose
        results = [
            value._replace(note=worst([new.note, old.note]))
            for value, new, old in zip(
                _where(here, outs, before), outs, before, strict=True
            )
        ]
    return results


def _in_both(values: Sequence[Value]) -> list[Value]:
    """Values with an array for each float: those that a loop carries may differ later."""
    return [
        value._replace(pair=value.pair.both)
        if holds_floats(value.pair.low.dtype)
        else value
        for value in values
    ]


def _filled(which: np.ndarray, values: Sequence[Value]) -> list[Value]:
    """Values of some elements or devices; what is not of them has what their first one has.

    So a program can be run for all, and nothing is noted but of these.
    """
    if which.all():
        return list(values)
    first = np.unravel_index(which.argmax(), which.shape)
    return [value.each(lambda x: _chosen(which, x, x[first])) for value in values]


def _where(
    which: np.ndarray, new: Sequence[Value], old: Sequence[Value]
) -> list[Value]:
    """The new values of some elements of a batch or of some devices, the old ones of others."""
    if which.all():
        return list(new)
    return [
        x._replace(pair=_joined([x, y], lambda arrays: _chosen(which, *arrays)))
        for x, y in zip(new, old, strict=True)
    ]


def _chosen(which: np.ndarray, x: Any, y: Any) -> Any:
    """Of two arrays, the first where a flag along their first axes is set."""
    flags = np.expand_dims(which, tuple(range(which.ndim, np.ndim(x))))
    return _numpy(x).where(flags, x, y)


def _row(stack: Value, n: int, axis: int) -> Value:
    """The value of one round in a stack of them."""
    at = (slice(None),) * axis + (n,)
    row = stack.each(lambda x: _on_host(x)[at])
    return Value(row.pair, stack.parts[n] if stack.parts else stack.note)


def _stack(values: Sequence[Value], axis: int) -> Value:
    """The values of all rounds in one."""
    notes = [value.note for value in values]
    pair = _joined(values, lambda arrays: _numpy(arrays[0]).stack(arrays, axis))
    return Value(pair, worst(notes), notes)


def _joined(values: Sequence[Value], join: Callable[[Sequence[Any]], Any]) -> Pair:
    """The pairs of several values in one."""
    pairs = [value.pair for value in values]
    if any(pair.true is not None for pair in pairs):
        pairs = [pair.both for pair in pairs]
    return jax.tree.map(lambda *xs: join(xs), *pairs)


def _numpy(x: Any) -> Any:
    """The library for an array: JAX's own knows the keys of random numbers."""
    return np if isinstance(x.dtype, np.dtype) else jnp


def _on_host(x: Any) -> Any:
    """An array as NumPy's, which takes rows of it without compiling, if it has the dtype."""
    return np.asarray(x) if isinstance(x.dtype, np.dtype) else x
