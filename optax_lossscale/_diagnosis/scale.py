"""Which loss scale fits, and how many gradients underflow without it.

A backward pass is linear in the loss scale, so that the magnitudes of one run tell at
which scale each of its results overflows: if the largest number in a run at scale 1 is
2**6, float16 overflows at a scale of 2**10. The largest scale is then 2**9, and the one
that fits is `MARGIN` bits below that.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from optax_lossscale._arrays.names import scale_name, without_numbers
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Note, limits

HIGHEST = 126  # the largest scale's exponent: 2**127 is float32's last power of two
MARGIN = 2  # bits from the scale to begin with to the largest, as gradients may grow
NOTABLE = 0.01  # the least share of gradients whose underflow is worth mentioning
# An equation that enlarges numbers by more than this is at fault for their size.
_JUMP = 2.0**10
# The smallest float16 relative to the largest: no scale keeps smaller gradients as well
_REACH = 2.0**-40


class InitialScale(NamedTuple):
    """The loss scale to begin with.

    Attributes:
      scale: the power of two to begin with.
      largest: the largest power of two at which no gradient overflows.
    """

    scale: float
    largest: float

    @property
    def spare_bits(self) -> float:
        """How many bits the scale is below the largest."""
        return math.log2(self.largest / self.scale)

    def __str__(self) -> str:
        scale = scale_name(self.scale)
        if self.largest == 2.0**HIGHEST:
            return f"{scale}, as nothing overflows up to 2**{HIGHEST}"
        return f"{scale}, with {self.spare_bits:.0f} bits to spare before gradients overflow"


class _Counts(NamedTuple):
    """Counts of the numbers of one gradient."""

    size: int  # all of them
    lost: int  # those that are lost at a loss scale of 1
    left: int  # those that are lost at the scale that fits
    exponents: np.ndarray  # those with each exponent, of float32, that can be kept


class Underflow(NamedTuple):
    """How many gradients of one kind of parameter underflow.

    Attributes:
      lost: the share that is zero or subnormal at a loss scale of 1, but not zero in
        float32.
      left: the same share at the scale that fits.
      bits: the exponent of the least power of two, as a loss scale, at which next to
        nothing is lost.
    """

    lost: float
    left: float
    bits: int


def first_overflow(notes: Iterable[Note], scale: float) -> tuple[int, Note | None]:
    """The exponent of the first scale with an overflow, and the note of what causes it.

    Args:
      notes: the notes of a run.
      scale: the loss scale of that run.
    """
    first = None
    least = math.inf
    for note in notes:
        if note.seeded and note.largest and note.dtype.kind in "fV":
            room = math.log2(limits(note.dtype)[0] / note.largest)
            if room < least:
                first = note
                least = room
    if first is None or least + math.log2(scale) > HIGHEST:
        return HIGHEST + 1, None
    return math.ceil(least + math.log2(scale)), _made_large(first)


def _made_large(note: Note) -> Note:
    """Where a backward pass made numbers large: at the largest jump up to `note`.

    Without a jump of at least `_JUMP`, this is `note` itself.
    """
    at = note
    largest_jump = _JUMP
    while True:
        reads = [read for read in note.reads if read.seeded and read.place.primitive]
        if not reads:
            return at
        before = max(reads, key=lambda read: read.largest)
        jump = note.largest / max(before.largest, 1e-45)
        if jump > largest_jump:
            largest_jump = jump
            at = note
        note = before


def underflow(
    names: Sequence[str], at_1: Sequence[Value], fitting: Sequence[Value]
) -> dict[str, Underflow]:
    """The underflow of each group of parameters that loses a notable share.

    A group has the parameters whose names differ in numbers only. The group of all
    parameters comes first, then the one that loses most.

    Args:
      names: the names of the parameters.
      at_1: their gradients in a run at a loss scale of 1.
      fitting: their gradients in a run at the scale that fits.
    """
    counts: dict[str, list[_Counts]] = defaultdict(list)
    for name, before, after in zip(names, at_1, fitting, strict=True):
        true = _sizes(before.pair.true)
        exponents = _exponents(true[_may_be_kept(true)])
        lost, left = map(_count_lost, (before, after))
        of_one = _Counts(true.size, lost, left, exponents)
        for group in ("all", without_numbers(name)):
            counts[group].append(of_one)
    groups = {}
    for group, of_each in counts.items():
        size = sum(one.size for one in of_each)
        lost = sum(one.lost for one in of_each)
        left = sum(one.left for one in of_each)
        exponents = np.sum([one.exponents for one in of_each], axis=0)
        if max(lost, left) > NOTABLE * size:
            groups[group] = Underflow(lost / size, left / size, _bits(exponents))
    return dict(
        sorted(groups.items(), key=lambda item: (item[0] != "all", -item[1].lost))
    )


def _count_lost(value: Value) -> int:
    """How many numbers are zero or subnormal, though a loss scale could keep them."""
    low = _sizes(value.pair.low)
    gone = low < limits(np.float16)[1] if _is_of_float16(low) else low == 0
    return int(np.count_nonzero(gone & _may_be_kept(_sizes(value.pair.true))))


def _may_be_kept(true: np.ndarray) -> np.ndarray:
    """Which numbers of a gradient are large enough for some loss scale to keep them."""
    return true > true.max(initial=0) * _REACH


def _sizes(x: np.ndarray) -> np.ndarray:
    """The absolute values of an array in one row, in float32."""
    return np.abs(np.asarray(x)).astype(np.float32).ravel()


def _is_of_float16(x: np.ndarray) -> bool:
    """Whether float16 holds all of these numbers, whatever their dtype is now."""
    with np.errstate(over="ignore"):
        return bool((x == x.astype(np.float16)).all())


def _exponents(sizes: np.ndarray) -> np.ndarray:
    """How many numbers have each of float32's 256 exponents.

    The first of these counts subnormal numbers and zeros, the last infinities and NaNs.
    """
    return np.bincount(sizes.view(np.uint32) >> 23, minlength=256)


def _bits(exponents: np.ndarray) -> int:
    """The exponent of the least loss scale that loses hardly more than the best one."""
    first_normal = 127 - 14  # the index of float16's least normal exponent
    below = np.cumsum(exponents) - exponents[0]  # without zeros, which are not lost
    lost = [below[max(first_normal - bits - 1, 0)] for bits in range(HIGHEST)]
    enough = min(lost) + NOTABLE * max(exponents[1:255].sum(), 1)
    return next(bits for bits in range(HIGHEST) if lost[bits] <= enough)
