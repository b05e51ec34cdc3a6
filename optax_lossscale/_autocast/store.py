"""The third pass: what each region stores, in which dtype, and what islands repeat.

The pass walks the program backward, from the regions that read a value to the region
that computes it, and builds the regions on the way:

- An island stores a value in 16 bits if no later region needs the value in float32. A
  product needs 16 bits. An island needs the dtype that `facts` has for the value, or 16
  bits if it only rounds the value.
- An island repeats a cheap equation instead of reading its results if the results take
  at least as many bytes as the stored values from which they are computed. In
  `y = tanh(x @ w)` and `y * (y @ w)`, the island of the multiplication reads `x @ w`
  and computes `tanh` again.
- An equation gets no region if it has no effects and nothing reads its results: dead
  code is eliminated.

Most islands are recomputed in the backward pass. Their residuals are then the values
that they read and a few reductions (see `recomputed`), not the other float32 arrays
that they compute.

Some rules here and in `region`, `recomputed` and `classify` exist only to save memory
or *traffic*: the bytes that are moved between memory and processor. The docstring of
such a rule says in which models it saves them, as programs compiled for an H100 show
(not timed), compiled with all rules and without each one.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Set

from jax.extend.core import JaxprEqn, Var

from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.partition import Island, partition
from optax_lossscale._autocast.region import (
    Dtypes,
    PlannedEquation,
    Region,
    add_need,
    region_of_equation,
    region_of_island,
)
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import size_of, variables
from optax_lossscale._programs.walk import needed_for, producers_in
from optax_lossscale._programs.work import is_cheap


def regions_of(
    facts: Facts, rewritten: Mapping[JaxprEqn, PlannedEquation]
) -> tuple[Region, ...]:
    """Returns the regions of a program, in order; an island may become several.

    Args:
      facts: the facts about the program.
      rewritten: each equation that is rewritten, with plans for its programs.
    """
    roots = island_roots(facts)
    repeated = _repeated(facts, roots)
    positions = {eqn: n for n, eqn in enumerate(facts.program.eqns)}
    # The live values: those that the program returns or later regions read, with the
    # dtypes in which to store them
    live = {}
    for v in variables(facts.program.outs):
        live[v] = facts.dtypes[v]
    reversed_regions = []
    parts = partition(facts.program.eqns, roots)
    for part in reversed(parts):
        regions = []
        if isinstance(part, list):
            regions = _regions_of_island(facts, part, live, repeated, positions)
        elif part.effects or not live.keys().isdisjoint(part.outvars):
            regions = [region_of_equation(facts, part, rewritten.get(part), live)]
        for region in reversed(regions):
            reversed_regions.append(region)
            for v, dtype in region.reads.items():
                add_need(facts, live, v, dtype)
    return tuple(reversed(reversed_regions))


def island_roots(facts: Facts) -> Set[Var]:
    """Returns the values from which islands grow: those stored in 16 bits, and SUMs.

    Most of them are the results of products and sums with those. Any value that was in
    16 bits before, such as an argument or a constant, counts as well.
    """
    roots = set()
    for v, dtype in facts.dtypes.items():
        if dtype == facts.low or facts.kinds[v] == Kind.SUM:
            roots.add(v)
    return roots


def _regions_of_island(
    facts: Facts,
    island: Island,
    live: Dtypes,
    repeated: dict[Var, JaxprEqn],
    positions: Mapping[JaxprEqn, int],
) -> list[Region]:
    """Builds the regions of an island, in the order in which they run.

    Args:
      facts: the facts about the program.
      island: the equations of the island.
      live: the values that are read later, with the dtypes in which to store them.
      repeated: the equations of the program that islands repeat, by their results.
      positions: the position of each equation in the program.
    """
    not_stored_yet = producers_in(island)
    stored = {v: live[v] for v in not_stored_yet if v in live}
    regions = []
    for values in _divided(facts, island, stored):
        producers = ChainMap(not_stored_yet, repeated)
        needed = needed_for(values, producers)
        eqns = {producers[v] for v in needed if v in producers}
        in_order = sorted(eqns, key=positions.__getitem__)
        stores = {v: stored[v] for v in values}
        regions.append(region_of_island(facts, in_order, stores))
        # Later regions of the island read what this one stores and do not compute it.
        for v in values:
            del not_stored_yet[v]
    return regions


def _divided(facts: Facts, island: Island, stored: Dtypes) -> list[list[Var]]:
    """Divides what an island stores among its regions, in the order in which they run.

    If the island itself reads a sum that it stores in 16 bits, as it does with the sum
    of a residual stream, a separate region stores that sum first. The equations that
    read the sum then read it as stored, so their residual is the sum alone, not the
    operands of the sum. The same goes for a product's result that the island moves.

    This division saves memory and traffic in transformers. In a recommender it saves
    traffic but costs memory, and in Mamba it costs traffic.
    """
    read_here = {v for eqn in island for v in variables(eqn.invars)}
    stored_first = []
    stored_last = []
    for v in stored:
        if v in read_here and facts.dtypes[v] == facts.low:
            stored_first.append([v])
        else:
            stored_last.append(v)
    if stored_last:
        return [*stored_first, stored_last]
    return stored_first


def _repeated(facts: Facts, roots: Set[Var]) -> dict[Var, JaxprEqn]:
    """Finds the equations that islands repeat, by their results.

    These equations are cheap, and their results take at least as many bytes as the
    stored values from which they are computed. Examples are the broadcast of a
    constant, a mask, and the `tanh` of a product's result (which is saved for the
    gradient anyway). Repeating such equations saves memory and traffic in transformers,
    most of all with long sequences.
    """
    repeated = {}
    # For each of these results, the stored values from which an island computes it
    sources = {}
    for eqn in facts.program.eqns:
        is_root = not roots.isdisjoint(eqn.outvars)
        # If the lookup of an embedding's rows were repeated, the embedding's gradient
        # would be a separate sum for each island.
        if is_root or not is_cheap(eqn) or Trait.GATHERS in traits(eqn):
            continue
        reads = set()
        for v in variables(eqn.invars):
            reads |= sources.get(v, {v})
        if _bytes(facts, reads) <= _bytes(facts, eqn.outvars):
            for v in eqn.outvars:
                repeated[v] = eqn
                sources[v] = reads
    return repeated


def _bytes(facts: Facts, values: Iterable[Var]) -> int:
    """Counts the bytes that values take in the dtypes in which they are stored."""
    n_bytes = 0
    for v in values:
        itemsize = facts.dtypes[v].itemsize
        n_bytes += size_of(v.aval) * itemsize
    return n_bytes
