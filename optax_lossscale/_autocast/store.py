"""The fourth pass: what each region stores, in which dtype, and what is recomputed.

The pass goes backward, from the regions that read a value to the one that makes it. An
island stores a value in 16 bits if it is only read so, as by products. Every other
value is stored in the dtype that `facts` has for it. If a cheap step has results no
smaller than the values that they are computed from, the islands that read these results
repeat the step instead. Most islands are recomputed in the backward pass from the
values that they read, so that none of their float32 arrays has to be kept.

Some rules below say what they are worth: how much memory a model takes, and how many
bytes it moves, without the rule, over the same model with it. This was measured on
programs compiled for an H100 with jax 0.12, which `python -m benchmarks rules` does.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.flat import TypedStep
from optax_lossscale._autocast.partition import partition
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import FLOAT32, dtype_in, is_float, numbers_in

_FEW = 32  # the least terms of a reduction whose result is worth keeping

Steps = Sequence[TypedStep]
Makers = Mapping[int, TypedStep]
"""For the number of a value, the step that computes it in the region that reads it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """An island or a part of one, or a step that runs by itself, such as a product."""

    steps: Steps
    # The values from outside, literals left out, each with the dtype to which its step
    # casts it; None where it is read as it is stored, and in islands, in which each
    # step casts its operands
    reads: Mapping[int, Any]
    stores: Mapping[int, Any]  # the values for outside, with their dtypes
    is_recomputed: bool = False  # whether the backward pass recomputes its steps
    kept: frozenset[int] = frozenset()  # the results that it keeps nevertheless


def store(facts: Facts, steps: Steps) -> tuple[Region, ...]:
    """The regions of a program; an island may become several."""
    repeated = _repeated(facts, steps)
    low = facts.low
    # The values that later regions read, or that are results, with their dtypes
    wanted = {i: facts.dtypes[i] for i in facts.program.outs}
    from_last: list[Region] = []
    for part in reversed(partition(facts, steps)):
        if isinstance(part, list):
            regions = _of_island(facts, part, repeated, wanted)
        else:
            regions = [_alone(part)]
        from_last += reversed(regions)
        for region in regions:
            for i, dtype in region.reads.items():
                # If not only products read it, it is stored in its own dtype, and each
                # product rounds it.
                is_low = dtype == low and wanted.get(i, low) == low
                wanted[i] = low if is_low else facts.dtypes[i]
    return tuple(reversed(from_last))


def _alone(step: TypedStep) -> Region:
    """The region of a step that runs by itself."""
    reads = {i: dtype for i, dtype in zip(step.ins, step.takes, strict=True) if i >= 0}
    return Region((step,), reads, dict(zip(step.outs, step.gives, strict=True)))


def _of_island(
    facts: Facts, island: Steps, repeated: Makers, wanted: Mapping[int, Any]
) -> list[Region]:
    """The regions of an island, in order.

    Args:
      facts: the facts about the program.
      island: its steps.
      repeated: the steps that islands repeat, by the numbers of their results.
      wanted: the values that are read later, with the dtypes for storing them.
    """
    makers = dict(repeated)
    for step in island:
        makers |= dict.fromkeys(step.outs, step)
    stores = {i: wanted[i] for i in made_by(island) if i in wanted}
    sums = [i for i in _sums_read_here(facts, island) if i in stores]
    regions: list[Region] = []
    for i in sums:
        regions.append(_region(facts, {i: stores.pop(i)}, makers))
        del makers[i]  # what follows reads it
    if stores:
        regions.append(_region(facts, stores, makers))
    return regions


def _sums_read_here(facts: Facts, steps: Steps) -> list[int]:
    """The values that are stored in 16 bits and also read in the island that computes them.

    Such as a sum of a residual stream. Each gets a region of its own, which comes before
    the steps that read it. They then read the stored sum, and the gradient does not
    need its operands as well. Without this, a transformer takes 1.04 of the memory and
    moves 1.01 of the bytes, BERT 1.06 and 1.03; but Mamba moves 0.97 of the bytes, and a
    recommender takes 0.90 of the memory, though it moves 1.09 of the bytes.
    """
    read_here = {i for step in steps for i in step.reads}
    made = made_by(steps)
    return [i for i in made if facts.dtypes[i] == facts.low and i in read_here]


