"""The fourth pass: what each island leaves for others, in which dtype, and what is recomputed.

What one island computes for another is kept in 16 bits, if its kind can be. What is
cheap, and larger than what it is made of, is not kept: each island that reads it
repeats it. In the backward pass an island is recomputed from what it read, so no
float32 array is kept for it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from optax_lossscale._autocast.cheap import is_cheap
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.flat import Instruction
from optax_lossscale._autocast.known import Known, is_operand
from optax_lossscale._autocast.partition import Group
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.values import is_float, numbers_in

_LONGEST = 50  # steps that are repeated for one value
_FEW = 32  # numbers for one that a reduction leaves

Dtypes = tuple[Any, ...]


class Portion(NamedTuple):
    """An island, or a part of one, or an instruction that runs alone."""

    steps: tuple[Instruction, ...]
    is_island: bool
    # What others read, in all dtypes in which they do, beginning with the one it is
    # kept in; empty for what runs alone, which writes all of its results.
    writes: Mapping[int, Dtypes]
    repeated: int = 0  # how many leading steps repeat what others computed before
    # What is rounded to 16 bits for those that read it here
    rounded: frozenset[int] = frozenset()
    is_recomputed: bool = False  # in the backward pass, if anything is
    saved: frozenset[int] = frozenset()  # what is kept all the same


class Repeat(NamedTuple):
    """A step that islands repeat, rather than read its results."""

    step: Instruction
    sources: frozenset[int]  # what it takes to repeat it
    length: int  # of how many steps it is the last


def keep(known: Known, groups: Sequence[Group]) -> tuple[Portion, ...]:
    """The portions of a program, with what each leaves; an island may come in several."""
    repeats = _repeats(known, groups)
    portions: list[Portion] = []
    for group in groups:
        if group.is_island:
            portions += _of_island(known, group.steps, repeats)
        else:
            portions.append(Portion(group.steps, is_island=False, writes={}))
    return tuple(portions)


def _of_island(
    known: Known, island: Sequence[Instruction], repeats: Mapping[int, Repeat]
) -> list[Portion]:
    """The portions of an island, in order."""
    wanted = _wanted(known, island, repeats)
    made = [i for step in island for i in step.outs]
    # Whether others read it here or not: how a program is divided changes no digits.
    rounded = {
        i
        for i in made
        if known.is_kept_low(i)
        and (known.low in wanted.get(i, ()) or known.is_read_past(i))
    }
    read_here = {i for step in island for i in step.reads}
    # A sum that is kept in 16 bits, and read here too, comes first and by itself. The
    # rest then reads the sum, so that the gradient does not need its operands as well.
    # (Compiled for an H100 without this, a U-Net moves 1.06 of the bytes.)
    first = [i for i in made if i in rounded and i in read_here and i in wanted]
    portions: list[Portion] = []
    written: set[int] = set()
    for i in [*first, None]:
        if i is None:
            steps = [step for step in island if not written.issuperset(step.outs)]
        else:
            steps = _needed(i, island, written)
        repeated = _repeated_before(steps, repeats, rounded & written)
        steps = [*repeated, *steps]
        writes = {
            i: wanted[i] for i in _made_by(steps) if i in wanted and i not in written
        }
        if writes:  # or else others repeat it
            portions.append(_portion(known, steps, len(repeated), writes, rounded))
            written.update(writes)
    return portions


def _portion(
    known: Known,
    steps: Sequence[Instruction],
    repeated: int,
    writes: Mapping[int, Dtypes],
    rounded: Collection[int],
) -> Portion:
    """A portion of an island."""
    is_recomputed = known.how.recomputes and _is_recomputed(steps)
    saved = (
        _saved(known, steps, writes)
        if is_recomputed and known.how.keeps
        else frozenset()
    )
    return Portion(
        tuple(steps), True, writes, repeated, frozenset(rounded), is_recomputed, saved
    )


def _wanted(
    known: Known, island: Sequence[Instruction], repeats: Mapping[int, Repeat]
) -> dict[int, Dtypes]:
    """The dtypes in which others need an island's values, beginning with the one kept."""
    later = _later(known, island)
    wanted: dict[int, Dtypes] = {}
    for i, readers in later.items():
        # A cheap step that only islands read is repeated in them. They need its
        # operands instead.
        if _but_products(i, readers):
            sources = repeats[i].sources if i in repeats else {i}
            wanted |= {
                source: (known.kept_dtype(source),) for source in sources & later.keys()
            }
    for i, readers in later.items():
        is_read_low = any(
            is_operand(i, reader) or known.is_sent(reader) for reader in readers
        )
        if is_read_low and known.low not in wanted.get(i, ()):
            wanted[i] = (*wanted.get(i, ()), known.low)
    return wanted


def _needed(
    value: int, island: Sequence[Instruction], written: Collection[int]
) -> list[Instruction]:
    """The steps of an island that it takes to compute a value from what is written already."""
    steps: list[Instruction] = []
    needed = {value}
    for step in reversed(island):
        if not needed.isdisjoint(step.outs):
            steps.append(step)
            needed |= step.reads.difference(written)
    return steps[::-1]


def _later(
    known: Known, island: Iterable[Instruction]
) -> dict[int, Sequence[Instruction | None]]:
    """What reads the values of an island outside of it; None for the program's results."""
    inside = {id(step) for step in island}
    return {
        i: [reader for reader in known.readers.get(i, ()) if id(reader) not in inside]
        for i in _made_by(island)
    }


def _but_products(
    i: int, readers: Iterable[Instruction | None]
) -> list[Instruction | None]:
    """Those of the readers of a value that read it otherwise than as a product's operand."""
    return [reader for reader in readers if not is_operand(i, reader)]


