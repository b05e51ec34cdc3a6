"""Why a result is off: the equation at fault, and what goes wrong in it.

`fault.py` finds the equation whose result is off although its operands are not. This
file classifies what that equation does, as a member of `How`, because the remedy
depends on it. For example, a difference *cancels* if it is far smaller than its
operands. What remains is mostly their rounding errors, so the operands must be computed
in float32. A cast to float16 whose result is infinite *overflows*, so it needs float32
or a smaller operand. If the equation only moved or chose elements, the earlier equation
that computed these elements is named instead.

All of this is read from the *notes* of the result and of its operands, which record
their errors and magnitudes (see `notes.py`).
"""

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

from optax_lossscale._diagnosis.fault import at_fault, worst_operand
from optax_lossscale._diagnosis.figures import LARGE_SHARE, TOLERANCE
from optax_lossscale._diagnosis.notes import (
    SUMS,
    Note,
    back_from,
    least_infinite,
    least_normal,
)
from optax_lossscale._diagnosis.old_operations import Trait
from optax_lossscale._diagnosis.paths import path_from
from optax_lossscale._programs.values import is_narrow_dtype

# Below this fraction, a sum or a term counts as small: a sum cancels if it is smaller
# than this fraction of `size_of_sum`, and a term that is smaller than this fraction of
# the largest term hardly contributes. A heuristic: a larger value flags sums whose
# terms merely have random signs, and a smaller one misses sums in which only a few bits
# cancel.
_SMALL = 0.2


class How(enum.StrEnum):
    """What goes wrong in the equation at fault.

    The value of each member is what `Wrong.how` holds, such as "overflows". A report
    says it as a sentence, as in "exp at model.py:12 (f) overflows", with more words
    where `predicate` has them. `ADDS_UP` has a sentence of its own in `Wrong.because`.

    Attributes:
      OVERFLOWS: its result, or a partial sum of it, is above the range of its dtype.
      VANISHES: its result is 0, or below the normal numbers of its dtype.
      SATURATES: it rounds its result to a limit of its function, as a sigmoid to 1.
      CANCELS: it is a sum that is small beside its terms, so what remains is mostly the
        rounding errors of the terms.
      STAGNATES: it sums so many terms in 16 bits that further terms are lost beside the
        sum.
      ROUNDS: it rounds its result to 16 bits, which are too few for this result.
      AMPLIFIES: it computes in float32, but enlarges the rounding errors of its
        operands.
      IS_UNDEFINED: it has no finite value for its operands, like the logarithm of a
        number that rounding has made negative.
      IS_A_KERNEL: it is a kernel, of which only the results are known.
      IS_NOT_LINEAR: its result is not proportional to the loss scale.
      ADDS_UP: no equation is at fault, because each of many makes a small error.
    """

    OVERFLOWS = "overflows"
    VANISHES = "vanishes"
    SATURATES = "saturates"
    CANCELS = "cancels"
    STAGNATES = "stagnates"
    ROUNDS = "rounds"
    AMPLIFIES = "amplifies"
    IS_UNDEFINED = "is undefined"
    IS_A_KERNEL = "is a kernel"
    IS_NOT_LINEAR = "is not linear"
    ADDS_UP = "adds up"

    @property
    def predicate(self) -> str:
        """What a report prints after the equation at fault."""
        return _PREDICATES.get(self, self.value)


# What a report prints where it says more than the value.
_PREDICATES = {
    How.ROUNDS: "rounds too coarsely",
    How.AMPLIFIES: "amplifies rounding errors",
    How.IS_A_KERNEL: "is a kernel that diagnose cannot look into",
    How.IS_NOT_LINEAR: "is not linear in the loss scale",
}

SENSITIVE = (How.CANCELS, How.ROUNDS, How.AMPLIFIES, How.IS_UNDEFINED)
"""The faults that more digits, in the equation or in its operands, would cure."""


class Cause(NamedTuple):
    """What makes a result wrong.

    Attributes:
      how: what goes wrong in the equation of `note`; `ADDS_UP` if no equation is at
        fault.
      note: the note of the equation to fix, or of the wrong result if no equation is at
        fault.
      rounded: the values in 16 bits to whose rounding the equation is sensitive.
      is_in_float32: whether the result is not finite even in float32.
    """

    how: How
    note: Note
    rounded: tuple[Note, ...] = ()
    is_in_float32: bool = False


