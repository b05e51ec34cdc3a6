"""The fourth pass: what each island stores for others, in which dtype, and what is recomputed.

What one island computes for another is stored in 16 bits, if its kind can be. What is
cheap, and larger than what it is made of, is not stored: each island that reads it
repeats it. In the backward pass an island is recomputed from what it read, so no
float32 array is kept for it.

Where a rule says what it buys, this was measured without it: compiled for an H100,
over the same model with it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from optax_lossscale._autocast.cheap import is_cheap
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Facts, Reader, is_operand
from optax_lossscale._autocast.flat import Step
from optax_lossscale._autocast.partition import Dtypes, Region
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import dtype_in, is_float, numbers_in

_LONGEST = 50  # steps that are repeated for one value
_FEW = 32  # numbers for one that a reduction leaves


Steps = Sequence[Step]

Wanted = Mapping[int, Dtypes]
"""The values of an island that others read, by number."""


class Repeat(NamedTuple):
    """A step that islands repeat, rather than read its results."""

    step: Step
    sources: frozenset[int]  # what it takes to repeat it
    length: int  # of how many steps it is the last


Repeats = Mapping[int, Repeat]
"""How values can be made once more, by number."""

Later = Mapping[int, Sequence[Reader]]
"""What reads the values of an island outside of it."""


def store(facts: Facts, regions: Sequence[Region]) -> tuple[Region, ...]:
    """The regions of a program, with what each stores; an island may come in several."""
    repeats = _repeats(facts, regions)
    storing: list[Region] = []
    for region in regions:
        if region.is_island:
            storing += _of_island(facts, region.steps, repeats)
        else:
            storing.append(region)
    return tuple(storing)


def _of_island(facts: Facts, island: Steps, repeats: Repeats) -> list[Region]:
    """The regions of an island, in order.

    A sum that is stored in 16 bits, and read here too, comes first and by itself. The
    rest then reads the sum, so that the gradient does not need its operands as well:
    without this, a U-Net moves 1.06 of the bytes, with 0.97 of the memory.
    """
    wanted = _wanted(facts, island, repeats)
    made = made_by(island)
    rounded = frozenset(i for i in made if _is_rounded(facts, i, wanted))
    comes_first = rounded & wanted.keys() & _operands(island)
    regions: list[Region] = []
    stored: set[int] = set()

    def add(steps: Steps) -> None:
        """Adds a region of steps; none, if others repeat all of them."""
        unstored = {i: s for s in island for i in s.outs if i not in stored}
        repeated = _repeated_before(steps, repeats, rounded, unstored)
        steps = (*repeated, *steps)
        new = [i for i in made_by(steps) if i in wanted and i not in stored]
        if new:
            stores = {i: wanted[i] for i in new}
            region = Region(steps, True, stores, len(repeated), rounded)
            regions.append(_recomputed(facts, region))
            stored.update(new)

    for i in made:
        if i in comes_first:
            add(_needed(i, island, stored))
    add([step for step in island if not stored.issuperset(step.outs)])
    return regions


def _is_rounded(facts: Facts, i: int, wanted: Wanted) -> bool:
    """Whether a value of an island is rounded to 16 bits for those that read it there, too."""
    # Whether others read it there or not: how a program is divided changes no digits.
    is_read_low = facts.low in wanted.get(i, ())
    return facts.is_stored_low(i) and (is_read_low or facts.is_read_past(i))


def _wanted(facts: Facts, island: Steps, repeats: Repeats) -> dict[int, Dtypes]:
    """The dtypes in which others read an island's values, beginning with the one stored."""
    later = _later(facts, island)
    wanted: dict[int, Dtypes] = {}
    for i, readers in later.items():
        if not _but_products(i, readers):
            continue
        # A cheap step that only islands read is repeated in them. They need its
        # operands instead.
        sources = repeats[i].sources if i in repeats else {i}
        for source in sources & later.keys():
            wanted[source] = (facts.stored_dtype(source),)
    for i, readers in later.items():
        dtypes = wanted.get(i, ())
        is_read_low = any(is_operand(i, r) or facts.is_sent(r) for r in readers)
        if is_read_low and facts.low not in dtypes:
            wanted[i] = (*dtypes, facts.low)
    return wanted


def _needed(value: int, island: Steps, stored: Collection[int]) -> list[Step]:
    """The steps of an island that it takes to compute a value from what is stored already."""
    steps: list[Step] = []
    needed = {value}
    for step in reversed(island):
        if not needed.isdisjoint(step.outs):
            steps.append(step)
            needed |= step.reads.difference(stored)
    return steps[::-1]


def _later(facts: Facts, island: Steps) -> Later:
    """What reads the values of an island outside of it."""
    inside = {id(step) for step in island}
    later: dict[int, list[Reader]] = {}
    for i in made_by(island):
        readers = facts.readers.get(i, ())
        later[i] = [reader for reader in readers if id(reader) not in inside]
    return later


