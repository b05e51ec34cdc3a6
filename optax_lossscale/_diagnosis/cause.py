"""Why a result is off: the equation at fault, and what it does to the numbers.

From the note of the result, a path goes back along the operand that is off the most,
until that is off by a rounding only. In this path, the equation in which the error
grows most is at fault, if it grows by much. For `log(a - b)`, where `a` and `b` are
rounded to float16 and nearly equal, the path is the logarithm and the difference. The
error jumps in the difference, so that is at fault: it cancels.
"""

import enum
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.notes import FIFTH, Note, all_before, limits
from optax_lossscale._programs.operations import Is
from optax_lossscale._programs.values import HALVES, is_narrow_dtype

# An equation is at fault if the error grows by this factor in it.
_JUMP = 3.0
_SMALL = 0.2  # a sum that is smaller than this, relative to its terms, cancels
_ROUNDING = 2.0**-16  # the least error of rounding, relative: less than float16's
_RUNNING = 8  # the rounds in which an error has to grow for a sum to stagnate
_NOTHING = 100  # beside numbers this many times larger, lost ones make no difference
_SUMS = Is.ADDS_TWO | Is.ADDS_MANY


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


_SENSITIVE = (How.CANCELS, How.ROUNDS, How.AMPLIFIES, How.IS_UNDEFINED)


class Wrong(NamedTuple):
    """A result that is off from float32, and why.

    Attributes:
      name: "the loss", the parameter whose gradient it is, or "a value inside".
      off: how far it is from float32's, relative to it; 1 if float32's is 0, and infinite
        if either is not finite. For a value inside, the share of its numbers that are
        off by more than 5%.
      how: what the equation at fault does to the numbers: "overflows", "vanishes",
        "cancels", "stagnates", "saturates", "rounds", "amplifies", "is undefined",
        "is a kernel", "is not linear" in the loss scale, or "adds up" if no equation is
        at fault.
      place: the equation at fault.
      rounded: the values in 16 bits to whose rounding that equation is sensitive: the
        results of the nearest products, and what lies between these and the equation.
      is_inner: whether it is in a derivative that the loss function itself takes.
      is_in_float32: whether the result is not finite in float32 either.
    """

    name: str
    off: float
    how: How
    place: Note
    rounded: tuple[Note, ...] = ()
    is_inner: bool = False
    is_in_float32: bool = False

    @property
    def because(self) -> str:
        """The equation at fault and what it does, as the end of a sentence."""
        if self.how is How.ADDS_UP:
            return "rounding adds up over many lines"
        if self.place.is_argument:
            return f"there are NaNs or infinities in {self.place}"
        return f"{self.place} {self.how}"


def cause_of(name: str, note: Note) -> Wrong:
    """Why the result of a name is off."""
    at_fault = _at_fault(_path(note))
    if at_fault is None:
        return Wrong(name, note.error, How.ADDS_UP, note)
    how, place = _how(at_fault)
    rounded = tuple(_rounded_before(place)) if how in _SENSITIVE else ()
    lost = [one for one in rounded if one.lost > FIFTH]
    if how is How.AMPLIFIES and lost:
        return Wrong(name, note.error, How.VANISHES, _first_lost(lost[0]))
    return Wrong(name, note.error, how, place, rounded)


def cause_in_float32(name: str, note: Note) -> Wrong:
    """Why a result is not finite in float32: the equation that was so first.

    If that computes in 16 bits all the same, as a kernel does, float32 is not known.
    """
    while True:
        reads = [read for read in note.reads if not read.is_finite]
        nans = [read for read in reads if read.nan_true]
        if note.nan_true and nans:
            note = nans[0]
        elif reads and not (note.nan_true and _is_mask(note)):
            note = reads[0]
        else:
            break
    if note.is_passed:
        return Wrong(name, math.inf, How.IS_A_KERNEL, note)
    how = How.IS_UNDEFINED if note.nan_true else How.OVERFLOWS
    return Wrong(name, math.inf, how, note, is_in_float32=True)


def _is_mask(note: Note) -> bool:
    """Whether the infinities that make a NaN are a mask's, and not the model's own."""
    while not note.is_any(Is.PRODUCT):  # masks come after products
        reads = [read for read in note.reads if not read.is_finite]
        if not reads:
            return not note.reads or note.is_any(Is.FILLS)
        (note, *_) = reads
    return False


def _path(note: Note) -> list[Note]:
    """The notes from a result back along what is off the most, while it is off."""
    path = [note]
    while True:
        worst = _worst(note)
        floor = TOLERANCE if note.bad else _floor(path)
        if worst is None or worst.error <= floor:
            return path
        note = worst
        path.append(note)


def _worst(note: Note) -> Note | None:
    """The operand that is off the most: for a sum, by its absolute distance."""
    if not note.bad and note.is_any(Is.ADDS_TWO | Is.CHOOSES):
        return max(note.reads, key=lambda read: read.distance, default=None)
    return max(note.reads, key=lambda read: (read.error, read.nan), default=None)


def _floor(path: Sequence[Note]) -> float:
    """The error up to which a number counts as merely rounded to 16 bits."""
    halves = (note.dtype for note in reversed(path) if note.dtype in HALVES)
    return 2 * float(jnp.finfo(next(halves, jnp.float16)).eps)


def _at_fault(path: Sequence[Note]) -> Note | None:
    """The note of the equation in which an error grows; None if it grows in many.

    An equation whose operands are wrong already is not at fault, however much worse its
    result is.
    """
    bad = [n for n, note in enumerate(path) if note.bad]
    if bad:
        made_of = path[bad[-1] + 1 :]
        return (_jump(made_of) or _running(made_of)) if made_of else path[bad[-1]]
    off = [n for n, note in enumerate(path) if note.error > TOLERANCE]
    first = path[off[-1] :] if off else path
    return _jump(first) or _running(first)


