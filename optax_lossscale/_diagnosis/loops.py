"""Loops and branches in Python, around programs that are run with float32 beside them.

Choices, of branches and of when to end, are those of the program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.notes import Note
from optax_lossscale._diagnosis.steps import Step
from optax_lossscale._programs.versions import scan_sizes


@dataclasses.dataclass(slots=True)
class Value:
    """A value of the program, on the host, and what was noted of it."""

    pair: Any = None  # a `Pair`, once it is computed
    note: Note | None = None
    parts: Sequence[Note | None] = ()  # of a stack of the results of a loop

    def each(self, function: Callable[[Any], Any]) -> "Value":
        """A function of both numbers, noted as they are."""
        return Value(jax.tree.map(function, self.pair), self.note, self.parts)


RunsProgram = Callable[..., list[Value]]
"""Runs a program of a step for some values; in a loop, it is given the round, too."""

Worst = Callable[[Sequence[Note | None]], Note | None]
"""Chooses what is noted of several values in one."""


def scan(
    step: Step,
    ins: Sequence[Value],
    run: RunsProgram,
    worst: Worst,
    constant: Callable[[np.ndarray], Value],
    axis: int,
) -> list[Value]:
    """The results of a `scan`, whose rounds lie along an axis."""
    (body,) = step.programs
    params = step.eqn.params
    n_consts, n_carry = scan_sizes(step.eqn)
    consts = ins[:n_consts]
    carry = ins[n_consts:][:n_carry]
    stacks = ins[n_consts + n_carry :]
    turns = range(params["length"])
    if not turns:
        stacked = [v.aval for v in step.eqn.outvars[n_carry:]]
        empty = [constant(np.zeros(x.shape, x.dtype)) for x in stacked]
        return [*carry, *empty]
    results: dict[int, list[Value]] = {}
    for n in reversed(turns) if params["reverse"] else turns:
        xs = [_row(stack, n, axis) for stack in stacks]
        outs = run(body, [*consts, *_in_both(carry), *xs], n)
        carry = outs[:n_carry]
        results[n] = outs[n_carry:]
    in_order = [results[n] for n in turns]
    stacked = [_stack(rounds, worst, axis) for rounds in zip(*in_order, strict=True)]
    return [*carry, *stacked]


def while_loop(step: Step, ins: Sequence[Value], run: RunsProgram) -> list[Value]:
    """The results of a `while`; of a batch, each element goes on until it has ended."""
    condition, body = step.programs
    n_condition = step.eqn.params["cond_nconsts"]
    n_body = step.eqn.params["body_nconsts"]
    of_condition = ins[:n_condition]
    of_body = ins[n_condition:][:n_body]
    carry = _in_both(ins[n_condition + n_body :])
    entering: list[Value] = []
    n = 0
    while True:
        (flags,) = run(condition, [*of_condition, *carry], n)
        goes_on = np.asarray(flags.pair.low)
        if not goes_on.any():
            return carry
        # What has ended runs its last round again, of which all is noted already; and
        # what never began runs another's first.
        entering = _where(goes_on, carry, entering or _filled(goes_on, carry))
        results = run(body, [*of_body, *entering], n)
        carry = _in_both(_where(goes_on, results, carry))
        n += 1


def cond(
    step: Step, ins: Sequence[Value], run: RunsProgram, worst: Worst
) -> list[Value]:
    """The results of a `cond`, of which several devices may choose different branches."""
    index, *operands = ins
    chosen = np.clip(index.pair.low, 0, len(step.programs) - 1)
    results: list[Value] = []
    for number in np.unique(chosen):
        here = np.asarray(chosen == number)
        # Devices that choose another branch run this one for what the first has.
        outs = run(step.programs[number], _filled(here, operands))
        before = results or outs  # of the branches that other devices chose
        results = _where(here, outs, before)
        for value, new, old in zip(results, outs, before, strict=True):
            value.note = worst([new.note, old.note])
    return results


def _in_both(values: Sequence[Value]) -> list[Value]:
    """Values with an array for each number: those that a loop carries may differ later."""
    return [dataclasses.replace(x, pair=x.pair.both) for x in values]


def _filled(which: np.ndarray, values: Sequence[Value]) -> list[Value]:
    """Values of some elements or devices, with what the first of them has for all others."""
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

    def choose(arrays):
        return _chosen(which, *arrays)

    values = []
    for x, y in zip(new, old, strict=True):
        pair = _joined([x, y], choose)
        values.append(Value(pair, x.note, x.parts))
    return values


def _chosen(which: np.ndarray, x: Any, y: Any) -> Any:
    """Of two arrays, the first where a flag along their first axes is set."""
    flags = np.expand_dims(which, tuple(range(which.ndim, np.ndim(x))))
    return _numpy(x).where(flags, x, y)


def _row(stack: Value, n: int, axis: int) -> Value:
    """The value of one round in a stack of them."""
    at = (slice(None),) * axis + (n,)
    row = stack.each(lambda x: x[at])
    return Value(row.pair, stack.parts[n] if stack.parts else stack.note)


def _stack(values: Sequence[Value], worst: Worst, axis: int) -> Value:
    """The values of all rounds in one."""

    def stack(arrays):
        return _numpy(arrays[0]).stack(arrays, axis)

    notes = [x.note for x in values]
    return Value(_joined(values, stack), worst(notes), notes)


def _joined(values: Sequence[Value], join: Callable[[Sequence[Any]], Any]) -> Any:
    """The pairs of several values in one."""
    pairs = [x.pair for x in values]
    if any(pair.true is not None for pair in pairs):
        pairs = [pair.both for pair in pairs]
    return jax.tree.map(lambda *xs: join(xs), *pairs)


def _numpy(x: Any) -> Any:
    """The library for an array: JAX's own knows the keys of random numbers."""
    return np if isinstance(x.dtype, np.dtype) else jnp