def cause_of(note: Note) -> Cause:
    """Finds why a result is off from float32's.

    The cause is the place to fix, which may be an earlier equation than the one at
    fault:

    - If the equation at fault only moved or chose elements, the cause is the equation
      that computed them.
    - If its result is not finite because elements of its operands are lost, that is,
      became 0, the cause is the equation in which they became 0. If float16 rounds
      `exp(x)` to 0, then `1 / exp(x)` in float32 is infinite because of the
      exponential, not the division.
    - If an earlier equation rounded elements to the limit of its function, and later
      equations only passed them on, the cause is the earlier equation.
    """
    fault = at_fault(note)
    if fault is None:
        return Cause(How.ADDS_UP, note)
    if fault.stays_narrow:
        return Cause(How.IS_A_KERNEL, fault)
    how = _how_not_finite(fault) if fault.bad else _how_off(fault)
    if how is How.OVERFLOWS:
        return Cause(how, _where_computed(fault))
    if how is How.VANISHES and fault.bad:
        most_lost = max(fault.reads, key=lambda read: read.lost)
        fault = _where_lost(most_lost)
        if fault.has_any(Trait.ADDS_TWO):  # a sum of two is 0 only if they cancel
            how = How.CANCELS
    computed = _where_computed(fault)
    # `back_from` begins with the last note of its list, and `computed` comes first.
    for earlier in back_from([*computed.reads, computed], _operands_at_limit):
        if _saturates(earlier):
            return Cause(How.SATURATES, earlier)
    if how in SENSITIVE:
        return _cause_if_sensitive(how, computed)
    return Cause(how, computed)


def _cause_if_sensitive(how: How, note: Note) -> Cause:
    """Finds the values in 16 bits to whose rounding an equation is sensitive.

    The remedy is to compute these in float32. But if the equation amplifies values of
    which many elements are lost, the cause is the equation in which they became 0.
    """
    rounded = tuple(
        earlier
        for earlier in back_from(note.reads, _operands_that_count)
        if is_narrow_dtype(earlier.dtype) and earlier.is_computed
    )
    lost = [earlier for earlier in rounded if earlier.lost > LARGE_SHARE]
    if how is How.AMPLIFIES and lost:
        return Cause(How.VANISHES, _where_lost(lost[0]))
    return Cause(how, note, rounded)


def cause_in_float32(note: Note) -> Cause:
    """Finds the first equation whose result is not finite in float32, and the reason.

    If this equation is a kernel, its result may be finite in float32 after all. The
    reference does not show this, because the kernel computes it in 16 bits as well.
    """
    first = path_from(note, _operand_to_blame)[-1]
    if first.stays_narrow:
        return Cause(How.IS_A_KERNEL, first)
    how = How.IS_UNDEFINED if first.is_reference_nan else How.OVERFLOWS
    return Cause(how, first, is_in_float32=True)


def _operand_to_blame(note: Note) -> Note | None:
    """Returns the operand to go back to from a result that is not finite in float32.

    An infinity in a mask is there on purpose, as in `where(mask, scores, -inf)`. If it
    turns into a NaN, the equation that reads it is at fault, not the mask.
    """
    operand = _first_not_finite(note)
    if not note.is_reference_nan:
        return operand
    for read in note.reads:
        if read.is_reference_nan:
            return read
    return None if _is_masked(note) else operand


def _first_not_finite(note: Note) -> Note | None:
    """Returns the first operand that is not finite in float32, if there is one."""
    for read in note.reads:
        if not read.is_reference_finite:
            return read
    return None


def _is_masked(note: Note) -> bool:
    """Whether the infinities that led to a NaN come from a mask, not from the model.

    The infinities come from a mask if they go back to an argument, a constant or an
    operation that fills in elements, such as `where`, without a product in between,
    because masks are applied after products.
    """
    path = path_from(note, _first_not_finite)
    if any(step.has_any(Trait.PRODUCT) for step in path):
        return False
    first = path[-1]
    return not first.reads or first.has_any(Trait.FILLS)


