"""Which equation is at fault for a result that differs from float32's.

Take `1 / (a - b)` in float16, where `a` is 0.1 and `b` is 0.0999. The quotient is off
by 64%, but its operand is already off by 39%. The operands of the difference are off by
less than 0.1%: the error jumps there, so the difference is at fault.

Each result has a *note*, which records how far it is off and holds the notes of its
operands (see `notes.py`). From the note of a wrong result, `at_fault` goes back to the
operand that is off the most, from there to its worst operand, and so on, as long as
this operand is off by more than one rounding to bfloat16. In the example, this path is
the quotient and the difference.

The search then starts at the earliest value on the path that is off by more than 5%. If
this value is not finite, its equation is at fault. Otherwise, of this equation and the
earlier ones on the path, the one in which the error grows most is at fault, if the
error grows by a factor of 3 or more. If it grows by less, an equation in a loop may be
at fault, in which it grows a little in each of many iterations.
"""

from collections import Counter
from collections.abc import Sequence

from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.notes import SUMS, Note
from optax_lossscale._diagnosis.old_operations import Trait
from optax_lossscale._diagnosis.paths import jump, path_from
from optax_lossscale._programs.values import is_narrow_dtype

# The least factor by which the error grows in an equation that is at fault. It must be
# above 2: a correct product is off by about the sum of its operands' errors, so by up
# to twice as much as the worse operand. A heuristic: with a larger factor, more faults
# are reported as rounding that adds up over many lines.
_JUMP = 3.0

# The largest relative error of one rounding to bfloat16, with 8 significant bits.
_ROUNDING = 2.0**-8

# How often the path must pass through an equation in a loop for it to be at fault. This
# is for errors that grow too little in one iteration to jump. A heuristic: a smaller
# value may blame an equation although others contribute as much, and a larger one
# blames none in a loop with fewer iterations.
_MANY_ITERATIONS = 8


def at_fault(note: Note) -> Note | None:
    """Finds the equation at fault; returns its note, or None if no equation stands out.

    An equation on the path whose operand is already off by more than 5% is not at
    fault, however much worse its result is: fixing it would not fix the operand. If no
    value on the path is off by more than 5%, the whole path is searched. This happens
    to an intermediate value if many of its elements are off, but only small ones.
    """
    path = path_from(note, _off_operand)
    start = 0
    for n, step in enumerate(path):
        if step.error > TOLERANCE:
            start = n  # the last one on the path is the first in the program
    path = path[start:]
    return path[0] if path[0].bad else _where_error_grows(path)


def worst_operand(note: Note) -> Note | None:
    """Returns the operand that is off the most, or None if there are no operands.

    The operands of a sum or a choice are compared by `distance`, because a large
    relative error of a small term hardly changes a sum. All others are compared by
    `error`. If the errors of several are infinite, one with NaNs counts as the worst.
    """
    if not note.bad and note.has_any(Trait.ADDS_TWO | Trait.CHOOSES):
        return max(note.reads, key=lambda read: read.distance, default=None)
    return max(note.reads, key=lambda read: (read.error, read.nan), default=None)


def _off_operand(note: Note) -> Note | None:
    """Returns the worst operand if it is off by more than rounding, or None.

    If the result is not finite where its reference is, the operand must be off by more
    than 5%, because a smaller error hardly explains an infinity.
    """
    worst = worst_operand(note)
    floor = TOLERANCE if note.bad else _ROUNDING
    return worst if worst and worst.error > floor else None


def _where_error_grows(path: Sequence[Note]) -> Note | None:
    """Finds the equation in which the error grows, at once or over many iterations."""
    errors = []
    for note in path:
        # An error above 100% counts as 100%, because it may only mean that the
        # reference is small: 1/256 in place of 1/5000 is off by about 1850%.
        at_most_1 = min(note.error, 1.0)
        errors.append(max(at_most_1, _ROUNDING))
    errors.append(_ROUNDING)  # the operands of the last equation
    return jump(path, errors, _JUMP) or _in_many_iterations(path)


def _in_many_iterations(path: Sequence[Note]) -> Note | None:
    """Finds an equation in which the error grows a little in each of many iterations.

    Of several such equations, those with results in 16 bits come first, and among these
    the sums.
    """
    counts = Counter(note.origin for note in path if note.iterations)
    often = [note for note in path if counts[note.origin] >= _MANY_ITERATIONS]
    narrow = [note for note in often if is_narrow_dtype(note.dtype)]
    candidates = narrow or often
    sums = [note for note in candidates if note.has_any(SUMS)]
    candidates = sums or candidates
    return candidates[0] if candidates else None
