"""Which loss scale fits: what the magnitudes of a backward pass say, which is linear in it."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from optax_lossscale._arrays.names import scale_name, without_numbers
from optax_lossscale._diagnosis.notes import Note, exponents_of, limits
from optax_lossscale._diagnosis.shadow import Value

HIGHEST = 126  # 2**127 is the last power of two in float32
MARGIN = 2  # bits below the largest scale, as gradients may grow
NOTABLE = 0.01  # a share of gradients that is worth mentioning
_JUMP = 2.0**10  # times that numbers grow in one equation which is at fault for their size
_REACH = 2.0**-40  # from the largest float16 to the smallest: no single scale holds more


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
            return f"{scale}: nothing overflows up to 2**{HIGHEST}; is float16 in use?"
        return f"{scale}, with {self.spare_bits:.0f} bits to spare before gradients overflow"


class Underflow(NamedTuple):
    """How many gradients of one kind of parameter underflow.

    Attributes:
      lost: the share that is zero or subnormal at a loss scale of 1, but not zero in float32.
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
    room = {}
    for note in notes:
        # Without a scale, the program's numbers may be lost.
        size = note.largest if scale == 1 or note.largest_low is None else note.largest_low
        if note.seeded and size and note.dtype.kind in "fV":
            room.setdefault(math.log2(limits(note.dtype)[0] / size), note)
    if not room:
        return HIGHEST + 1, None
    least = min(room)
    first = math.ceil(least + math.log2(scale))
    return (first, _made_large(room[least])) if first <= HIGHEST else (HIGHEST + 1, None)


def _made_large(note: Note) -> Note:
    """Where numbers of a backward pass became so large: at a jump before it, or right there."""
    path = [note]
    while True:
        reads = [read for read in path[-1].reads if read.seeded and read.place.primitive]
        if not reads:
            break
        path.append(max(reads, key=lambda read: read.largest))
    growth = [x.largest / max(y.largest, 1e-45) for x, y in itertools.pairwise(path)]
    most = max(growth, default=0.0)
    return path[growth.index(most)] if most > _JUMP else note


def underflow(
    names: Sequence[str],
    at_1: Sequence[Value],
    fitting: Sequence[Value],
) -> dict[str, Underflow]:
    """What each group of parameters loses; all of them first, then the worst.

    Args:
      names: of the parameters.
      at_1: their gradients in a run at a loss scale of 1.
      fitting: and in one at the scale that fits.
    """
    before = _shares(names, at_1)
    after = _shares(names, fitting)
    sizes = _exponents(names, at_1)
    found = {}
    for group, lost in before.items():
        left = after.get(group, lost)
        if max(lost, left) > NOTABLE:
            found[group] = Underflow(lost, left, _bits(sizes[group]))
    return dict(sorted(found.items(), key=lambda item: (item[0] != "all", -item[1].lost)))


def lost_at(sizes: np.ndarray, exponent: int) -> float:
    """The share of numbers that is zero or subnormal in float16 at a scale of `2**exponent`."""
    normal = 127 - 14 - exponent  # the place of the first that is in range
    total = sizes[1:255].sum()
    return float(sizes[1 : max(normal, 1)].sum() / max(total, 1))


def _bits(sizes: np.ndarray) -> int:
    """The least power of two at which next to nothing is lost that another would keep."""
    exponents = range(HIGHEST)
    least = min(lost_at(sizes, e) for e in exponents)
    return next(e for e in exponents if lost_at(sizes, e) <= least + NOTABLE)


def _shares(names: Sequence[str], grads: Sequence[Value]) -> dict[str, float]:
    """The share of each group's gradients that underflows."""
    counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for name, value in zip(names, grads, strict=True):
        low, sizes = _sizes(value)
        gone = low < limits(np.float16)[1] if _is_of_float16(low) else low == 0
        lost = np.count_nonzero(gone & (sizes > sizes.max(initial=0) * _REACH))
        for group in ("all", without_numbers(name)):
            counts[group] += lost, low.size
    return {group: float(lost / max(size, 1)) for group, (lost, size) in counts.items()}


def _is_of_float16(x: np.ndarray) -> bool:
    """Whether these are numbers of float16, whatever dtype they have since been cast to."""
    with np.errstate(over="ignore"):
        return bool((x == x.astype(np.float16)).all())


def _exponents(names: Sequence[str], grads: Sequence[Value]) -> Mapping[str, np.ndarray]:
    """How many gradients of each group have which exponent, at a scale of 1."""
    sizes: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(256, int))
    for name, value in zip(names, grads, strict=True):
        size = _sizes(value)[1]
        found = exponents_of(size[size > size.max(initial=0) * _REACH])
        for group in ("all", without_numbers(name)):
            sizes[group] += found
    return sizes


def _sizes(value: Value) -> tuple[np.ndarray, np.ndarray]:
    """The absolute values of a gradient, and of float32's."""
    low, true = (np.abs(np.asarray(x)).astype(np.float32) for x in value.pair[:2])
    return low.ravel(), true.ravel()
