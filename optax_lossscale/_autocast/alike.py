"""Which islands compute the same, so that one trace serves all of them.

The layers of a model are often alike, and derivatives of `jax.checkpoint` take long to
trace.
"""

from collections.abc import Callable, Hashable

import numpy as np

from optax_lossscale._autocast.flat import Flat, Step
from optax_lossscale._autocast.partition import Region
from optax_lossscale._autocast.plan import Plan
from optax_lossscale._autocast.store import made_by


def in_common(island: Region, plan: Plan) -> Hashable:
    """What islands that compute the same, made by the same lines, have in common."""
    program = plan.program
    places: dict[int, int] = {}
    for i in (*island.reads, *made_by(island.steps)):
        places[i] = len(places)

    def place(i):
        """The place of a value in the island, but of a literal what it is: 0.0 is not -0.0."""
        if i in places:
            return places[i]
        return np.asarray(program.literals[i].val).tobytes()

    key = (
        plan.casting,
        tuple(_of_step(step, place, program) for step in island.steps),
        tuple((place(i), dtype) for i, dtype in island.stores.items()),
        frozenset(map(place, island.kept)),
    )
    try:
        hash(key)
    except TypeError:  # of a parameter that is compared with no other
        return id(island)
    return key


def _of_step(step: Step, place: Callable[[int], Hashable], program: Flat) -> Hashable:
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
        tuple(map(id, step.plans)),
        tuple(map(place, step.ins)),
        tuple(program.types[i] for i in step.ins),
    )
