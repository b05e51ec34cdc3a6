"""Where a wrong number comes from: back along what is off the most, to where it is right."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from optax_lossscale._diagnosis.notes import FIFTH, TOLERANCE, Note, limits
from optax_lossscale._diagnosis.wide import is_narrow
from optax_lossscale._programs.operations import Is, traits_of

# Times that an error has to grow in one equation for that one to be at fault
_JUMP = 3.0
_SMALL = 0.2  # of the size of its terms: a sum as small as this cancels
_ROUNDING = 2.0**-24  # of float32
_ROUNDING_OF_MANY = 5 * _ROUNDING  # where each of many terms was rounded many times
_RUNNING = 8  # rounds of a loop in which an error grows, for a sum to stagnate
_NOTHING = 100  # times the size of what is lost, beside which that makes no difference
_SUMS = Is.ADDS_TWO | Is.ADDS_MANY


class Cause(NamedTuple):
    """Why a number is wrong.

    Attributes:
      how: what the equation does to the numbers, such as "overflows" or "cancels".
      note: of the equation.
      rounded: what it is sensitive to, and is rounded to 16 bits: the nearest products,
        and what lies between these and the equation.
    """

    how: str
    note: Note
    rounded: tuple[Note, ...] = ()


def cause_of(note: Note) -> Cause | None:
    """Why a result is off; None if float32 does not determine it either."""
    at_fault = _at_fault(_path(note))
    if at_fault is None:
        return Cause("adds up", note)
    if _is_undetermined(note, at_fault):
        return None
    how = _how(at_fault)
    saturated = next(filter(_saturates, at_fault.reads), None)
    if saturated and how != "overflows":
        return Cause("saturates", saturated)
    if how == "divides by what is lost":
        return Cause("vanishes", _first_lost(at_fault))
    if how not in ("cancels", "amplifies", "is undefined"):
        return Cause(how, at_fault)
    rounded = tuple(_rounded_before(at_fault))
    lost = next((one for one in rounded if one.lost > FIFTH), None)
    if how == "amplifies" and lost:
        return Cause("vanishes", lost)
    return Cause(how, at_fault, rounded)


def cause_in_float32(note: Note) -> Cause:
    """Why a result is not finite, of numbers in float32."""
    while True:
        reads = [read for read in note.reads if read.bad_true]
        nans = [read for read in reads if read.nan_true]
        if note.nan_true and nans:
            note = nans[0]
        elif reads and not (note.nan_true and _is_mask(note)):
            note = reads[0]
        else:
            return Cause("is undefined" if note.nan_true else "overflows", note)


def _is_mask(note: Note) -> bool:
    """Whether infinities that make a NaN are those of a mask, and not numbers of the model."""
    while not _is(note, Is.PRODUCT):  # before which no one masks
        reads = [read for read in note.reads if read.bad_true]
        if not reads:
            return not note.reads or note.place.primitive in ("select_n", "pad")
        (note, *_) = reads
    return False


def _path(note: Note) -> list[Note]:
    """From a result back along what is off the most, to where it is right."""
    path = [note]
    floor = _floor(path)
    while True:
        if is_narrow(note.dtype):
            floor = _floor([note])
        worst = _worst(note)
        if worst is None or worst.off <= (TOLERANCE if note.bad else floor):
            return path
        note = worst
        path.append(note)


def _worst(note: Note) -> Note | None:
    """The operand that is off the most; of a sum, the one by which the sum is off the most."""
    if not note.bad and _is(note, Is.ADDS_TWO | Is.CHOOSES):
        return max(note.reads, key=lambda read: (read.bad, read.apart), default=None)
    return max(note.reads, key=lambda read: (read.off, read.nan), default=None)


def _floor(path: Sequence[Note]) -> float:
    """How far a number may be off by one rounding to 16 bits."""
    halves = [note.dtype for note in path if is_narrow(note.dtype)]
    return 2 * float(jnp.finfo(halves[-1] if halves else jnp.float16).eps)


def _at_fault(path: Sequence[Note]) -> Note | None:
    """The equation in which an error grows most; None if it grows a little in many.

    What is made of numbers that are wrong already is not at fault, however much worse
    it is.
    """
    bad = [n for n, note in enumerate(path) if note.bad]
    if bad:
        made_of = path[bad[-1] + 1 :]
        return (_jump(made_of) or _running(made_of)) if made_of else path[bad[-1]]
    off = [n for n, note in enumerate(path) if note.off > TOLERANCE]
    first = path[off[-1] :] if off else path
    return _jump(first) or _running(first) or _jump(path) or _running(path)


def _jump(path: Sequence[Note]) -> Note | None:
    """The equation in which an error grows most, if it grows by much."""
    floor = _floor(path)
    # More than wholly wrong is no worse: the inverse of 256 for 5000 is off by 1800%.
    errors = [min(note.off, 1.0) for note in path]
    before = [max(error, floor) for error in (*errors[1:], floor)]
    growth = [error / least for error, least in zip(errors, before, strict=True)]
    most = max(growth)
    return path[growth.index(most)] if most >= _JUMP else None


def _running(path: Sequence[Note]) -> Note | None:
    """The sum in which an error grows a little in each of many rounds of a loop."""
    rounds = Counter(note.place.number for note in path if note.rounds)
    for number, count in rounds.most_common(1):
        sums = [
            note for note in path if note.place.number == number and _is(note, _SUMS)
        ]
        if count >= _RUNNING and sums:
            return sums[0]
    return None


def _how(note: Note) -> str:
    """What an equation does to numbers that are right."""
    is_in_loop = bool(note.rounds)
    narrow = is_narrow(note.dtype)
    if note.is_passed:
        return "is a kernel"
    if note.bad:
        return _how_not_finite(note)
    if _cancels(note):
        return "cancels"
    if narrow and _vanishes(note):
        return "vanishes"
    if (narrow and _is(note, Is.ADDS_MANY)) or (is_in_loop and _is(note, _SUMS)):
        return "stagnates"
    return "rounds" if narrow else "amplifies"


def _how_not_finite(note: Note) -> str:
    """What an equation does that is not finite where float32's is."""
    infinite, _ = limits(note.dtype)
    if note.largest >= infinite * (1 - TOLERANCE):
        return "overflows"
    if any(read.lost for read in note.reads):
        return "divides by what is lost"
    if any(map(_saturates, note.reads)):
        return "is undefined"
    return "overflows" if is_narrow(note.dtype) and not note.nan else "is undefined"


