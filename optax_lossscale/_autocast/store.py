"""The fourth pass: what each island stores for others, in which dtype, and what is recomputed.

It goes backward, from what is read to where it is made. What one island computes for
another is stored in 16 bits, if its kind can be. What is cheap, and larger than what it
is made of, is not stored: each island that reads it repeats it. In the backward pass an
island is recomputed from what it read, so no float32 array is kept for it.

What is said of a rule in figures is the memory or the bytes of a model without it, over
those with it, compiled for an H100 with jax 0.12 when the rule was made or last tried:
this version or 0.3.0.

Where a rule says what it buys, this was measured without it: compiled for an H100,
over the same model with it.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Facts
from optax_lossscale._autocast.flat import Step
from optax_lossscale._autocast.partition import Region
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in, is_float, numbers_in

_FEW = (
    32  # numbers for one that a reduction leaves, for keeping that one to be worth it
)

Steps = Sequence[Step]
Makers = Mapping[int, Step]
"""The steps that make values where they are read, by the numbers of these."""


def store(facts: Facts, regions: Sequence[Region]) -> tuple[Region, ...]:
    """The regions of a program, with what each stores; an island may come in several."""
    repeated = _repeated(facts, regions)
    # By what comes later, in which dtype
    wanted = {i: facts.dtypes[i] for i in facts.program.outs}
    storing: list[Region] = []
    for region in reversed(regions):
        if region.is_island:
            parts = _parts(facts, region.steps, repeated, wanted)
        else:
            stores = {i: facts.dtypes[i] for step in region.steps for i in step.outs}
            parts = [region._replace(reads=_read_by(region.steps), stores=stores)]
        for part in parts:
            for i, dtype in taken_by(part):
                # What is also read as it is stored is rounded where a product reads it.
                is_low = dtype == facts.low and wanted.get(i, dtype) == dtype
                wanted[i] = facts.low if is_low else facts.dtypes[i]
        storing = parts + storing
    return tuple(storing)


def taken_by(region: Region) -> list[tuple[int, Any]]:
    """What a region reads, and in which dtype, or None for as it is stored."""
    if region.is_island:
        return [(i, None) for i in region.reads]
    (step,) = region.steps
    pairs = zip(step.ins, step.takes, strict=True)
    return [(i, dtype) for i, dtype in pairs if i >= 0]


def _parts(
    facts: Facts, island: Steps, repeated: dict[int, Step], wanted: Mapping[int, Any]
) -> list[Region]:
    """The regions of an island, in order.

    A sum that is stored in 16 bits, and read here too, comes first and by itself. The
    rest then reads the sum, so that the gradient does not need its operands as well:
    without this, a transformer takes 1.04 of the memory and moves 1.01 of the bytes,
    BERT 1.06 and 1.03.
    """
    read_here = {i for step in island for i in step.reads}
    unstored = {i: step for step in island for i in step.outs}
    makers = collections.ChainMap(unstored, repeated)
    parts: list[Region] = []

    def add(numbers: Iterable[int]) -> None:
        stores = {i: wanted[i] for i in numbers if i in wanted}
        if stores:
            steps = _needed(stores, makers)
            region = Region(steps, True, _read_by(steps), stores)
            parts.append(_recomputed(facts, region))

    for i in made_by(island):
        if facts.dtypes[i] == facts.low and i in read_here and i in wanted:
            add([i])
            del unstored[i]
    add(unstored)
    return parts


def _needed(values: Iterable[int], makers: Makers) -> tuple[Step, ...]:
    """The steps that it takes to compute values from what no step makes."""
    needed: dict[int, Step] = {}
    unread = list(values)
    while unread:
        step = makers.get(unread.pop())
        if step is not None and step.outs[0] not in needed:
            needed[step.outs[0]] = step
            unread += step.reads
    return tuple(needed[number] for number in sorted(needed))  # as in the program


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
        read: set[int] = set()
        for i in step.reads:
            read |= sources.get(i, {i})
        is_stored = not stored.isdisjoint(step.outs)
        is_less = _bytes(facts, read) <= _bytes(facts, step.outs)
        if facts.is_fused(step) and is_less and not is_stored:
            repeated |= dict.fromkeys(step.outs, step)
            sources |= dict.fromkeys(step.outs, read)
    return repeated


def _bytes(facts: Facts, values: Iterable[int]) -> int:
    """The bytes that it takes to store values."""
    types = facts.program.types
    return sum(numbers_in(types[i]) * facts.dtypes[i].itemsize for i in values)


# --- what is recomputed ---


def _recomputed(facts: Facts, region: Region) -> Region:
    """A region of an island, with whether it is recomputed, and what is kept all the same."""
    if not facts.casting.recomputes or not _is_one_pass(region.steps):
        return region
    kept = _kept(facts, region) if facts.casting.keeps else frozenset()
    return region._replace(is_recomputed=True, kept=kept)


def _is_one_pass(steps: Steps) -> bool:
    """Whether steps compute something, and do so in one pass over memory.

    Each level of an associative scan, which spaces numbers out, is another pass:
    without this, Mamba moves 1.14 of the bytes, with 0.63 of the memory. What only
    moves has nothing to compute: recomputed, a recommender moves 1.09 of the bytes.
    """
    return not all(map(_only_moves, steps)) and not any(map(_spaces, steps))


def _only_moves(step: Step) -> bool:
    if traits(step.eqn) & (Is.MOVES | Is.PLACES):
        return True
    return not is_float(step.eqn.outvars[0])


def _spaces(step: Step) -> bool:
    padding = step.eqn.params.get("padding_config", ())
    return any(gap for *_, gap in padding)


def _kept(facts: Facts, region: Region) -> frozenset[int]:
    """The reductions in a region, and read in it, that are kept rather than taken once more.

    Without this, a large vocabulary moves 1.11 of the bytes, and a ResNet 1.04.
    """
    if len({step.eqn.ctx.cur_abstract_mesh for step in facts.program.steps}) > 1:
        return frozenset()  # what is kept, JAX rounds in the mesh around the program
    types = facts.program.types
    largest = max(numbers_in(types[i]) for i in region.stores)
    read_here = {i for step in region.steps for i in step.reads}
    kept: set[int] = set()
    for step in region.steps:
        if _is_kept(step.eqn, largest):
            kept.update(read_here.intersection(step.outs))
    return frozenset(kept)


def _is_kept(eqn: Any, largest: int) -> bool:
    """Whether to keep a reduction; `largest` numbers are stored after it."""
    # What is kept, JAX rounds to its dtype, which it cannot do with complex numbers.
    is_real = jnp.issubdtype(dtype_in(eqn.outvars[0]), jnp.floating)
    if "axes" not in eqn.params or not is_real:
        return False
    operand = eqn.invars[0].aval
    # A compiler sums over rows, and stores what it makes of these rows, in one kernel:
    # kept as well, attention over long sequences moves 1.28 of the bytes.
    is_over_rows = eqn.params["axes"] == (operand.ndim - 1,)
    is_read_once = is_over_rows and largest >= numbers_in(operand)
    n_left = numbers_in(eqn.outvars[0].aval)
    return n_left * _FEW <= numbers_in(operand) and not is_read_once


def _read_by(steps: Steps) -> tuple[int, ...]:
    """What steps read from others."""
    read = dict.fromkeys(i for step in steps for i in step.ins if i >= 0)
    made = set(made_by(steps))
    return tuple(i for i in read if i not in made)


def made_by(steps: Steps) -> list[int]:
    """The numbers of what steps compute."""
    return [i for step in steps for i in step.outs]
