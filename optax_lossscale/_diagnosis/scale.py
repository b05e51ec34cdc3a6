"""Which loss scale fits, and how many gradients underflow without it.

Where a backward pass is linear in the loss scale, as nearly all are, the magnitudes of
one run tell at which scale each of its results overflows: if the largest number in a
run at scale 1 is 2**6, float16 overflows at a scale of 2**10. The largest scale is then
2**9, and the one that fits is `MARGIN` bits below that.
"""

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._arrays.names import scale_name, without_numbers
from optax_lossscale._diagnosis.notes import ALL, Note, least_infinite, least_normal
from optax_lossscale._diagnosis.paths import jump, path_from
from optax_lossscale._diagnosis.value import Value

# The exponent of the largest scale. A larger one has a reciprocal that is subnormal in
# float32, and flushed to zero.
HIGHEST = 126
MARGIN = 2  # bits from the scale to begin with to the largest, as gradients may grow
NOTABLE = 0.01  # the least share of gradients whose underflow is worth mentioning
# An equation that enlarges numbers by this factor or more is at fault for their size.
_ENLARGED = 2.0**10
_SMALLEST = 2.0**-149  # the smallest number of float32
# The smallest float16 relative to the largest: no scale keeps smaller gradients as well
_REACH = 2.0**-40


class InitialScale(NamedTuple):
    """The loss scale to begin with.

    Attributes:
      scale: the power of two to begin with.
      largest: the largest power of two at which no gradient overflows, or 2**126.
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
        bits = f"{self.spare_bits:.0f} bits"
        return f"{scale}, with {bits} to spare before gradients overflow"


class Underflow(NamedTuple):
    """How many gradients of one kind of parameter underflow.

    Attributes:
      lost: the share that is zero or subnormal at a loss scale of 1, of the numbers
        that in float32 are above 2**-40 of the largest one of their parameter. What is
        0 as it cancelled does not count as lost.
      left: the same share at the scale that fits.
      bits: the exponent of the least power of two, as a loss scale, at which at most 1%
        of these numbers are below float16's normal ones.
    """

    lost: float
    left: float
    bits: int


def first_overflow(notes: Sequence[Note], scale: float) -> tuple[int, Note | None]:
    """The exponent of the first scale with an overflow, and the note of its cause.

    The cause is the equation that made the numbers large. If nothing overflows up to a
    scale of 2**HIGHEST, the two are HIGHEST + 1 and None.

    Args:
      notes: the notes of a run.
      scale: the loss scale of that run.
    """
    overflows_at = {}  # of each result, the exponent of a scale
    for note in notes:
        is_real = jnp.issubdtype(note.dtype, jnp.floating)
        if note.is_backward and note.largest and is_real:
            room = math.log2(least_infinite(note.dtype) / note.largest)
            overflows_at[note] = room + math.log2(scale)
    first = min(overflows_at, key=overflows_at.__getitem__, default=None)
    if first is None or overflows_at[first] > HIGHEST:
        return HIGHEST + 1, None
    return math.ceil(overflows_at[first]), _made_large(first)


def _made_large(note: Note) -> Note:
    """The note of the equation that enlarged the numbers of a backward pass most.

    It is `note`, or one of those that `note` goes back to. If none of the equations
    enlarged numbers by `_ENLARGED` or more, it is `note`.
    """
    path = path_from(note, _largest_before)
    sizes = [max(on_path.largest, _SMALLEST) for on_path in path]
    return jump(path, sizes, _ENLARGED) or note


def _largest_before(note: Note) -> Note | None:
    """The largest of the backward pass that a note reads, but not the seed."""
    reads = [read for read in note.reads if read.is_backward and not read.is_argument]
    return max(reads, key=lambda read: read.largest, default=None)


def underflow(
    at_1: Mapping[str, Value], fitting: Mapping[str, Value], right: Container[str]
) -> dict[str, Underflow]:
    """The underflow of each group of parameters that loses a notable share.

    The parameters whose names differ only in numbers are a group. The group of all
    parameters comes first, and then the one that loses most.

    Args:
      at_1: the gradients of a run at a loss scale of 1, by name.
      fitting: the gradients of a run at the scale that fits.
      right: the names of the gradients that float32 determines and that are right.
    """
    groups: dict[str, list[_Numbers]] = defaultdict(list)
    for name, value in at_1.items():
        if name in right:
            numbers = _numbers(value, fitting[name])
            groups[ALL].append(numbers)
            groups[without_numbers(name)].append(numbers)
    underflows = {}
    for name, group in groups.items():
        of_group = _underflow(group)
        if max(of_group.lost, of_group.left) > NOTABLE:
            underflows[name] = of_group
    return dict(
        sorted(underflows.items(), key=lambda item: (item[0] != ALL, -item[1].lost))
    )


class _Numbers(NamedTuple):
    """The numbers of a gradient, without those that no scale keeps."""

    sizes: np.ndarray  # their absolute values in float32
    are_lost: np.ndarray  # which of them underflow at a loss scale of 1
    are_left: np.ndarray  # which of them still do at the scale that fits


def _numbers(at_1: Value, fitting: Value) -> _Numbers:
    """The numbers of a gradient, in a run at 1 and in one at the scale that fits."""
    sizes = _sizes(at_1.pair.reference)
    may_be_kept = sizes > sizes.max(initial=0) * _REACH
    # What is gone at a scale at which float16 holds it has cancelled.
    is_held = _sizes(fitting.pair.reference) >= least_normal(np.float16)
    has_cancelled = _is_gone(fitting) & is_held
    are_lost = _is_gone(at_1) & ~has_cancelled
    are_left = _is_gone(fitting) & ~is_held
    return _Numbers(sizes[may_be_kept], are_lost[may_be_kept], are_left[may_be_kept])


def _underflow(group: Sequence[_Numbers]) -> Underflow:
    """The underflow of the numbers of several gradients."""
    sizes, are_lost, are_left = map(np.concatenate, zip(*group, strict=True))
    if not sizes.size:
        return Underflow(0.0, 0.0, 0)
    return Underflow(float(are_lost.mean()), float(are_left.mean()), _bits(sizes))


def _sizes(x: ArrayLike) -> np.ndarray:
    """The absolute values of an array in one row, in float32."""
    return np.abs(np.asarray(x)).astype(np.float32).ravel()


def _is_gone(value: Value) -> np.ndarray:
    """Which numbers of a gradient are zero, or subnormal if it was made in float16.

    A gradient that was widened afterwards has the note of what it was widened from.
    """
    sizes = _sizes(value.pair.actual)
    if value.note is not None and value.note.dtype == np.float16:
        return sizes < least_normal(np.float16)
    return sizes == 0


def _bits(sizes: np.ndarray) -> int:
    """The exponent of the least loss scale that loses at most 1% of these numbers."""
    _, exponents = np.frexp(sizes / np.float32(least_normal(np.float16)))
    bits = np.quantile(1 - exponents, 1 - NOTABLE, method="inverted_cdf")
    return int(np.clip(bits, 0, HIGHEST))
