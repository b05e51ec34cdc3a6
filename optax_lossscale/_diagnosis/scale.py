"""Which loss scale fits: what the magnitudes of a backward pass say, which is linear in it."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from optax_lossscale._arrays.names import scale_name, without_numbers
from optax_lossscale._diagnosis.loops import Value
from optax_lossscale._diagnosis.notes import Note, limits

HIGHEST = 126  # 2**127 is the last power of two in float32
MARGIN = 2  # bits below the largest scale, as gradients may grow
NOTABLE = 0.01  # a share of gradients that is worth mentioning
# Times that numbers grow in one equation which is at fault for their size
_JUMP = 2.0**10
# From the largest float16 to the smallest: no single scale holds more
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
    """How many numbers of a gradient there are."""

    size: int
    lost: int  # at a loss scale of 1
    left: int  # lost at the scale that fits
    exponents: np.ndarray  # those with each exponent


class Underflow(NamedTuple):
    """How many gradients of one kind of parameter underflow.

    Attributes:
      lost: the share that is zero or subnormal at a loss scale of 1, but not zero in
        float32.
      left: the same share at the scale that fits.
      bits: the exponent of the least power of two at which next to nothing is lost.
    """

    lost: float
    left: float
    bits: int


def first_overflow(notes: Iterable[Note], scale: float) -> tuple[int, Note | None]:
    """The exponent of the scale from which on something overflows, and what does so first.

    Args:
      notes: of a run.
      scale: at which it was made.
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
    """Where numbers of a backward pass became so large: at a jump before it, or right there."""
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
    """What each group of parameters loses; all of them first, then the worst.

    Args:
      names: of the parameters.
      at_1: their gradients in a run at a loss scale of 1.
      fitting: and in one at the scale that fits.
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
    """How many numbers of a gradient are zero or subnormal, and should not be."""
    low = _sizes(value.pair.low)
    gone = low < limits(np.float16)[1] if _is_of_float16(low) else low == 0
    return int(np.count_nonzero(gone & _may_be_kept(_sizes(value.pair.true))))


def _may_be_kept(true: np.ndarray) -> np.ndarray:
    """Which numbers of a gradient some scale keeps."""
    return true > true.max(initial=0) * _REACH


def _sizes(x: np.ndarray) -> np.ndarray:
    """The absolute values of all numbers."""
    return np.abs(np.asarray(x)).astype(np.float32).ravel()


def _is_of_float16(x: np.ndarray) -> bool:
    """Whether these are numbers of float16, whatever dtype they have since been cast to."""
    with np.errstate(over="ignore"):
        return bool((x == x.astype(np.float16)).all())


def _exponents(sizes: np.ndarray) -> np.ndarray:
    """How many numbers have each exponent, from 2**-127, with what is less, to infinity."""
    return np.bincount(sizes.view(np.uint32) >> 23, minlength=256)


def _bits(exponents: np.ndarray) -> int:
    """The least power of two at which next to nothing is lost that another would keep."""
    first_normal = 127 - 14  # the place of the least exponent of float16
    below = np.cumsum(exponents) - exponents[0]  # those that are zero are not lost
    lost = [below[max(first_normal - bits - 1, 0)] for bits in range(HIGHEST)]
    enough = min(lost) + NOTABLE * max(exponents[1:255].sum(), 1)
    return next(bits for bits in range(HIGHEST) if lost[bits] <= enough)