def _but_products(i: int, readers: Iterable[Reader]) -> list[Reader]:
    """Those of the readers of a value that read it otherwise than as a product's operand."""
    return [reader for reader in readers if not is_operand(i, reader)]


def _operands(steps: Steps) -> set[int]:
    """What steps read, from each other or from elsewhere."""
    return {i for step in steps for i in step.reads}


# --- what is repeated ---


def _repeats(facts: Facts, regions: Sequence[Region]) -> dict[int, Repeat]:
    """What islands repeat: cheap steps whose results are larger than what they are made of.

    Such as a mask or a constant that is broadcast, the rows of an embedding, and the
    result of a `tanh`, whose operands an island keeps instead for its gradient. Without
    this, attention over long sequences takes 1.47 of the memory and moves 1.30 of the
    bytes, a Llama 1.02 and 1.01; but BERT takes 0.99 and moves 0.96.
    """
    repeats: dict[int, Repeat] = {}
    for region in regions:
        later = _later(facts, region.steps)
        for step in region.steps:
            if region.is_island:
                results = _read_by_islands(facts, step, later)
            else:
                results = step.outs if _is_loose(facts, step) else ()
            repeat = _repeat(facts, step, repeats) if results else None
            if repeat is not None:
                repeats |= dict.fromkeys(results, repeat)
    return repeats


def _is_loose(facts: Facts, step: Step) -> bool:
    """Whether a step that runs alone is cheap and has nothing to do with products."""
    return is_cheap(step.eqn) and not any(map(facts.is_of_products, step.outs))


def _read_by_islands(facts: Facts, step: Step, later: Later) -> list[int]:
    """The results of a step in an island that no others read; none, if one is stored low."""
    results: list[int] = []
    for i in step.outs:
        readers = _but_products(i, later[i])
        if readers and facts.is_stored_low(i):
            return []
        if all(_is_in_island(facts, reader) for reader in readers):
            results.append(i)
    return results


def _is_in_island(facts: Facts, reader: Reader) -> bool:
    return reader is not None and is_cheap(reader.eqn) and not facts.is_sent(reader)


def _repeat(facts: Facts, step: Step, repeats: Repeats) -> Repeat | None:
    """What it takes to repeat a step; None if that is more than to store its results."""
    before = [repeats[i] for i in step.reads if i in repeats]
    sources = {i for i in step.reads if i not in repeats}
    sources.update(*(repeat.sources for repeat in before))
    length = 1 + sum(repeat.length for repeat in before)
    bytes_read = sum(_bytes(facts, i) for i in sources)
    bytes_made = sum(_bytes(facts, i) for i in step.outs)
    if bytes_read > bytes_made or length > _LONGEST:
        return None
    return Repeat(step, frozenset(sources), length)


def _repeated_before(
    steps: Steps,
    repeats: Repeats,
    rounded: Collection[int],
    unstored: Mapping[int, Step],
) -> list[Step]:
    """The steps that a region of an island repeats, to have what it reads.

    These make what `repeats` says, but for values of the island that are `rounded` and
    stored, and what else is `unstored` of the island.
    """
    before: dict[int, Step] = {}  # by number, which is the order of the program
    unread = list(read_by(steps))
    while unread:
        i = unread.pop()
        if i in unstored:
            step = unstored[i]
        elif i in repeats and i not in rounded:
            step = repeats[i].step
        else:
            continue
        number = step.outs[0]
        if number not in before:
            before[number] = step
            unread += step.reads
    return [before[number] for number in sorted(before)]


def _bytes(facts: Facts, i: int) -> int:
    """The bytes that it takes to store a value; parameters and constants are there anyway."""
    is_parameter = i in facts.arguments and facts.kinds[i] == Kind.PARAMETER
    if is_parameter or i in facts.program.consts:
        return 0
    dtype = facts.arguments.get(i, facts.stored_dtype(i))
    return numbers_in(facts.program.types[i]) * dtype.itemsize


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
    without this, Mamba moves 1.14 of the bytes, with 0.63 of the memory.
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
    types = facts.program.types
    largest = max(numbers_in(types[i]) for i in region.stores)
    read_here = _operands(region.steps)
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
    n_reduced = numbers_in(operand)
    n_left = numbers_in(eqn.outvars[0].aval)
    # A compiler sums over rows, and stores what it makes of these rows, in one kernel.
    is_over_rows = eqn.params["axes"] == (operand.ndim - 1,)
    is_read_once = is_over_rows and largest >= n_reduced
    return n_left * _FEW <= n_reduced and not is_read_once


def read_by(steps: Steps) -> dict[int, None]:
    """What steps read from others."""
    made = set(made_by(steps))
    read: dict[int, None] = {}
    for step in steps:
        for i in step.ins:
            is_literal = i < 0
            if i not in made and not is_literal:
                read[i] = None
    return read


def made_by(steps: Steps) -> list[int]:
    """The numbers of what steps compute."""
    return [i for step in steps for i in step.outs]
