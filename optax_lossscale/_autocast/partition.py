"""The third pass: a program in regions, which are islands and single steps.

An island has the steps that depend on products and are cheap enough to be recomputed in
the backward pass. It grows with each of them, until a step that cannot be in it, such
as the next product, reads one of its results. In `exp(tanh(x @ a)) @ b` the regions are
the first product, an island with `tanh` and `exp`, and the second product.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.flat import Step


class Region(NamedTuple):
    """An island or a part of one, or a step that runs by itself, such as a product."""

    steps: tuple[Step, ...]
    is_island: bool
    # The pass `store` fills in these four.
    reads: tuple[int, ...] = ()  # the values from outside, literals left out
    stores: Mapping[int, Any] = MappingProxyType({})  # the values for outside: dtypes
    is_recomputed: bool = False  # whether the backward pass recomputes its steps
    kept: frozenset[int] = frozenset()  # the results that it keeps nevertheless


def partition(facts: Facts, steps: Sequence[Step]) -> list[Region]:
    """The regions of a program, in an order in which each reads from earlier ones only.

    A step is in an island if it depends on a product, is cheap and sends nothing. One
    that sends runs by itself, as its operands and results are stored. A step that is in
    no island, and reads nothing of the one that is growing, comes before that one.
    """
    of_products = set(facts.of_products)
    regions: list[Region] = []
    island: list[Step] = []
    made: set[int] = set()  # the results of the island's steps
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