# --- What the equation at fault does ---


def _how_not_finite(note: Note) -> How:
    """Classifies an equation whose result is not finite where float32's is."""
    # Operands may be off by up to 5%, so a result may be infinite although float32's is
    # up to 5% below the limit.
    limit = least_infinite(note.dtype) * (1 - TOLERANCE)
    if note.largest >= limit:
        return How.OVERFLOWS
    if any(read.lost for read in note.reads):
        return How.VANISHES
    # A partial sum may overflow although the whole sum is small in float32. Any other
    # operation has a pole at the values to which its operands were rounded.
    is_sum = note.has_any(SUMS | Trait.PRODUCT)
    if is_sum and is_narrow_dtype(note.dtype) and not note.nan:
        return How.OVERFLOWS
    return How.IS_UNDEFINED


def _how_off(note: Note) -> How:
    """Classifies an equation whose result is off, but finite."""
    if _cancels(note):
        return How.CANCELS
    dtype = _where_computed(note).dtype
    if not is_narrow_dtype(dtype):
        return How.AMPLIFIES
    if 0 < note.rms < least_normal(dtype):
        return How.VANISHES
    # A loop that adds one term in each iteration is a long sum as well.
    is_sum_in_loop = note.iterations and note.has_any(SUMS)
    is_long_sum = is_sum_in_loop or note.has_any(Trait.ADDS_MANY)
    return How.STAGNATES if is_long_sum else How.ROUNDS


def _cancels(note: Note) -> bool:
    """Whether a result is a sum that is small beside its terms."""
    is_sum = note.has_any(SUMS | Trait.PRODUCT)
    return is_sum and note.rms < _SMALL * size_of_sum(note)


def size_of_sum(note: Note) -> float:
    """Estimates the magnitude of a sum or product whose terms have random signs.

    The sum of n such terms is about sqrt(n) times as large as one of them.
    """
    magnitudes = [read.rms for read in note.reads if read.rms]
    growth = math.sqrt(note.origin.terms)
    if note.has_any(Trait.PRODUCT):
        return growth * math.prod(magnitudes)
    return growth * max(magnitudes, default=0.0)


def _saturates(note: Note) -> bool:
    """Whether a 16-bit result was rounded to a limit of its function: 0, 1 or -1."""
    may_saturate = is_narrow_dtype(note.dtype) and note.has_any(Trait.SATURATES)
    return may_saturate and (note.lost > 0 or note.at_limit)


# --- The earlier equations ---


def _operands_at_limit(note: Note) -> Sequence[Note]:
    """Returns the operands whose 1 or -1 may have been passed on to a result.

    A sum or product has no such operands, because it computes any 1 or -1 itself.
    """
    if note.has_any(SUMS | Trait.PRODUCT):
        return ()
    return [read for read in note.reads if read.at_limit]


def _where_computed(note: Note) -> Note:
    """Goes back from moved or chosen elements to the equation that computed them.

    The search follows the worst operand. It ends at a cast to 16 bits or fewer, which
    rounds the elements and so counts as computing them.
    """
    while note.has_any(Trait.MOVES | Trait.CHOOSES) or not note.is_computed:
        operand = worst_operand(note)
        if operand is None or operand.is_argument:
            break
        if is_narrow_dtype(note.dtype) and note.dtype != operand.dtype:
            break
        note = operand
    return note


def _where_lost(note: Note) -> Note:
    """Goes back from lost elements to the equation in which they became 0.

    The search follows the first operand whose `lost` is at least half that of the
    result.
    """
    while True:
        lost = [read for read in note.reads if read.lost >= note.lost / 2]
        if not lost:
            return note
        note = lost[0]


def _operands_that_count(note: Note) -> Sequence[Note]:
    """Returns the operands whose rounding matters to a result.

    A product in 16 bits rounds its own result, so the search for rounded values ends
    there. In a sum of two terms, one that is small beside the other does not matter.
    """
    if is_narrow_dtype(note.dtype) and note.has_any(Trait.PRODUCT):
        return ()
    if not note.has_any(Trait.ADDS_TWO):
        return note.reads
    largest = max((read.rms for read in note.reads), default=0.0)
    return [read for read in note.reads if read.rms >= _SMALL * largest]