# --- what is repeated ---


def _repeats(known: Known, groups: Sequence[Group]) -> dict[int, Repeat]:
    """What islands repeat: cheap steps whose results are larger than what they are made of."""
    # Such as a mask or a constant that is broadcast, the rows of an embedding, and the
    # result of a `tanh`: for its gradient, an island keeps what these read instead.
    # (Without this, attention over long sequences takes 1.47 of the memory, and moves
    # 1.30 of the bytes.)
    repeats: dict[int, Repeat] = {}
    for group in groups:
        later = _later(known, group.steps)
        for step in group.steps:
            if group.is_island:
                results = _repeatable(known, step, later)
            else:
                results = step.outs if _is_loose(known, step) else ()
            one = _repeat(known, step, repeats) if results else None
            if one is not None:
                repeats |= dict.fromkeys(results, one)
    return repeats


def _is_loose(known: Known, step: Instruction) -> bool:
    """Whether a step that runs alone is cheap and has nothing to do with products."""
    return is_cheap(step.eqn) and not any(map(known.is_of_products, step.outs))


def _repeat(
    known: Known, step: Instruction, repeats: Mapping[int, Repeat]
) -> Repeat | None:
    """What it takes to repeat a step, if that is less than to keep its results."""
    before = [repeats[i] for i in step.reads if i in repeats]
    sources = {i for i in step.reads if i not in repeats}
    sources.update(*(one.sources for one in before))
    length = 1 + sum(one.length for one in before)
    is_larger = sum(_bytes(known, i) for i in sources) <= sum(
        _bytes(known, i) for i in step.outs
    )
    return (
        Repeat(step, frozenset(sources), length)
        if is_larger and length <= _LONGEST
        else None
    )


def _repeatable(
    known: Known, step: Instruction, later: Mapping[int, Sequence[Instruction | None]]
) -> tuple[int, ...]:
    """The results of a step in an island that others can repeat; `later` reads them outside."""
    readers = {i: _but_products(i, later[i]) for i in step.outs}
    if any(readers[i] and known.is_kept_low(i) for i in step.outs):
        return ()
    return tuple(
        i for i in step.outs if all(_is_in_island(known, r) for r in readers[i])
    )


def _is_in_island(known: Known, reader: Instruction | None) -> bool:
    return reader is not None and is_cheap(reader.eqn) and not known.is_sent(reader)


def _repeated_before(
    steps: Sequence[Instruction],
    repeats: Mapping[int, Repeat],
    rounded: Collection[int],
) -> list[Instruction]:
    """The steps whose results a portion reads, except rounded ones, and what those read."""
    before: dict[int, Instruction] = {}  # by number, which is the order of the program
    unread = list(read_by(steps))
    while unread:
        i = unread.pop()
        if i in repeats and i not in rounded:
            step = repeats[i].step
            if step.outs[0] not in before:
                before[step.outs[0]] = step
                unread += step.reads
    return [before[number] for number in sorted(before)]


def _bytes(known: Known, i: int) -> int:
    """The bytes that it takes to keep a value; parameters and constants are kept anyway."""
    is_parameter = i in known.arguments and known.kinds[i] == Kind.PARAMETER
    if is_parameter or i in known.program.consts:
        return 0
    kept = known.low if i in known.sent else known.kept_dtype(i)
    return numbers_in(known.program.types[i]) * known.arguments.get(i, kept).itemsize


# --- what is recomputed ---


def _is_recomputed(steps: Sequence[Instruction]) -> bool:
    """Whether to recompute a portion: it computes something, and does so in one pass."""
    # Each level of an associative scan, which spaces numbers out, is another pass over
    # memory. (Without this, Mamba moves 1.14 of the bytes.)
    return not all(map(_only_moves, steps)) and not any(map(_spaces, steps))


def _only_moves(step: Instruction) -> bool:
    moves = bool(traits(step.eqn) & (Is.MOVES | Is.PLACES))
    return moves or not is_float(step.eqn.outvars[0])


def _spaces(step: Instruction) -> bool:
    return any(gap for *_, gap in step.eqn.params.get("padding_config", ()))


def _saved(
    known: Known, steps: Sequence[Instruction], writes: Mapping[int, Dtypes]
) -> frozenset[int]:
    """The reductions in a portion, and read in it, that are kept rather than taken once more."""
    # (Without this, a large vocabulary moves 1.11 of the bytes, and a ResNet 1.04.)
    largest = max(numbers_in(known.program.types[i]) for i in writes)
    read_here = {i for step in steps for i in step.reads}
    reductions = {step.outs[0] for step in steps if _is_saved(step.eqn, largest)}
    return frozenset(reductions & read_here)


def _is_saved(eqn: Any, largest: int) -> bool:
    """Whether to keep a reduction; `largest` numbers are written after it."""
    if "axes" not in eqn.params or not is_float(eqn.outvars[0]):
        return False
    reduced = numbers_in(eqn.invars[0].aval)
    # A compiler sums over rows, and writes what it makes of these rows, in one kernel.
    is_over_rows = eqn.params["axes"] == (eqn.invars[0].aval.ndim - 1,)
    is_read_once = is_over_rows and largest >= reduced
    return numbers_in(eqn.outvars[0].aval) * _FEW <= reduced and not is_read_once


def read_by(steps: Iterable[Instruction]) -> dict[int, None]:
    """What steps read from others."""
    made = set(_made_by(steps))
    return {i: None for step in steps for i in step.ins if i >= 0 and i not in made}


def _made_by(steps: Iterable[Instruction]) -> list[int]:
    return [i for step in steps for i in step.outs]
