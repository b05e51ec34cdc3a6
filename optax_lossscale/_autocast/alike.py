"""Which islands compute the same, so that one trace serves all of them.

The layers of a model are often alike, and derivatives of `jax.checkpoint` take long to
trace.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np

from optax_lossscale._autocast.flat import Flat, Step
from optax_lossscale._autocast.partition import Region
from optax_lossscale._autocast.store import made_by


def common(island: Region, program: Flat) -> Hashable | None:
    """What islands that compute the same, made by the same lines, have in common.

    It is None for an island that shares its trace with no other.
    """
    if any(step.plans for step in island.steps):
        return None
    # Values by their places in the island, but literals by what they are
    places: dict[int, Hashable] = {}
    for place, i in enumerate([*island.reads, *made_by(island.steps)]):
        places[i] = place
    read = {i for step in island.steps for i in step.ins}
    for i in read.intersection(program.literals):
        places[i] = _literal(program.literals[i])
    steps = tuple(_step(step, places, program) for step in island.steps)
    stores = tuple((places[i], island.stores[i]) for i in sorted(island.stores))
    kept = frozenset(places[i] for i in island.kept)
    key = (steps, stores, kept)
    try:
        hash(key)
    except TypeError:  # of a parameter that is compared with no other
        return None
    return key


def _step(step: Step, places: dict[int, Hashable], program: Flat) -> Hashable:
    """What a step computes of what, in which types, and what made it."""
    eqn = step.eqn
    return (
        eqn.primitive,
        tuple(sorted(eqn.params.items())),  # by their names, of which no two are equal
        eqn.ctx,
        eqn.source_info.traceback,
        step.names,
        tuple(step.takes),
        tuple(step.gives),
        tuple(places[i] for i in step.ins),
        tuple(program.types[i] for i in step.ins),
        tuple(program.types[i] for i in step.outs),
    )


def _literal(literal: Any) -> Hashable:
    """A literal, of which 0 is not the same as -0."""
    digits = np.asarray(literal.val).tobytes()
    return literal.aval, type(literal.val), digits
