"""Loops and branches on pairs, run by Python, one iteration after the other.

Which branch runs and when a loop ends is decided by the values as the program computes
them. Each function takes an equation and the programs in it, and returns a function
that runs it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from optax_lossscale._diagnosis.equation import Value
from optax_lossscale._diagnosis.table import Fault, Iterations
from optax_lossscale._programs.values import Array
from optax_lossscale._programs.walk import carry_positions, first_inner_operand

Function = Callable[[Sequence[Value], Iterations], Sequence[Value]]
"""A program or equation, from its operands in an iteration to its results."""

MOST_ITERATIONS = 1000
"""How many iterations of a `while` are compared; the others run as they are."""


def cond(eqn: JaxprEqn, branches: Sequence[Function]) -> Function:
    """Runs the branch that the program takes."""

    def run(operands, iterations):
        index, *operands = operands
        number = int(np.clip(index.low, 0, len(branches) - 1))
        return branches[number](operands, iterations)

    return run


def scan(eqn: JaxprEqn, programs: Sequence[Function]) -> Function:
    """Runs all iterations of a `scan`."""
    (body,) = programs
    carried = carry_positions(eqn)
    length = eqn.params["length"]
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)

    def run(operands, iterations):
        constants = operands[: carried.start]
        carry = operands[carried.start : carried.stop]
        stacks = [_slices(x) for x in operands[carried.stop :]]
        rows: list[Any] = [None] * length
        for n in order:
            arguments = [*constants, *carry, *(slices[n] for slices in stacks)]
            results = body(arguments, (*iterations, n))
            carry = results[: len(carried)]
            rows[n] = results[len(carried) :]
        return [*carry, *map(_stacked, zip(*rows, strict=True))]

    return run


def while_loop(
    eqn: JaxprEqn, programs: Sequence[Function], as_it_is: Function
) -> Function:
    """Runs a `while`: the first `MOST_ITERATIONS` on pairs, and the rest as it is."""
    condition, body = programs
    n_condition = first_inner_operand(eqn)
    n_constants = carry_positions(eqn).start

    def run(operands, iterations):
        carry = operands[n_constants:]
        for n in range(MOST_ITERATIONS):
            inside = (*iterations, n)
            (goes_on,) = condition([*operands[:n_condition], *carry], inside)
            if not goes_on.low:
                return carry
            carry = body([*operands[n_condition:n_constants], *carry], inside)
        return as_it_is([*operands[:n_constants], *carry], iterations)

    return run


def _slices(stack: Value) -> Sequence[Value]:
    """Returns the values that a loop reads one after the other."""
    if stack.slices:
        return stack.slices
    lows = _on_host(stack.low)
    trues = _on_host(stack.true)
    return [
        stack._replace(low=low, true=true)
        for low, true in zip(lows, trues, strict=True)
    ]


def _stacked(slices: Sequence[Value]) -> Value:
    """Stacks the values of all iterations, and keeps them."""
    faults = [x.fault for x in slices if x.fault]
    wrong = 0
    for fault in faults:
        wrong |= fault.wrong
    return Value(
        low=_stack([x.low for x in slices]),
        true=_stack([x.true for x in slices]),
        row=slices[-1].row,
        error=max(x.error for x in slices),
        fault=Fault(wrong, before=faults) if faults else None,
        is_scaled=any(x.is_scaled for x in slices),
        slices=slices,
    )


def _on_host(x: Array) -> Array:
    """Copies an array to the host, unless it holds random keys."""
    return np.asarray(x) if isinstance(x.dtype, np.dtype) else x


def _stack(arrays: Sequence[Array]) -> Array:
    xp = np if isinstance(arrays[0].dtype, np.dtype) else jnp
    return xp.stack(arrays)
