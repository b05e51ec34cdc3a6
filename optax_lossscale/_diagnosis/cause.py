"""Why a result is off: the equation at fault, and what it does to the numbers.

From the note of the result, a path goes back along the operand that is off the most,
until that is off by a rounding only. In this path, the equation in which the error
grows most is at fault, if it grows by much. For `log(a - b)`, where `a` and `b` are
rounded to float16 and nearly equal, the path is the logarithm and the difference. The
error jumps in the difference, so that is at fault: it cancels.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from optax_lossscale._diagnosis.notes import FIFTH, TOLERANCE, Note, limits
from optax_lossscale._programs.operations import Is, traits_of
from optax_lossscale._programs.values import is_narrow

# An equation is at fault if the error grows by this factor in it.
_JUMP = 3.0
_SMALL = 0.2  # a sum that is smaller than this, relative to its terms, cancels
_ROUNDING = 2.0**-24  # the error of one rounding to float32
_ROUNDING_OF_MANY = 5 * _ROUNDING  # where each of many terms was rounded many times
_RUNNING = 8  # the rounds in which an error has to grow for a sum to stagnate
_NOTHING = 100  # beside numbers this many times larger, lost ones make no difference
_SUMS = Is.ADDS_TWO | Is.ADDS_MANY


class Cause(NamedTuple):
    """Why a number is wrong.

    Attributes:
      how: what the equation does to the numbers, such as "overflows" or "cancels".
      note: the note of the equation at fault.
      rounded: the values in 16 bits to whose rounding the equation is sensitive: the
        results of the nearest products, and what lies between these and the equation.
    """

    how: str
    note: Note
    rounded: tuple[Note, ...] = ()


def cause_of(note: Note) -> Cause | None:
    """Why a result is off from float32's; None if float32 does not determine it."""
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
    """Why a result is not finite in float32: the equation that was so first."""
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
    """Whether the infinities that make a NaN are a mask's, and not the model's own."""
    while not _is(note, Is.PRODUCT):  # masks come after products
        reads = [read for read in note.reads if read.bad_true]
        if not reads:
            return not note.reads or _is(note, Is.FILLS)
        (note, *_) = reads
    return False


def _path(note: Note) -> list[Note]:
    """The notes from a result back along what is off the most, while it is off."""
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
    """The operand that is off the most: for a sum, by its absolute distance."""
    if not note.bad and _is(note, Is.ADDS_TWO | Is.CHOOSES):
        return max(note.reads, key=lambda read: (read.bad, read.apart), default=None)
    return max(note.reads, key=lambda read: (read.off, read.nan), default=None)


def _floor(path: Sequence[Note]) -> float:
    """The error up to which a number counts as merely rounded to 16 bits."""
    halves = [note.dtype for note in path if is_narrow(note.dtype)]
    return 2 * float(jnp.finfo(halves[-1] if halves else jnp.float16).eps)


def _at_fault(path: Sequence[Note]) -> Note | None:
    """The note of the equation in which an error grows; None if it grows in many.

    An equation whose operands are wrong already is not at fault, however much worse its
    result is.
    """
    bad = [n for n, note in enumerate(path) if note.bad]
    if bad:
        made_of = path[bad[-1] + 1 :]
        return (_jump(made_of) or _running(made_of)) if made_of else path[bad[-1]]
    off = [n for n, note in enumerate(path) if note.off > TOLERANCE]
    first = path[off[-1] :] if off else path
    return _jump(first) or _running(first) or _jump(path) or _running(path)


def _jump(path: Sequence[Note]) -> Note | None:
    """The note of the equation in which an error grows most, if by `_JUMP` or more."""
    floor = _floor(path)
    # An error above 100% counts as 100%: 1/256 in the place of 1/5000 is off by 1800%.
    errors = [min(note.off, 1.0) for note in path]
    before = [max(error, floor) for error in (*errors[1:], floor)]
    growth = [error / least for error, least in zip(errors, before, strict=True)]
    most = max(growth)
    return path[growth.index(most)] if most >= _JUMP else None


def _running(path: Sequence[Note]) -> Note | None:
    """The note of a sum in which an error grows a little in each of many rounds."""
    rounds = Counter(note.place.number for note in path if note.rounds)
    for number, count in rounds.most_common(1):
        sums = [
            note for note in path if note.place.number == number and _is(note, _SUMS)
        ]
        if count >= _RUNNING and sums:
            return sums[0]
    return None


def _how(note: Note) -> str:
    """What the equation at fault does to its operands, in the words of the report."""
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
    """What an equation does whose result is not finite where float32's is."""
    infinite, _ = limits(note.dtype)
    if note.largest >= infinite * (1 - TOLERANCE):
        return "overflows"
    if any(read.lost for read in note.reads):
        return "divides by what is lost"
    if any(map(_saturates, note.reads)):
        return "is undefined"
    return "overflows" if is_narrow(note.dtype) and not note.nan else "is undefined"


def _vanishes(note: Note) -> bool:
    """Whether numbers were lost, or are too small for their dtype, and matter."""
    _, tiny = limits(note.dtype)
    least = tiny * float(jnp.finfo(note.dtype).eps)
    mean = note.typical / math.sqrt(note.count)  # or more, of the absolute values
    return note.typical < tiny or (note.lost > FIFTH and mean < _NOTHING * least)


def _is(note: Note, traits: Is) -> bool:
    """Whether the operation of a note has any of these traits."""
    return bool(traits_of(note.place.primitive) & traits)


def _saturates(note: Note) -> bool:
    """Whether a result in 16 bits may have been rounded to its function's limit."""
    return is_narrow(note.dtype) and _is(note, Is.SATURATES)


def _terms(note: Note) -> float:
    """How large a sum of its terms would be if their signs were random."""
    sizes = [read.typical for read in note.reads if read.typical]
    size = math.prod(sizes) if _is(note, Is.PRODUCT) else max(sizes, default=0.0)
    return size * math.sqrt(note.place.terms)


def _cancels(note: Note) -> bool:
    """Whether a result is a sum that is small beside its terms."""
    return _is(note, _SUMS | Is.PRODUCT) and note.typical < _SMALL * _terms(note)


def _is_undetermined(note: Note, at_fault: Note) -> bool:
    """Whether float32's own rounding of a sum that cancels spoils a result as well.

    It is computed from the rounding of 16 bits: the error of the result is taken to be
    in proportion to that of the sum.

    Args:
      note: the result.
      at_fault: the sum.
    """
    if note.bad or at_fault.bad or not _cancels(at_fault):
        return False
    is_of_many = at_fault.place.is_derivative and at_fault.place.terms > 1
    rounding = _ROUNDING_OF_MANY if is_of_many else _ROUNDING
    apart = at_fault.distance / math.sqrt(at_fault.count)
    return note.off * rounding * _terms(at_fault) > TOLERANCE * apart


def _first_lost(note: Note) -> Note:
    """The note in which the numbers that a result lacks became zero."""
    note = max(note.reads, key=lambda read: read.lost)
    while True:
        lost = [read for read in note.reads if read.lost >= note.lost / 2]
        if not lost:
            return note
        note = lost[0]


def _rounded_before(note: Note) -> Iterator[Note]:
    """The nearest products in 16 bits before a result, and what is narrow since."""
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
    """The operands whose rounding counts: not a term that is small beside another."""
    if not _is(note, Is.ADDS_TWO):
        return note.reads
    least = _SMALL * max((read.typical for read in note.reads), default=0.0)
    return [read for read in note.reads if read.typical >= least]
