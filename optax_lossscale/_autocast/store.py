"""The third pass: what each region stores, in which dtype, and what is repeated.

The pass goes backward, from the regions that read a value to the one that makes it. An
island stores a value in 16 bits if no later region needs it in float32: a product needs
16 bits, another island the dtype that `facts` has for the value. An island that reads
the results of a cheap step may repeat the step instead, if the results take at least as
many bytes as the values that the step reads. An equation without effects whose results
no region reads is in no region. Most islands are recomputed in the backward pass: their
residuals are the values that they read, and not the float32 arrays that they compute.

A rule that is there for memory, or for the bytes moved between memory and processor,
names the models in which it pays. Such rules are here and in `region`, `recomputed` and
`classify`.
The page docs/benchmarks/rules.md has the figures, which `python -m benchmarks rules`
computes from programs compiled with the rule and without it.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Set

from jax.extend.core import JaxprEqn, Var

from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.partition import Island, partition
from optax_lossscale._autocast.region import (
    Dtypes,
    Region,
    Step,
    joined_dtype,
    region_of_equation,
    region_of_island,
)
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import size_of, variables
from optax_lossscale._programs.walk import needed_for, producers_in
from optax_lossscale._programs.work import is_cheap


def store(facts: Facts, rewritten: Mapping[JaxprEqn, Step]) -> tuple[Region, ...]:
    """The regions of a program; an island may become several.

    Args:
      facts: the facts about the program.
      rewritten: the step of each equation that is rewritten.
    """
    seeds = island_seeds(facts)
    repeated = _repeated(facts, seeds)
    order = {eqn: n for n, eqn in enumerate(facts.program.eqns)}
    # The values that later regions read, or that are results, with their dtypes
    wanted = {v: facts.dtypes[v] for v in variables(facts.program.outs)}
    from_last: list[Region] = []
    for part in reversed(partition(facts.program.eqns, seeds)):
        regions: list[Region] = []
        if isinstance(part, list):
            regions = _regions_of_island(facts, part, wanted, repeated, order)
        elif part.effects or not wanted.keys().isdisjoint(part.outvars):
            regions = [region_of_equation(facts, part, rewritten.get(part), wanted)]
        for region in reversed(regions):
            from_last.append(region)
            for v, dtype in region.reads.items():
                wanted[v] = joined_dtype(facts, v, dtype, wanted.get(v, dtype))
    return tuple(reversed(from_last))


def island_seeds(facts: Facts) -> Set[Var]:
    """The values from which islands grow: those stored in 16 bits, and SUMs."""
    return {
        v
        for v, dtype in facts.dtypes.items()
        if dtype == facts.low or facts.kinds[v] == Kind.SUM
    }


def _regions_of_island(
    facts: Facts,
    island: Island,
    wanted: Dtypes,
    repeated: dict[Var, JaxprEqn],
    order: Mapping[JaxprEqn, int],
) -> list[Region]:
    """The regions of an island, in the order in which they run.

    Args:
      facts: the facts about the program.
      island: the equations of the island.
      wanted: the values that later regions read, with their dtypes.
      repeated: the equations of the program that islands repeat, by their results.
      order: the position of each equation in the program.
    """
    makers = producers_in(island)
    stored = {v: wanted[v] for v in makers if v in wanted}
    regions: list[Region] = []
    for values in _divided(facts, island, stored):
        usable = ChainMap(makers, repeated)
        needed = {usable[v] for v in needed_for(values, usable) if v in usable}
        eqns = sorted(needed, key=order.__getitem__)
        regions.append(region_of_island(facts, eqns, {v: stored[v] for v in values}))
        # The regions after this one read what it stores.
        makers = {v: eqn for v, eqn in makers.items() if v not in values}
    return regions


def _divided(facts: Facts, island: Island, stored: Dtypes) -> list[list[Var]]:
    """The values that each region of an island stores, in the order of running.

    A sum in 16 bits that the island itself reads, as one of a residual stream, is
    stored by a region of its own, which comes first. The steps that read the sum then
    read it as it is stored, and the gradient does not need its operands as well.
    This saves memory and bytes in transformers; a recommender pays for it with memory,
    and Mamba with bytes.
    """
    read_here = {v for eqn in island for v in variables(eqn.invars)}
    sums = [
        v
        for v, dtype in stored.items()
        if dtype == facts.dtypes[v] == facts.low and v in read_here
    ]
    others = [v for v in stored if v not in sums]
    alone = [[v] for v in sums]
    return [*alone, others] if others else alone


def _repeated(facts: Facts, seeds: Set[Var]) -> dict[Var, JaxprEqn]:
    """The equations that islands repeat, by their results.

    They are cheap, and their results take no fewer bytes than the stored values that
    they are computed from. Examples are a constant that is broadcast, a mask, and the
    `tanh` of a product's result, for whose gradient an island keeps that result.
    This saves memory and bytes in transformers, most of them where sequences are long.
    """
    repeated: dict[Var, JaxprEqn] = {}
    sources: dict[Var, set[Var]] = {}  # of each, the values that are read to repeat it
    for eqn in facts.program.eqns:
        is_seed = not seeds.isdisjoint(eqn.outvars)
        # The gradient of rows of an embedding would be summed for each island.
        if is_seed or not is_cheap(eqn) or Trait.GATHERS in traits(eqn):
            continue
        operands = variables(eqn.invars)
        read = set().union(*[sources.get(v, {v}) for v in operands])
        if _bytes(facts, read) <= _bytes(facts, eqn.outvars):
            repeated |= dict.fromkeys(eqn.outvars, eqn)
            sources |= dict.fromkeys(eqn.outvars, read)
    return repeated


def _bytes(facts: Facts, values: Iterable[Var]) -> int:
    """How many bytes values take in the dtypes in which they are stored."""
    return sum(size_of(v.aval) * facts.dtypes[v].itemsize for v in values)
