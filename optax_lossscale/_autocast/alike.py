"""Which islands compute the same, so that one trace serves all of them.

The layers of a model are often alike, and derivatives of `jax.checkpoint` take long to
trace.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np

from optax_lossscale._autocast.flat import Flat, Instruction
from optax_lossscale._autocast.plan import Part


def common(part: Part, program: Flat) -> Hashable | None:
    """What islands that compute the same, made by the same lines, have in common.

    It is None for an island that shares its trace with no other.
    """
    made = [i for step in part.steps for i in step.outs]
    places = {i: place for place, i in enumerate((*part.reads, *made))}

    def operand(i: int) -> Hashable:
        literal = program.literals.get(i)
        return places[i] if literal is None else _literal(literal)

    steps = tuple(
        (*_instruction(step), tuple(map(operand, step.ins)), _types(step, program))
        for step in part.steps
    )
    writes = tuple((places[i], part.writes[i]) for i in sorted(part.writes))
    key = (steps, writes, frozenset(places[i] for i in part.saved))
    holds_plans = any(step.plans for step in part.steps)
    return None if holds_plans or not _is_hashable(key) else key


def _instruction(step: Instruction) -> tuple[Any, ...]:
    """What an instruction computes, and what made it."""
    eqn = step.eqn
    # Sorted by their names, of which no two are equal.
    params = tuple(sorted(eqn.params.items()))
    made_by = (eqn.source_info.traceback, step.names)
    return eqn.primitive, params, eqn.ctx, made_by, tuple(step.takes), tuple(step.gives)


def _types(step: Instruction, program: Flat) -> tuple[Any, ...]:
    """The types of an instruction's operands and results."""
    return tuple(program.types[i] for i in (*step.ins, *step.outs))


def _literal(literal: Any) -> tuple[Any, ...]:
    """A literal, of which 0 is not the same as -0."""
    return literal.aval, type(literal.val), np.asarray(literal.val).tobytes()


def _is_hashable(key: Any) -> bool:
    """Whether everything in a tuple can be told apart by its hash."""
    try:
        hash(key)
    except TypeError:
        return False
    return True
