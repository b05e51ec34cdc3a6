"""Finds islands that are alike, so that JAX traces one function for all of them.

The layers of a model often contain the same island, and JAX is slow to trace the
derivatives of `jax.checkpoint`. Islands that are alike therefore get the same cache
key, and `run` makes one function for each key. Because the variables differ from layer
to layer, a key refers to a value by its position in the island. If an island reads `h`
and computes `exp(h) * 2`, its key records that `exp` reads value 0 and that `mul` reads
value 1 and the literal.
"""

from collections.abc import Hashable

from jax.extend.core import Literal

from optax_lossscale._autocast.facts import Casting
from optax_lossscale._autocast.region import Region
from optax_lossscale._programs.keys import hashable_or_id, key_of, key_of_literal


def key_of_island(island: Region, casting: Casting) -> Hashable:
    """Returns a key that is equal for islands that are alike.

    Islands are alike if they do the same computation on the same lines of source code.
    The lines count because profiles and errors show them.
    """
    computed = [v for planned in island.equations for v in planned.eqn.outvars]
    values = [*island.reads, *computed]
    positions = {v: n for n, v in enumerate(values)}

    def key_of_value(v):
        if isinstance(v, Literal):
            return key_of_literal(v)
        return positions[v]

    def key_of_equation(planned):
        eqn = planned.eqn
        return (
            key_of(eqn),
            eqn.source_info.traceback,
            eqn.source_info.name_stack,
            tuple(planned.operand_dtypes),
            tuple(map(key_of_value, eqn.invars)),
            tuple(v.aval for v in eqn.invars),
        )

    key = (
        casting,
        tuple(map(key_of_equation, island.equations)),
        tuple(positions[v] for v in island.stores),
        tuple(island.stores.values()),
        frozenset(positions[v] for v in island.kept_reductions),
    )
    return hashable_or_id(key, island)
