"""The fourth pass: what each island stores for others, in which dtype, and what is recomputed.

It goes backward, from what is read to where it is made. What one island computes for
another is stored in 16 bits, if its kind can be. What is cheap, and larger than what it
is made of, is not stored: each island that reads it repeats it. In the backward pass an
island is recomputed from what it read, so no float32 array is kept for it.

Where a rule says what it buys, this was measured without it: compiled for an H100 with
jax 0.12, over the same model with it, in this version or 0.3.0.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.flat import Step
from optax_lossscale._autocast.partition import Region
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import FLOAT32, dtype_in, is_float, numbers_in

_FEW = 32  # numbers for one that a reduction leaves, for keeping that to be worth it

Steps = Sequence[Step]
Makers = Mapping[int, Step]
"""The steps that make values where they are read, by the numbers of these."""


def store(facts: Facts, regions: Sequence[Region]) -> tuple[Region, ...]:
    """The regions of a program, with what each stores; an island may come in several."""
    repeated = _repeated(facts, regions)
    low = facts.low
    # By what comes later, in which dtype
    wanted = {i: facts.dtypes[i] for i in facts.program.outs}
    storing: list[Region] = []
    for region in reversed(regions):
        parts = _parts(facts, region, repeated, wanted)
        storing = parts + storing
        for i, dtype in itertools.chain(*map(taken_by, parts)):
            # What is also read as it is stored is rounded where a product reads it.
            is_low = dtype == low and wanted.get(i, low) == low
            wanted[i] = low if is_low else facts.dtypes[i]
    return tuple(storing)


def taken_by(region: Region) -> list[tuple[int, Any]]:
    """What a region reads, and in which dtype, or None for as it is stored."""
    if region.is_island:
        return [(i, None) for i in region.reads]
    (step,) = region.steps
    taken = zip(step.ins, step.takes, strict=True)
    return [(i, dtype) for i, dtype in taken if i in region.reads]


def _parts(
    facts: Facts, region: Region, repeated: dict[int, Step], wanted: Mapping[int, Any]
) -> list[Region]:
    """A region with what it stores; the regions of an island, in order."""
    steps = region.steps
    if not region.is_island:
        stores = {i: facts.dtypes[i] for i in made_by(steps)}
        return [region._replace(reads=_read_by(steps), stores=stores)]
    unstored = {i: step for step in steps for i in step.outs}
    makers = collections.ChainMap(unstored, repeated)
    parts: list[Region] = []
    for i in _sums_read_here(facts, steps):
        if i in wanted:
            parts.append(_part(facts, {i: facts.low}, makers))
            del unstored[i]
    stores = {i: wanted[i] for i in unstored if i in wanted}
    if stores:
        parts.append(_part(facts, stores, makers))
    return parts


def _sums_read_here(facts: Facts, steps: Steps) -> list[int]:
    """The sums of an island that are in 16 bits for others, and are read in the island, too.

    Each comes first and by itself. The rest of the island then reads the sum, so that
    the gradient does not need its operands as well: without this, a transformer takes
    1.04 of the memory and moves 1.01 of the bytes, BERT 1.06 and 1.03.
    """
    read_here = {i for step in steps for i in step.reads}
    made = made_by(steps)
    return [i for i in made if facts.dtypes[i] == facts.low and i in read_here]


def _part(facts: Facts, stores: Mapping[int, Any], makers: Makers) -> Region:
    """What of an island computes these values from what no step makes."""
    needed: dict[int, Step] = {}
    unread = list(stores)
    while unread:
        step = makers.get(unread.pop())
        if step is not None and step.outs[0] not in needed:
            needed[step.outs[0]] = step
            unread += step.reads
    steps = tuple(needed[number] for number in sorted(needed))  # as in the program
    region = Region(steps, True, _read_by(steps), stores)
    if not facts.casting.recomputes or not _is_one_pass(steps):
        return region
    return region._replace(is_recomputed=True, kept=_kept(facts, region))


def _repeated(facts: Facts, regions: Sequence[Region]) -> dict[int, Step]:
    """What islands repeat: cheap steps whose results are larger than what they are made of.

    Such as a mask or a constant that is broadcast, and the result of a `tanh`, whose
    operands an island keeps instead for its gradient. Without this, attention over long
    sequences takes 1.47 of the memory and moves 1.30 of the bytes, a Llama 1.02 and
    1.01; but BERT takes 0.99 and moves 0.96.
    """
    repeated: dict[int, Step] = {}
    sources: dict[int, set[int]] = {}  # what it takes to repeat each
    stored = facts.of_products
    for step in itertools.chain(*(region.steps for region in regions)):
        if not facts.is_fused(step) or not stored.isdisjoint(step.outs):
            continue
        read: set[int] = set()
        for i in step.reads:
            read |= sources.get(i, {i})
        if _bytes(facts, read) <= _bytes(facts, step.outs):
            repeated |= dict.fromkeys(step.outs, step)
            sources |= dict.fromkeys(step.outs, read)
    return repeated


def _bytes(facts: Facts, values: Iterable[int]) -> int:
    """The bytes that it takes to store values."""
    total = 0
    for i in values:
        total += numbers_in(facts.program.types[i]) * facts.dtypes[i].itemsize
    return total


def _is_one_pass(steps: Steps) -> bool:
    """Whether steps compute something, and do so in one pass over memory.

    Each level of an associative scan, which spaces numbers out, is another pass:
    without this, Mamba moves 1.14 of the bytes, with 0.63 of the memory. What only
    moves has nothing to compute: recomputed, a recommender moves 1.09 of the bytes.
    """
    computes = False
    for step in steps:
        padding = step.eqn.params.get("padding_config", ())
        if any(gap for *_, gap in padding):
            return False
        moves = traits(step.eqn) & (Is.MOVES | Is.PLACES)
        if not moves and is_float(step.eqn.outvars[0]):
            computes = True
    return computes


def _kept(facts: Facts, region: Region) -> frozenset[int]:
    """The reductions in a region, and read in it, that are kept rather than taken once more.

    Without this, a large vocabulary moves 1.11 of the bytes, and a ResNet 1.04.
    """
    # What is kept, JAX rounds in the mesh around the program.
    meshes = {step.eqn.ctx.cur_abstract_mesh for step in facts.program.steps}
    if not facts.casting.keeps or len(meshes) > 1:
        return frozenset()
    types = facts.program.types
    largest = max(numbers_in(types[i]) for i in region.stores)
    read_here: set[int] = set()
    reductions: set[int] = set()
    for step in region.steps:
        read_here |= step.reads
        if _takes_a_pass(step.eqn, largest):
            reductions.update(step.outs)
    return frozenset(reductions & read_here)


def _takes_a_pass(eqn: Any, largest: int) -> bool:
    """Whether this is a reduction that takes a pass; `largest` numbers are stored after it."""
    if "axes" not in eqn.params or dtype_in(eqn.outvars[0]) != FLOAT32:
        return False
    operand = eqn.invars[0].aval
    n_before = numbers_in(operand)
    n_left = numbers_in(eqn.outvars[0].aval)
    # A compiler sums over rows, and stores what it makes of these rows, in one kernel:
    # kept as well, attention over long sequences moves 1.28 of the bytes.
    is_over_rows = eqn.params["axes"] == (operand.ndim - 1,)
    is_read_once = is_over_rows and largest >= n_before
    return n_left * _FEW <= n_before and not is_read_once


def _read_by(steps: Steps) -> tuple[int, ...]:
    """What steps read from others."""
    made = set(made_by(steps))
    read: dict[int, None] = {}
    for step in steps:
        read |= dict.fromkeys(i for i in step.ins if i >= 0 and i not in made)
    return tuple(read)


def made_by(steps: Steps) -> list[int]:
    """The numbers of what steps compute."""
    return [i for step in steps for i in step.outs]