def _vanishes(note: Note) -> bool:
    """Whether numbers are below what their dtype holds, and matter beside the others."""
    _, tiny = limits(note.dtype)
    least = tiny * float(jnp.finfo(note.dtype).eps)
    mean = note.typical / math.sqrt(note.count)  # or more
    return note.typical < tiny or (note.lost > FIFTH and mean < _NOTHING * least)


def _is(note: Note, traits: Is) -> bool:
    """Whether the operation of a note has one of these traits."""
    return bool(traits_of(note.place.primitive) & traits)


def _saturates(note: Note) -> bool:
    """Whether a result in 16 bits is rounded to the limit of its function."""
    return is_narrow(note.dtype) and _is(note, Is.SATURATES)


def _terms(note: Note) -> float:
    """How large a sum of its terms would be, if they had all signs."""
    sizes = [read.typical for read in note.reads if read.typical]
    size = math.prod(sizes) if _is(note, Is.PRODUCT) else max(sizes, default=0.0)
    return size * math.sqrt(note.place.terms)


def _cancels(note: Note) -> bool:
    """Whether a result is small beside the terms that it is a sum of."""
    return _is(note, _SUMS | Is.PRODUCT) and note.typical < _SMALL * _terms(note)


def _is_undetermined(note: Note, at_fault: Note) -> bool:
    """Whether float32's rounding of the terms of a sum spoils a result of that, too.

    What is wrong with the result is in proportion to what is wrong with the sum.
    """
    if note.bad or at_fault.bad or not _cancels(at_fault):
        return False
    is_of_many = at_fault.place.is_derivative and at_fault.place.terms > 1
    rounding = _ROUNDING_OF_MANY if is_of_many else _ROUNDING
    apart = at_fault.distance / math.sqrt(at_fault.count)
    return note.off * rounding * _terms(at_fault) > TOLERANCE * apart


def _first_lost(note: Note) -> Note:
    """Where the numbers that are lost became zero, before a result."""
    note = max(note.reads, key=lambda read: read.lost)
    while True:
        lost = [read for read in note.reads if read.lost >= note.lost / 2]
        if not lost:
            return note
        note = lost[0]


def _rounded_before(note: Note) -> Iterator[Note]:
    """The products in 16 bits nearest before a result, and what is in 16 bits after them."""
    seen = {id(note)}
    left = list(note.reads)
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if is_narrow(one.dtype) and one.place.primitive:
            yield one
        if not (is_narrow(one.dtype) and _is(one, Is.PRODUCT)):
            left.extend(_that_count(one))


def _that_count(note: Note) -> Sequence[Note]:
    """The operands whose rounding counts: not a small term beside a large one."""
    if not _is(note, Is.ADDS_TWO):
        return note.reads
    least = _SMALL * max((read.typical for read in note.reads), default=0.0)
    return [read for read in note.reads if read.typical >= least]
