"""Divides the equations of a program into islands and the equations between them.

An island has the equations that depend on products and are cheap enough to be
recomputed in the backward pass. It ends where an equation that cannot be in an island,
such as the next product, reads one of its results. The parts of
`exp(tanh(x @ a)) @ b` are the first product, an island with `tanh` and `exp`, and the
second product.
"""

from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn, Var

from optax_lossscale._programs.values import variables
from optax_lossscale._programs.work import is_cheap

Island = list[JaxprEqn]
"""The equations of an island, in order."""


def partition(
    eqns: Sequence[JaxprEqn], seeds: Iterable[Var]
) -> list[Island | JaxprEqn]:
    """The islands of a program, and the equations that run by themselves, in order.

    Each part reads results of earlier parts only. An equation is in an island if it is
    cheap and depends on a seed. Any other equation comes before the island that is
    growing, unless it reads one of the island's results.

    Args:
      eqns: the equations of the program.
      seeds: the values from which islands grow, such as results of products.
    """
    parts: list[Island | JaxprEqn] = []
    island: Island = []
    made: set[Var] = set()  # the results of the island's equations
    from_seeds = set(seeds)  # the seeds, and all that is computed from them
    for eqn in eqns:
        reads = variables(eqn.invars)
        is_from_seeds = not from_seeds.isdisjoint(reads)
        if is_from_seeds:
            from_seeds.update(eqn.outvars)
        if is_from_seeds and is_cheap(eqn):
            island.append(eqn)
            made.update(eqn.outvars)
            continue
        if not made.isdisjoint(reads):
            parts.append(island)
            island = []
            made = set()
        parts.append(eqn)
    return [*parts, island] if island else parts
