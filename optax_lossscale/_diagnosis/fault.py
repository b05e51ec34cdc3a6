"""Which equation is at fault for a result that is off from float32.

From the note of the result, a path goes back along the operand that is off the most,
until this operand is off by no more than rounding. The first value of the program on
this path that is off by more than 5% is where to look: if it is not finite, its
equation is at fault. Otherwise it is the equation, among this one and those before, in
which the error grows most, if it grows by much. For `log(a - b)`, where `a` and `b` are
rounded to float16 and nearly equal, the path is the logarithm and the difference. The
error jumps in the difference, so the difference is at fault.
"""

from collections import Counter
from collections.abc import Sequence

from optax_lossscale._diagnosis.figures import TOLERANCE
from optax_lossscale._diagnosis.notes import SUMS, Note
from optax_lossscale._diagnosis.paths import jump, path_from
from optax_lossscale._programs.operations import Trait
from optax_lossscale._programs.values import is_narrow_dtype

# An equation is at fault if the error grows by this factor in it.
_JUMP = 3.0
_ROUNDING = 2.0**-8  # the largest error that one rounding to bfloat16 makes
_MANY_ITERATIONS = 8  # in which an error has to grow for their equation to be at fault


def at_fault(note: Note) -> Note | None:
    """The note of the equation in which an error grows, or None if no equation stands out.

    An equation with an operand that is off by more than 5% already is not at fault,
    however much worse its result is. If nothing on the path is off by so much, as before
    a value inside, the note itself is where to look.
    """
    path = path_from(note, _off_before)
    off = [n for n, on_path in enumerate(path) if on_path.error > TOLERANCE]
    first_off = off[-1] if off else 0  # the first in the program, as a path goes back
    path = path[first_off:]
    return path[0] if path[0].bad else _where_it_grows(path)


def worst_read(note: Note) -> Note | None:
    """The operand that is off the most, or None of an equation without operands.

    Operands that are added or chosen from are off by their distance, others by their
    error, as a large relative error of a small term makes no difference to a sum.
    """
    if not note.bad and note.is_any(Trait.ADDS_TWO | Trait.CHOOSES):
        return max(note.reads, key=lambda read: read.distance, default=None)
    return max(note.reads, key=lambda read: (read.error, read.nan), default=None)


def _off_before(note: Note) -> Note | None:
    """The worst operand, if it is off by more than rounding, or made a result bad."""
    worst = worst_read(note)
    floor = TOLERANCE if note.bad else _ROUNDING
    return worst if worst and worst.error > floor else None


def _where_it_grows(path: Sequence[Note]) -> Note | None:
    """The note of the equation in which an error grows, at once or over many iterations."""
    # An error above 100% counts as 100%: 1/256 in the place of 1/5000 is off by 1800%.
    errors = [max(min(note.error, 1.0), _ROUNDING) for note in path]
    return jump(path, [*errors, _ROUNDING], _JUMP) or _in_many_iterations(path)


def _in_many_iterations(path: Sequence[Note]) -> Note | None:
    """The note of an equation in which an error grows a little in many iterations.

    It is the one that rounds to 16 bits, a sum if it can be.
    """
    counts = Counter(note.origin for note in path if note.rounds)
    often = [note for note in path if counts[note.origin] >= _MANY_ITERATIONS]
    narrow = [note for note in often if is_narrow_dtype(note.dtype)] or often
    sums = [note for note in narrow if note.is_any(SUMS)]
    return next(iter(sums or narrow), None)
