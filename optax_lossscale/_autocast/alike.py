"""Find islands that compute the same, so that JAX traces one function for all of them.

The layers of a model are often alike, and JAX takes long to trace the derivatives of
`jax.checkpoint`. In two layers the same values have different numbers, so an island's
values are numbered here by their place in the island.
"""

import itertools
from collections.abc import Callable, Hashable

from optax_lossscale._autocast.flat import Flat, TypedStep
from optax_lossscale._autocast.plan import Plan
from optax_lossscale._autocast.store import Region, made_by
from optax_lossscale._programs.alike import hashable, key_of, key_of_literal


def in_common(island: Region, plan: Plan) -> Hashable:
    """A key that is equal for islands that compute the same, by the same lines."""
    program = plan.program
    values = [*island.reads, *made_by(island.steps)]
    places = dict(zip(values, itertools.count(), strict=False))

    def place(i):
        """The place of a value in the island, or the key of a literal."""
        return places[i] if i in places else key_of_literal(program.literals[i])

    key = (
        plan.casting,
        tuple(_of_step(step, place, program) for step in island.steps),
        tuple((place(i), dtype) for i, dtype in island.stores.items()),
        frozenset(map(place, island.kept)),
    )
    return hashable(key, island)


def _of_step(
    step: TypedStep, place: Callable[[int], Hashable], program: Flat
) -> Hashable:
    """A key that is equal for steps that compute the same, by the same line."""
    eqn = step.eqn
    return (
        key_of(eqn),
        eqn.source_info.traceback,
        step.names,
        tuple(step.takes),
        tuple(step.gives),
        tuple(step.plans),
        tuple(map(place, step.ins)),
        tuple(program.types[i] for i in step.ins),
    )
