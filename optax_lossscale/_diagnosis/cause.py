"""Where a wrong number comes from: back along what is off the most, to where it is right."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from optax_lossscale._diagnosis.notes import FIFTH, TOLERANCE, Note, limits
from optax_lossscale._diagnosis.wide import is_narrow
from optax_lossscale._programs.operations import Is, traits_of

_JUMP = 3.0  # times that an error has to grow in one equation for that one to be at fault
_SMALL = 0.2  # of the size of its terms: a sum as small as this cancels
_ROUNDING = 2.0**-24  # of float32
_KNOWN = 20  # times float32's rounding of its terms, above which float32 determines a sum
_RUNNING = 8  # rounds of a loop in which an error grows, for a sum to stagnate


class Cause(NamedTuple):
    """Why a number is wrong.

    Attributes:
      how: what the equation does to the numbers, such as "overflows" or "cancels".
      note: of the equation.
      products: those in 16 bits that round what it is sensitive to.
    """

    how: str
    note: Note
    products: tuple[Note, ...] = ()


def cause_of(note: Note) -> Cause | None:
    """Why a result is off; None if float32 does not determine it either."""
    path = _path(note)
    finite = [one for one in path if not one.bad]
    at_fault = _at_fault(finite, note) if finite else path[-1]
    if at_fault is None:
        return Cause("adds up", note, ())
    if not at_fault.bad and _is_undetermined(at_fault):
        return None
    how = _how(at_fault)
    saturated = [read for read in at_fault.reads if _saturates(read)]
    if how == "cancels" and saturated:
        return Cause("saturates", saturated[0])
    if how == "divides by what is lost":
        lost = max(at_fault.reads, key=lambda read: read.lost)
        return Cause("vanishes", _first_lost(lost))
    is_sensitive = how in ("cancels", "amplifies", "is undefined")
    return Cause(how, at_fault, _products(at_fault) if is_sensitive else ())


def cause_in_float32(note: Note) -> Cause:
    """Why a result is not finite, of numbers in float32."""
    while True:
        reads = [read for read in note.reads if read.bad_true]
        nans = [read for read in reads if read.nan_true]
        if note.nan_true and nans:
            note = nans[0]
        elif reads and (not note.nan_true or not _is_mask(reads[0])):
            note = reads[0]
        else:
            return Cause("is undefined" if note.nan_true else "overflows", note)


def _is_mask(note: Note) -> bool:
    """Whether infinities come from no finite number: those of a mask."""
    while True:
        reads = [read for read in note.reads if read.bad_true]
        if not reads:
            return not note.reads or note.place.primitive in ("select_n", "pad")
        note = reads[0]


def _path(note: Note) -> list[Note]:
    """From a result back along what is off the most, to where it is right."""
    path = [note]
    floor = _floor(path)
    while True:
        floor = _floor([note]) if is_narrow(note.dtype) else floor
        worst = max(note.reads, key=_weight(note), default=None)
        limit = TOLERANCE if note.bad else floor
        if worst is None or not worst.off > limit:
            return path
        note = worst
        path.append(note)


def _weight(note: Note) -> Callable[[Note], Any]:
    """By what the operands of a result are compared: those of a sum by all that they are off."""
    if note.bad or not traits_of(note.place.primitive) & (Is.ADDS_TWO | Is.CHOOSES):
        return lambda read: (read.off, read.nan)
    return lambda read: (read.bad, read.apart)


def _floor(path: Sequence[Note]) -> float:
    """How far a number may be off by one rounding to 16 bits."""
    halves = [note.dtype for note in path if is_narrow(note.dtype)]
    return 2 * float(jnp.finfo(halves[-1] if halves else jnp.float16).eps)


def _at_fault(path: Sequence[Note], result: Note) -> Note | None:
    """The equation in which an error grows most; None if it grows a little in many."""
    floor = _floor(path)
    before = [note.off for note in path[1:]] + [floor]
    growth = [note.off / max(off, floor) for note, off in zip(path, before, strict=True)]
    most = max(growth)
    if most >= _JUMP:
        return path[growth.index(most)]
    rounds = Counter(note.number for note in path if note.rounds)
    number, count = rounds.most_common(1)[0] if rounds else (0, 0)
    is_sum = lambda note: traits_of(note.place.primitive) & (Is.ADDS_TWO | Is.ADDS_MANY)
    running = [note for note in path if note.number == number and is_sum(note)]
    return running[0] if running and count >= _RUNNING else None


def _how(note: Note) -> str:
    """What an equation does to numbers that are right."""
    traits = traits_of(note.place.primitive)
    narrow = is_narrow(note.dtype)
    infinite, tiny = limits(note.dtype)
    if note.place.is_passed:
        return "is a kernel"
    if note.bad and note.largest >= infinite * (1 - TOLERANCE):
        return "overflows"
    if note.bad and any(read.lost for read in note.reads):
        return "divides by what is lost"
    if note.bad:
        return "overflows" if narrow and not note.nan else "is undefined"
    if _cancels(note):
        return "cancels"
    if narrow and (note.lost > FIFTH or note.typical < tiny):
        return "vanishes"
    if (narrow and Is.ADDS_MANY in traits) or (len(note.rounds) and traits & Is.ADDS_TWO):
        return "stagnates"
    return "rounds" if narrow else "amplifies"


def _saturates(note: Note) -> bool:
    """Whether a result in 16 bits is rounded to the limit of its function."""
    return is_narrow(note.dtype) and Is.SATURATES in traits_of(note.place.primitive)


def _terms(note: Note) -> float:
    """How large a sum of its terms would be, if they had all signs."""
    sizes = [read.typical for read in note.reads if read.typical]
    is_product = Is.PRODUCT in traits_of(note.place.primitive)
    size = math.prod(sizes) if is_product else max(sizes, default=0.0)
    return size * math.sqrt(note.place.terms)


def _cancels(note: Note) -> bool:
    """Whether a result is small beside the terms that it is a sum of."""
    traits = traits_of(note.place.primitive)
    is_sum = traits & (Is.ADDS_TWO | Is.ADDS_MANY | Is.PRODUCT)
    return bool(is_sum) and note.typical < _SMALL * _terms(note)


def _is_undetermined(note: Note) -> bool:
    """Whether a sum is nothing but float32's rounding of its terms."""
    return _cancels(note) and note.typical < _KNOWN * _ROUNDING * _terms(note)


def _first_lost(note: Note) -> Note:
    """Where numbers that are lost became zero."""
    while True:
        lost = [read for read in note.reads if read.lost >= note.lost / 2]
        if not lost:
            return note
        note = lost[0]


def _products(note: Note) -> tuple[Note, ...]:
    """The products in 16 bits nearest before a result."""
    products: dict[str, Note] = {}
    seen = {id(note)}
    left = list(note.reads)
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if is_narrow(one.dtype) and Is.PRODUCT in traits_of(one.place.primitive):
            products.setdefault(one.place.source, one)
        else:
            left.extend(one.reads)
    return tuple(products.values())