def _jump(path: Sequence[Note]) -> Note | None:
    """The note of the equation in which an error grows most, if by `_JUMP` or more."""
    floor = _floor(path)
    # An error above 100% counts as 100%: 1/256 in the place of 1/5000 is off by 1800%.
    errors = [min(note.error, 1.0) for note in path]
    before = [max(error, floor) for error in (*errors[1:], floor)]
    growth = [error / least for error, least in zip(errors, before, strict=True)]
    most = max(growth)
    return path[growth.index(most)] if most >= _JUMP else None


def _running(path: Sequence[Note]) -> Note | None:
    """The note of a sum in which an error grows a little in each of many rounds."""
    rounds = Counter(note.place for note in path if note.rounds)
    for place, count in rounds.most_common(1):
        sums = [n for n in path if n.place is place and n.is_any(_SUMS)]
        if count >= _RUNNING and sums:
            return sums[0]
    return None


def _how(note: Note) -> tuple[How, Note]:
    """What the equation at fault does, or one before it, which is then at fault."""
    if note.is_passed:
        return How.IS_A_KERNEL, note
    how = _how_not_finite(note) if note.bad else _how_off(note)
    if note.bad and how is How.VANISHES:
        note = _first_lost(max(note.reads, key=lambda read: read.lost))
    made = _computed(note)
    at_fault = (made, *made.reads) if how is How.VANISHES else made.reads
    saturated = [one for one in at_fault if _saturates(one)]
    if saturated and how is not How.OVERFLOWS:
        return How.SATURATES, saturated[0]
    return how, made


def _computed(note: Note) -> Note:
    """The note of the equation that computed the numbers that others moved or chose.

    One that moves them into 16 bits, as a cast does, computes them.
    """
    while note.is_any(Is.MOVES | Is.CHOOSES) or not note.is_computed:
        read = _worst(note)
        if read is None or read.is_argument:
            break
        if is_narrow_dtype(note.dtype) and not is_narrow_dtype(read.dtype):
            break
        note = read
    return note


def _how_off(note: Note) -> How:
    """What an equation does whose result is off, but finite."""
    dtype = _computed(note).dtype
    narrow = is_narrow_dtype(dtype)
    if _cancels(note):
        return How.CANCELS
    if narrow and _vanishes(note, dtype):
        return How.VANISHES
    is_long = (narrow and note.is_any(Is.ADDS_MANY)) or (
        note.rounds and note.is_any(_SUMS)
    )
    if is_long:
        return How.STAGNATES
    return How.ROUNDS if narrow else How.AMPLIFIES


def _how_not_finite(note: Note) -> How:
    """What an equation does whose result is not finite where float32's is."""
    infinite, _ = limits(note.dtype)
    if note.largest >= infinite * (1 - TOLERANCE):
        return How.OVERFLOWS
    if any(read.lost for read in note.reads):
        return How.VANISHES
    # What a sum adds may overflow before the result. Other operations have a pole at
    # what their operands are rounded to.
    is_infinite = is_narrow_dtype(note.dtype) and not note.nan
    is_sum = note.is_any(_SUMS | Is.PRODUCT)
    return How.OVERFLOWS if is_infinite and is_sum else How.IS_UNDEFINED


def _vanishes(note: Note, dtype: np.dtype) -> bool:
    """Whether numbers were lost, or are too small for their dtype, and matter."""
    _, tiny = limits(dtype)
    least = tiny * float(jnp.finfo(dtype).eps)
    # The mean of the absolute values is this or more.
    mean = note.typical / math.sqrt(note.count)
    return 0 < note.typical < tiny or (note.lost > FIFTH and mean < _NOTHING * least)


def _saturates(note: Note) -> bool:
    """Whether a result in 16 bits was rounded to its function's limit, 1 or 0."""
    if not (is_narrow_dtype(note.dtype) and note.is_any(Is.SATURATES)):
        return False
    return note.lost > 0 or note.at_limit


def _terms(note: Note) -> float:
    """How large a sum of its terms would be if their signs were random."""
    sizes = [read.typical for read in note.reads if read.typical]
    size = math.prod(sizes) if note.is_any(Is.PRODUCT) else max(sizes, default=0.0)
    return size * math.sqrt(note.place.terms)


def _cancels(note: Note) -> bool:
    """Whether a result is a sum that is small beside its terms, and off by their rounding.

    Where most terms are 0, as in a product with rows of zeros, the terms that count may
    be smaller than they seem, and have vanished.
    """
    if not note.is_any(_SUMS | Is.PRODUCT):
        return False
    terms = _terms(note)
    rounding = note.distance / math.sqrt(note.count)
    return note.typical < _SMALL * terms and rounding > _ROUNDING * terms


def _first_lost(note: Note) -> Note:
    """The note in which the numbers that a result has lost became zero."""
    while True:
        lost = [read for read in note.reads if read.lost >= note.lost / 2]
        if not lost:
            return note
        note = lost[0]


def _rounded_before(note: Note) -> Iterator[Note]:
    """The nearest products in 16 bits before a result, and what is narrow since."""
    for one in all_before(note.reads, _rounded_in):
        if is_narrow_dtype(one.dtype) and one.is_computed:
            yield one


def _rounded_in(note: Note) -> Sequence[Note]:
    """The operands whose rounding counts in a result.

    None does in a product in 16 bits, nor a term that is small beside another.
    """
    if is_narrow_dtype(note.dtype) and note.is_any(Is.PRODUCT):
        return ()
    if not note.is_any(Is.ADDS_TWO):
        return note.reads
    least = _SMALL * max((read.typical for read in note.reads), default=0.0)
    return [read for read in note.reads if read.typical >= least]
