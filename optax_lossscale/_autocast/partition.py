"""The third pass: the steps of a program in islands, and others between them.

An island has the steps that depend on products and are cheap enough to be recomputed in
the backward pass. It grows with each of them, until a step that cannot be in it, such
as the next product, reads one of its results. In `exp(tanh(x @ a)) @ b` this is the
first product, an island with `tanh` and `exp`, and the second product.
"""

from collections.abc import Sequence

from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.flat import TypedStep

Island = list[TypedStep]


def partition(facts: Facts, steps: Sequence[TypedStep]) -> list[Island | TypedStep]:
    """The islands of a program, and the steps that run by themselves, in order.

    Each reads the results of earlier ones only. A step is in an island if it depends on
    a product, is cheap and sends nothing. One that sends runs by itself, as its
    operands and results are stored. A step that is in no island, and reads nothing of
    the one that is growing, comes before that one.
    """
    of_products = set(facts.of_products)
    parts: list[Island | TypedStep] = []
    island: Island = []
    made: set[int] = set()  # the results of the island's steps
    for step in steps:
        is_of_products = not of_products.isdisjoint(step.reads)
        if is_of_products:
            of_products.update(step.outs)
        if is_of_products and facts.is_fused(step):
            island.append(step)
            made.update(step.outs)
            continue
        if not made.isdisjoint(step.reads):
            parts.append(island)
            island = []
            made = set()
        parts.append(step)
    return [*parts, island] if island else parts
