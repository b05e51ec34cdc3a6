"""Keys of islands, by which JAX traces one function for all islands that are alike.

The layers of a model are often alike, and JAX takes long to trace the derivatives of
`jax.checkpoint`. Each layer has variables of its own, so a key has the positions of
values in their island instead.
"""

from collections.abc import Hashable

from jax.extend.core import Literal

from optax_lossscale._autocast.facts import Casting
from optax_lossscale._autocast.region import Region
from optax_lossscale._programs.keys import hashable_or_id, key_of, key_of_literal


def key_of_island(island: Region, casting: Casting) -> Hashable:
    """A key that is equal for islands that compute the same, made by the same lines."""
    made = [v for step in island.steps for v in step.eqn.outvars]
    positions = {v: n for n, v in enumerate([*island.reads, *made])}

    def key_of_value(v):
        return key_of_literal(v) if isinstance(v, Literal) else positions[v]

    def key_of_step(step):
        eqn = step.eqn
        return (
            key_of(eqn),
            eqn.source_info.traceback,
            eqn.source_info.name_stack,
            tuple(step.takes),
            tuple(map(key_of_value, eqn.invars)),
            tuple(v.aval for v in eqn.invars),
        )

    key = (
        casting,
        tuple(map(key_of_step, island.steps)),
        tuple((positions[v], dtype) for v, dtype in island.stores.items()),
        frozenset(map(positions.__getitem__, island.kept_reductions)),
    )
    return hashable_or_id(key, island)