def _region(facts: Facts, stores: Mapping[int, Any], makers: Makers) -> Region:
    """The region that computes `stores`: the steps that these depend on.

    It reads whatever no step in `makers` computes.
    """
    needed: dict[int, TypedStep] = {}
    unread = list(stores)
    while unread:
        step = makers.get(unread.pop())
        if step is not None and step.outs[0] not in needed:
            needed[step.outs[0]] = step
            unread += step.reads
    steps = tuple(needed[number] for number in sorted(needed))  # in the program's order
    made = set(made_by(steps))
    reads = dict.fromkeys(
        i for step in steps for i in step.ins if i >= 0 and i not in made
    )
    if not facts.casting.recomputes or not _is_one_pass(steps):
        return Region(steps, reads, stores)
    return Region(steps, reads, stores, True, _kept(facts, steps, stores))


def _repeated(facts: Facts, steps: Steps) -> Makers:
    """The steps that islands repeat, by the numbers of their results.

    They are cheap, and their results take no fewer bytes than the stored values that
    they are computed from: a constant that is broadcast, a mask, or the `tanh` of a
    product's result, of which an island keeps the operand for its gradient instead.
    Without this, attention over long sequences takes 1.78 of the memory and moves 1.35
    of the bytes, BERT 1.19 and 1.21, a transformer 1.15 and 1.17.
    """
    repeated: dict[int, TypedStep] = {}
    sources: dict[int, set[int]] = {}  # of each, the values that are read to repeat it
    for step in steps:
        is_stored = not facts.of_products.isdisjoint(step.outs)
        # The gradient of rows of an embedding would be summed for each island.
        if is_stored or not facts.is_fused(step) or Is.PICKS in traits(step.eqn):
            continue
        read: set[int] = set()
        for i in step.reads:
            read |= sources.get(i, {i})
        if _bytes(facts, read) <= _bytes(facts, step.outs):
            repeated |= dict.fromkeys(step.outs, step)
            sources |= dict.fromkeys(step.outs, read)
    return repeated


def _bytes(facts: Facts, values: Iterable[int]) -> int:
    """How many bytes values take in the dtypes in which they are stored."""
    types = facts.program.types
    return sum(numbers_in(types[i]) * facts.dtypes[i].itemsize for i in values)


def _is_one_pass(steps: Steps) -> bool:
    """Whether steps compute floats, and take one pass over memory to do so.

    Each level of an associative scan, which pads with gaps between numbers, is a pass
    of its own: without this rule, Mamba moves 1.10 of the bytes, with 0.62 of the
    memory. Steps that only move numbers compute nothing, and to recompute them only
    costs: a recommender then moves 1.09 of the bytes.
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


def _kept(facts: Facts, steps: Steps, stores: Mapping[int, Any]) -> frozenset[int]:
    """The reductions of a region that other steps in it read, and that are kept.

    To recompute one would take another pass over its operand. Without this, a large
    vocabulary moves 1.12 of the bytes, and a ResNet 1.05.
    """
    if not facts.keeps:
        return frozenset()
    largest = max(numbers_in(facts.program.types[i]) for i in stores)
    read_here: set[int] = set()
    reductions: set[int] = set()
    for step in steps:
        read_here |= step.reads
        if _takes_a_pass(step.eqn, largest):
            reductions.update(step.outs)
    return frozenset(reductions & read_here)


def _takes_a_pass(eqn: Any, largest: int) -> bool:
    """Whether an equation is a reduction that takes a pass over memory for itself.

    `largest` is the size of the largest array that its region stores.
    """
    if "axes" not in eqn.params or dtype_in(eqn.outvars[0]) != FLOAT32:
        return False
    operand = eqn.invars[0].aval
    n_before = numbers_in(operand)
    n_left = numbers_in(eqn.outvars[0].aval)
    # A compiler sums over rows, and computes from the sums what is stored for these
    # rows, in one kernel. If such sums were kept as well, attention over long sequences
    # would move 1.28 of the bytes.
    is_over_rows = eqn.params["axes"] == (operand.ndim - 1,)
    is_read_once = is_over_rows and largest >= n_before
    return n_left * _FEW <= n_before and not is_read_once


def made_by(steps: Steps) -> list[int]:
    """The numbers of the results of steps, in order."""
    return [i for step in steps for i in step.outs]
