"""The third pass: a program in regions, which are islands and what else runs alone.

An island is what is computed between products, from these, and cheaply enough to be
computed once more in the backward pass.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.flat import Step


class Region(NamedTuple):
    """An island, or a part of one; or a step that runs alone, such as a product."""

    steps: tuple[Step, ...]
    is_island: bool
    # Once `store` has seen it:
    reads: tuple[int, ...] = ()  # from other regions
    stores: Mapping[int, Any] = MappingProxyType({})  # for these, in which dtypes
    is_recomputed: bool = False  # in the backward pass
    kept: frozenset[int] = frozenset()  # for the backward pass, and not recomputed


def partition(facts: Facts, steps: Sequence[Step]) -> list[Region]:
    """The regions of a program's steps, none of which reads what a later one makes.

    A step is part of an island if it depends on a product, is cheap, and moves nothing
    in 16 bits: what is sent in them runs alone, as its operands and results are stored.
    """
    of_products = set(facts.of_products)
    regions: list[Region] = []
    island: list[Step] = []
    made: set[int] = set()  # in the island
    for step in steps:
        is_of_products = not of_products.isdisjoint(step.reads)
        if is_of_products:
            of_products.update(step.outs)
        if is_of_products and facts.is_fused(step):
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
    return regions
