"""The third pass: a program in groups, which are products and what else runs alone, and islands.

An island is what is computed between products, from these, and cheaply enough to be
computed once more in the backward pass.
"""

from typing import NamedTuple

from optax_lossscale._autocast.cheap import is_cheap
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.flat import Instruction
from optax_lossscale._autocast.known import Known
from optax_lossscale._programs.values import dtype_in


class Group(NamedTuple):
    """An island; or one instruction that runs alone."""

    steps: tuple[Instruction, ...]
    is_island: bool


def partition(known: Known) -> tuple[Group, ...]:
    """The instructions of a program in groups, none of which reads what a later one makes."""
    of_products = {i for i in known.uses if _is_of_products(known, i)}
    groups: list[Group] = []
    island: list[Instruction] = []
    made: set[int] = set()  # in the island
    for step in known.program.steps:
        is_of_products = not of_products.isdisjoint(step.reads)
        if is_of_products:
            of_products.update(step.outs)
        if is_of_products and is_cheap(step.eqn) and not known.is_sent(step):
            island.append(step)
            made.update(step.outs)
            continue
        if not made.isdisjoint(step.reads):
            groups.append(Group(tuple(island), is_island=True))
            island = []
            made = set()
        groups.append(Group((step,), is_island=False))
    if island:
        groups.append(Group(tuple(island), is_island=True))
    return tuple(groups)


def _is_of_products(known: Known, i: int) -> bool:
    """Whether a value is in 16 bits as it comes, or a sum with what is."""
    if i in known.arguments:
        return known.arguments[i] == known.low or known.kinds[i] == Kind.SUM
    if i in known.program.consts:
        return dtype_in(known.program.consts[i]) == known.low
    return known.is_of_products(i)
