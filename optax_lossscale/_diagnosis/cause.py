"""Why a result is off: the equation at fault, and what it does to the numbers.

`fault` finds the equation whose result is off where its operands are not. What it does
follows from the figures of its note and of those that it reads. The difference of two
large numbers that is small, and off by their rounding, *cancels*. A sum of many terms in
16 bits *stagnates*. Results that became 0 *vanish*.
"""

import enum
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.fault import at_fault, worst_read
from optax_lossscale._diagnosis.figures import LARGE_SHARE, TOLERANCE
from optax_lossscale._diagnosis.notes import (
    SUMS,
    Note,
    all_before,
    least_infinite,
    least_normal,
)
from optax_lossscale._programs.operations import Trait
from optax_lossscale._programs.values import is_narrow_dtype

_SMALL = 0.2  # a sum that is smaller than this, relative to its terms, cancels
_ROUNDING = 2.0**-16  # the least error of rounding, relative: less than float16's
# Numbers lost to 0 do not matter if the mean is this many times the dtype's smallest
# number.
_NOTHING = 100


class How(enum.StrEnum):
    """What the equation at fault does to the numbers, in the words of the page."""

    OVERFLOWS = "overflows"
    VANISHES = "vanishes"  # its numbers become zero, or too small for their dtype
    CANCELS = "cancels"  # a small difference of large numbers leaves their rounding
    STAGNATES = "stagnates"  # a long sum in 16 bits ignores further terms
    SATURATES = "saturates"  # it is rounded to its function's limit
    ROUNDS = "rounds"  # its result has too few digits
    AMPLIFIES = "amplifies"  # its operands have too few digits
    IS_UNDEFINED = "is undefined"  # as the logarithm of a number rounded below 0
    IS_A_KERNEL = "is a kernel"  # no one sees what it computes
    IS_NOT_LINEAR = "is not linear"  # in the loss scale
    ADDS_UP = "adds up"  # the error of many equations, none of which is at fault


SENSITIVE = (How.CANCELS, How.ROUNDS, How.AMPLIFIES, How.IS_UNDEFINED)
"""What an equation does to numbers for want of digits, in it or in its operands."""


class Cause(NamedTuple):
    """What makes a result wrong."""

    how: How
    note: Note  # of the equation at fault; of the result itself, if none is
    # The values in 16 bits to whose rounding that equation is sensitive
    rounded: tuple[Note, ...] = ()
    is_in_float32: bool = False  # whether the result is not finite in float32 either


def cause_of(note: Note) -> Cause:
    """Why a result is off from float32's."""
    fault = at_fault(note)
    if fault is None:
        return Cause(How.ADDS_UP, note)
    how, fault = _how(fault)
    if how not in SENSITIVE:
        return Cause(how, fault)
    rounded = tuple(_rounded_before(fault))
    lost = [earlier for earlier in rounded if earlier.lost > LARGE_SHARE]
    if how is How.AMPLIFIES and lost:
        return Cause(How.VANISHES, _first_lost(lost[0]))
    return Cause(how, fault, rounded)


def cause_in_float32(note: Note) -> Cause:
    """Why a result is not finite in float32: the first equation that gives such numbers.

    If that is a kernel, which computes in 16 bits all the same, what float32 would give
    is not known.
    """
    while True:
        reads = _not_finite(note)
        nans = [read for read in reads if read.is_reference_nan]
        if note.is_reference_nan and nans:
            note = nans[0]
        elif reads and not (note.is_reference_nan and _is_mask(note)):
            note = reads[0]
        else:
            break
    if note.stays_narrow:
        return Cause(How.IS_A_KERNEL, note)
    how = How.IS_UNDEFINED if note.is_reference_nan else How.OVERFLOWS
    return Cause(how, note, is_in_float32=True)


def _is_mask(note: Note) -> bool:
    """Whether the infinities that make a NaN are a mask's, and not the model's own."""
    while not note.is_any(Trait.PRODUCT):  # masks come after products
        reads = _not_finite(note)
        if not reads:
            return not note.reads or note.is_any(Trait.FILLS)
        note = reads[0]
    return False


def _not_finite(note: Note) -> list[Note]:
    """The operands that are not finite in float32."""
    return [read for read in note.reads if not read.is_reference_finite]


# --- what the equation at fault does ---


def _how(note: Note) -> tuple[How, Note]:
    """What is wrong at the equation at fault, with the note of what makes it so.

    That is an earlier equation if it made the numbers that this one only moves, lost
    those that this one needs, or rounded them to a limit.
    """
    if note.stays_narrow:
        return How.IS_A_KERNEL, note
    how = _how_not_finite(note) if note.bad else _how_off(note)
    if note.bad and how is How.VANISHES:
        note = _first_lost(max(note.reads, key=lambda read: read.lost))
    made = _computed(note)
    if how is How.OVERFLOWS:
        return how, made
    may_saturate = [made, *made.reads] if how is How.VANISHES else made.reads
    for candidate in may_saturate:
        if _saturates(candidate):
            return How.SATURATES, candidate
    return how, made


