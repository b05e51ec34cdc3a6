"""The third pass: a program in regions, which are islands and what else runs alone.

An island is what is computed between products, from these, and cheaply enough to be
computed once more in the backward pass.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from optax_lossscale._autocast.cheap import is_cheap
from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.flat import Step

Dtypes = tuple[Any, ...]
"""In which a value can be read, beginning with the one that it is stored in."""

_NOTHING: Mapping[int, Any] = MappingProxyType({})


class Region(NamedTuple):
    """An island, or a part of one; or a step that runs alone, such as a product."""

    steps: tuple[Step, ...]
    is_island: bool
    # Once `store` has seen it, if it is an island:
    stores: Mapping[int, Dtypes] = _NOTHING  # what other regions read
    repeated: int = 0  # how many leading steps repeat what others computed before
    rounded: frozenset[int] = frozenset()  # to 16 bits, for those that read it here
    is_recomputed: bool = False  # in the backward pass
    kept: frozenset[int] = frozenset()  # for the backward pass, and not recomputed
    # Once it is planned:
    # from other regions, each value in its dtype, or None for as it is stored
    reads: Mapping[int, Any] = _NOTHING
    is_spread: bool = False  # whether it sends 16 bits, with the derivative of float32


def partition(facts: Facts) -> tuple[Region, ...]:
    """The regions of a program, none of which reads what a later one makes.

    A step is part of an island if it depends on a product, is cheap, and moves nothing
    in 16 bits: what is sent in them runs alone, as its operands and results are stored.
    """
    of_products = {i for i in facts.uses if facts.is_of_products(i)}
    regions: list[Region] = []
    island: list[Step] = []
    made: set[int] = set()  # in the island
    for step in facts.program.steps:
        is_of_products = not of_products.isdisjoint(step.reads)
        if is_of_products:
            of_products.update(step.outs)
        if is_of_products and is_cheap(step.eqn) and not facts.is_sent(step):
            island.append(step)
            made.update(step.outs)
            continue
        waits_for_island = not made.isdisjoint(step.reads)
        if waits_for_island:
            regions.append(Region(tuple(island), is_island=True))
            island = []
            made = set()
        regions.append(Region((step,), is_island=False))
    if island:
        regions.append(Region(tuple(island), is_island=True))
    return tuple(regions)
