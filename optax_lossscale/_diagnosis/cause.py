"""Why a result is off: the equation at fault, and what it does to the numbers.

`fault` finds the equation whose result is off where its operands are not. What it does
follows from the figures of its note and of those that it reads. `How` lists what it may
do.
"""

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

from optax_lossscale._diagnosis.fault import at_fault, worst_read
from optax_lossscale._diagnosis.figures import LARGE_SHARE, TOLERANCE
from optax_lossscale._diagnosis.notes import (
    SUMS,
    Note,
    back_from,
    least_infinite,
    least_normal,
)
from optax_lossscale._diagnosis.paths import path_from
from optax_lossscale._programs.operations import Trait
from optax_lossscale._programs.values import is_narrow_dtype

_SMALL = 0.2  # a sum that is smaller than this, relative to its terms, cancels


class How(enum.StrEnum):
    """What the equation at fault does to the numbers, in the words of the page."""

    # Its result is out of range.
    OVERFLOWS = "overflows"
    VANISHES = "vanishes"  # to zero, or to where its dtype has hardly any digits
    SATURATES = "saturates"  # at the limit of its function, as a sigmoid does at 1
    # It adds.
    CANCELS = "cancels"  # the sum is small beside its terms: their rounding remains
    STAGNATES = "stagnates"  # a long sum in 16 bits, which further terms do not change
    # It is another operation, of operands that are right up to rounding.
    ROUNDS = "rounds"  # in 16 bits, in which its result needs more digits
    AMPLIFIES = "amplifies"  # in float32, the rounding of its operands
    IS_UNDEFINED = "is undefined"  # as the logarithm of what was rounded to below 0
    # No equation can be blamed.
    IS_A_KERNEL = "is a kernel"  # of which nothing but the result is seen
    IS_NOT_LINEAR = "is not linear"  # in the loss scale
    ADDS_UP = "adds up"  # a little is added in each of many equations


SENSITIVE = (How.CANCELS, How.ROUNDS, How.AMPLIFIES, How.IS_UNDEFINED)
"""What an equation does that more digits, in it or in its operands, would cure."""


class Cause(NamedTuple):
    """What makes a result wrong."""

    how: How
    note: Note  # of the equation at fault; of the result itself, if no equation is
    # The values in 16 bits to whose rounding that equation is sensitive
    rounded: tuple[Note, ...] = ()
    is_in_float32: bool = False  # whether the result is not finite in float32 either


def cause_of(note: Note) -> Cause:
    """Why a result is off from float32's.

    The equation at fault may only have moved numbers, or have a pole where numbers were
    lost or rounded to a limit. Then the earlier equation that made them so is named.
    """
    fault = at_fault(note)
    if fault is None:
        return Cause(How.ADDS_UP, note)
    if fault.stays_narrow:
        return Cause(How.IS_A_KERNEL, fault)
    how = _how_not_finite(fault) if fault.bad else _how_off(fault)
    if how is How.OVERFLOWS:
        return Cause(how, _computed(fault))
    if how is How.VANISHES and fault.bad:
        fault = _first_lost(max(fault.reads, key=lambda read: read.lost))
        if fault.is_any(Trait.ADDS_TWO):  # which gives 0 only for numbers that cancel
            how = How.CANCELS
    computed = _computed(fault)
    # The last is the first to be looked at.
    limits = back_from([*computed.reads, computed], _limits_in)
    saturated = next(filter(_saturates, limits), None)
    if saturated is not None:
        return Cause(How.SATURATES, saturated)
    if how in SENSITIVE:
        return _for_want_of_digits(how, computed)
    return Cause(how, computed)


def _for_want_of_digits(how: How, note: Note) -> Cause:
    """The cause if an equation is sensitive to rounding, or to numbers that were lost."""
    rounded = tuple(
        earlier
        for earlier in back_from(note.reads, _rounded_in)
        if is_narrow_dtype(earlier.dtype) and earlier.is_computed
    )
    lost = [earlier for earlier in rounded if earlier.lost > LARGE_SHARE]
    if how is How.AMPLIFIES and lost:
        return Cause(How.VANISHES, _first_lost(lost[0]))
    return Cause(how, note, rounded)