def _how_not_finite(note: Note) -> How:
    """What an equation does whose result is not finite where float32's is."""
    infinite = least_infinite(note.dtype)
    if note.largest >= infinite * (1 - TOLERANCE):
        return How.OVERFLOWS
    if any(read.lost for read in note.reads):
        return How.VANISHES
    # What a sum adds may overflow before the result. Other operations have a pole at
    # what their operands are rounded to.
    is_infinite = is_narrow_dtype(note.dtype) and not note.nan
    is_sum = note.is_any(SUMS | Trait.PRODUCT)
    return How.OVERFLOWS if is_infinite and is_sum else How.IS_UNDEFINED


def _how_off(note: Note) -> How:
    """What an equation does whose result is off, but finite."""
    dtype = _computed(note).dtype
    if _cancels(note):
        return How.CANCELS
    if is_narrow_dtype(dtype) and _vanishes(note, dtype):
        return How.VANISHES
    is_sum_of_many = is_narrow_dtype(dtype) and note.is_any(Trait.ADDS_MANY)
    is_sum_of_rounds = note.rounds and note.is_any(SUMS)
    if is_sum_of_many or is_sum_of_rounds:
        return How.STAGNATES
    return How.ROUNDS if is_narrow_dtype(dtype) else How.AMPLIFIES


def _cancels(note: Note) -> bool:
    """Whether a result is a sum that is small beside its terms, and off by their rounding.

    A sum of which most terms are 0 is small as well. It does not cancel: its error is
    far below the rounding of large terms.
    """
    if not note.is_any(SUMS | Trait.PRODUCT):
        return False
    terms = _size_of_terms(note)
    rounding = note.distance / math.sqrt(note.count)
    return note.typical < _SMALL * terms and rounding > _ROUNDING * terms


def _size_of_terms(note: Note) -> float:
    """How large a sum of its terms would be if their signs were random."""
    sizes = [read.typical for read in note.reads if read.typical]
    size = math.prod(sizes) if note.is_any(Trait.PRODUCT) else max(sizes, default=0.0)
    return size * math.sqrt(note.place.terms)


def _vanishes(note: Note, dtype: np.dtype) -> bool:
    """Whether numbers were lost, or are too small for their dtype, and matter."""
    tiny = least_normal(dtype)
    least = tiny * float(jnp.finfo(dtype).eps)
    # The mean of the absolute values is at least this.
    mean = note.typical / math.sqrt(note.count)
    is_too_small = 0 < note.typical < tiny
    are_lost = note.lost > LARGE_SHARE and mean < _NOTHING * least
    return is_too_small or are_lost


def _saturates(note: Note) -> bool:
    """Whether a result in 16 bits was rounded to its function's limit, 1 or 0."""
    may_saturate = is_narrow_dtype(note.dtype) and note.is_any(Trait.SATURATES)
    return may_saturate and (note.lost > 0 or note.at_limit)


# --- the notes before it ---


def _computed(note: Note) -> Note:
    """The note of the equation that computed the numbers that others moved or chose.

    One that moves them into 16 bits, as a cast does, computes them.
    """
    while note.is_any(Trait.MOVES | Trait.CHOOSES) or not note.is_computed:
        read = worst_read(note)
        if read is None or read.is_argument:
            break
        if is_narrow_dtype(note.dtype) and not is_narrow_dtype(read.dtype):
            break
        note = read
    return note


def _first_lost(note: Note) -> Note:
    """The note in which the numbers that a result has lost became zero."""
    while True:
        lost = [read for read in note.reads if read.lost >= note.lost / 2]
        if not lost:
            return note
        note = lost[0]


def _rounded_before(note: Note) -> Iterator[Note]:
    """The nearest products in 16 bits before a result, and what is narrow since."""
    for earlier in all_before(note.reads, _rounded_in):
        if is_narrow_dtype(earlier.dtype) and earlier.is_computed:
            yield earlier


def _rounded_in(note: Note) -> Sequence[Note]:
    """The operands whose rounding counts in a result.

    None does in a product in 16 bits, nor a term that is small beside another.
    """
    if is_narrow_dtype(note.dtype) and note.is_any(Trait.PRODUCT):
        return ()
    if not note.is_any(Trait.ADDS_TWO):
        return note.reads
    least = _SMALL * max((read.typical for read in note.reads), default=0.0)
    return [read for read in note.reads if read.typical >= least]
