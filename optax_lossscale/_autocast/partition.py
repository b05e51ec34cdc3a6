"""Divides the equations of a program into islands and the equations between them.

An island is a list of equations that depend on products and are cheap enough to be
recomputed in the backward pass. It ends where one of its results is read by an equation
that cannot join it, such as the next product. The parts of `exp(tanh(x @ a)) @ b` are
the first product, an island with `tanh` and `exp`, and the second product.
"""

from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn, Var

from optax_lossscale._programs.values import variables
from optax_lossscale._programs.work import is_cheap

Island = list[JaxprEqn]
"""The equations of an island, in order."""


def partition(
    eqns: Sequence[JaxprEqn], roots: Iterable[Var]
) -> list[Island | JaxprEqn]:
    """Returns the islands of a program and the equations outside them, in order.

    Each part reads only results of earlier parts. An equation is in an island if it is
    cheap and depends on a root. While an island grows, the other equations that do not
    read its results are moved before it.

    Args:
      eqns: the equations of the program.
      roots: the values from which islands grow, such as the results of products.
    """
    parts: list[Island | JaxprEqn] = []
    island: Island = []
    island_results = set()
    from_roots = set(roots)  # and all values computed from them
    for eqn in eqns:
        reads = variables(eqn.invars)
        depends_on_root = not from_roots.isdisjoint(reads)
        if depends_on_root:
            from_roots.update(eqn.outvars)
        if depends_on_root and is_cheap(eqn):
            island.append(eqn)
            island_results.update(eqn.outvars)
            continue
        if not island_results.isdisjoint(reads):
            parts.append(island)
            island = []
            island_results = set()
        parts.append(eqn)
    if island:
        parts.append(island)
    return parts