def cause_in_float32(note: Note) -> Cause:
    """Why a result is not finite in float32: the first equation that gives such numbers.

    If that is a kernel, which computes in 16 bits all the same, what float32 would give
    is not known.
    """
    first = path_from(note, _not_finite_before)[-1]
    if first.stays_narrow:
        return Cause(How.IS_A_KERNEL, first)
    how = How.IS_UNDEFINED if first.is_reference_nan else How.OVERFLOWS
    return Cause(how, first, is_in_float32=True)


def _not_finite_before(note: Note) -> Note | None:
    """The operand that makes a result not finite in float32, if one does.

    Infinities of a mask do not: where they give NaN, the equation that reads them does.
    """
    read = _not_finite(note)
    if not note.is_reference_nan:
        return read
    nans = (read for read in note.reads if read.is_reference_nan)
    return next(nans, None if _is_mask(note) else read)


def _not_finite(note: Note) -> Note | None:
    """The first operand that is not finite in float32."""
    return next((read for read in note.reads if not read.is_reference_finite), None)


def _is_mask(note: Note) -> bool:
    """Whether the infinities that make a NaN are a mask's, and not the model's own."""
    path = path_from(note, _not_finite)
    if any(on_path.is_any(Trait.PRODUCT) for on_path in path):
        return False  # masks come after products
    return not path[-1].reads or path[-1].is_any(Trait.FILLS)


# --- what the equation at fault does ---


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
    if _cancels(note):
        return How.CANCELS
    dtype = _computed(note).dtype
    is_narrow = is_narrow_dtype(dtype)
    if is_narrow and 0 < note.typical < least_normal(dtype):
        return How.VANISHES
    if not is_narrow:
        return How.AMPLIFIES
    is_sum_in_loop = note.rounds and note.is_any(SUMS)
    is_long_sum = is_sum_in_loop or note.is_any(Trait.ADDS_MANY)
    return How.STAGNATES if is_long_sum else How.ROUNDS


def _cancels(note: Note) -> bool:
    """Whether a result is a sum that is small beside its terms."""
    is_sum = note.is_any(SUMS | Trait.PRODUCT)
    return is_sum and note.typical < _SMALL * _size_of_terms(note)


def _size_of_terms(note: Note) -> float:
    """How large a sum of its terms would be if their signs were random."""
    sizes = [read.typical for read in note.reads if read.typical]
    size = math.prod(sizes) if note.is_any(Trait.PRODUCT) else max(sizes, default=0.0)
    return size * math.sqrt(note.origin.terms)


def _saturates(note: Note) -> bool:
    """Whether a result in 16 bits was rounded to its function's limit, 1 or 0."""
    may_saturate = is_narrow_dtype(note.dtype) and note.is_any(Trait.SATURATES)
    return may_saturate and (note.lost > 0 or note.at_limit)


# --- the notes before it ---


def _limits_in(note: Note) -> Sequence[Note]:
    """The operands at a limit from which a result may have taken its 1 or -1.

    A sum or product makes its own.
    """
    if note.is_any(SUMS | Trait.PRODUCT):
        return ()
    return [read for read in note.reads if read.at_limit]


def _computed(note: Note) -> Note:
    """The note of the equation that computed the numbers that others moved or chose.

    One that casts them to a dtype of 16 bits or fewer computes them.
    """
    while note.is_any(Trait.MOVES | Trait.CHOOSES) or not note.is_computed:
        read = worst_read(note)
        if read is None or read.is_argument:
            break
        if is_narrow_dtype(note.dtype) and note.dtype != read.dtype:
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


def _rounded_in(note: Note) -> Sequence[Note]:
    """The operands whose rounding counts in a result.

    A product in 16 bits rounds by itself, and so has none. Of a sum, terms that are small
    beside another are left out.
    """
    if is_narrow_dtype(note.dtype) and note.is_any(Trait.PRODUCT):
        return ()
    if not note.is_any(Trait.ADDS_TWO):
        return note.reads
    least = _SMALL * max((read.typical for read in note.reads), default=0.0)
    return [read for read in note.reads if read.typical >= least]
