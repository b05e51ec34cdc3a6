"""Which loss scale fits, and how many gradients underflow without it.

Where a backward pass is linear in the loss scale, one run shows at which scale each of
its results overflows:

    largest magnitude at scale 1    2**6
    float16 overflows at            2**16, so at a scale of 2**10
    largest usable scale            2**9
    scale that fits                 2**7, which is `MARGIN` bits less

The margin costs only gradients that are within a few bits of underflow. Without it, the
first step with somewhat larger gradients would be skipped.
"""

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._diagnosis.names import scale_name, without_numbers
from optax_lossscale._diagnosis.notes import ALL, Note, least_infinite, least_normal
from optax_lossscale._diagnosis.paths import jump, path_from
from optax_lossscale._diagnosis.value import Value

HIGHEST = 126
"""The exponent of the largest scale that is tried and reported.

A `FixedLossScale` may not be larger.
"""

MARGIN = 2
"""How many bits the initial scale is below the largest, because gradients may grow.

A heuristic: with 2 bits, gradients may become 4 times as large without an overflow.
"""

COMPARABLE = 2.0**-100
"""Only larger magnitudes are compared, because smaller ones may lack digits in float32.

The smallest normal number of float32 is 2**-126. The last of the 24 bits of 2**-100 is
2**-123, which is still a normal number.
"""

# The share of gradients above which underflow is worth mentioning. A heuristic.
_NOTABLE = 0.01

# An equation that enlarges values by this factor or more is taken to be the cause of an
# overflow. A heuristic.
_ENLARGED = 2.0**10

# The smallest positive number of float32, which replaces 0 in a divisor.
_SMALLEST = 2.0**-149

# The smallest positive float16, 2**-24, relative to the largest, which is about 2**16.
# No scale keeps both the largest gradients and those that are more than 2**40 times
# smaller.
_REACH = 2.0**-40


class InitialScale(NamedTuple):
    """The loss scale to begin with; print it to see how much room it has.

    Write `DynamicLossScale(initial_scale=report.initial_scale.scale)`, for example.

    Attributes:
      scale: the loss scale, a power of two.
      largest: the largest power of two, up to 2**126, at which no gradient overflows.
    """

    scale: float
    largest: float

    @property
    def spare_bits(self) -> float:
        """How many bits the scale can grow without an overflow."""
        return math.log2(self.largest / self.scale)

    def __str__(self) -> str:
        scale = scale_name(self.scale)
        if self.largest == 2.0**HIGHEST:
            return f"{scale}, as nothing overflows up to 2**{HIGHEST}"
        bits = f"{self.spare_bits:.0f} bits"
        return f"{scale}, with {bits} to spare before gradients overflow"


class Underflow(NamedTuple):
    """How many gradient elements of a group of parameters underflow.

    The shares are those of the elements that some loss scale can keep: those that are,
    in float32, larger than 2**-40 times the largest element of the same gradient. An
    element that is 0 because its terms canceled does not count as lost.

    Attributes:
      lost: the share that is zero, or subnormal in float16, at a loss scale of 1.
      left: the share that is still zero or subnormal at the loss scale at which the
        gradients were compared, `Diagnosis.scale`.
      bits: 2**bits is the smallest loss scale, among the powers of two from 1 to
        2**126, at which at most 1% of these elements are below the normal numbers of
        float16.
    """

    lost: float
    left: float
    bits: int


def first_overflow(notes: Sequence[Note], scale: float) -> tuple[int, Note | None]:
    """Predicts the smallest loss scale at which a result overflows, and the cause.

    The prediction is right if the backward pass is linear in the loss scale.

    Args:
      notes: the notes of a run.
      scale: the loss scale of that run.

    Returns:
      The exponent of that scale, which is a power of two, and the note of the equation
      that made the values large. If nothing overflows up to a scale of 2**HIGHEST, the
      two are HIGHEST + 1 and None.
    """
    first = None
    lowest = math.inf
    for note in notes:
        is_real = jnp.issubdtype(note.dtype, jnp.floating)
        if note.is_backward and note.largest and is_real:
            headroom = math.log2(least_infinite(note.dtype) / note.largest)
            exponent = headroom + math.log2(scale)
            if exponent < lowest:
                first = note
                lowest = exponent
    if first is None or lowest > HIGHEST:
        return HIGHEST + 1, None
    return math.ceil(lowest), _where_enlarged(first)


def _where_enlarged(note: Note) -> Note:
    """Finds the equation that enlarged the values of the backward pass most.

    The search goes back from `note` along the largest operands. If no equation enlarged
    them by `_ENLARGED` or more, the result is `note` itself.
    """
    path = path_from(note, _largest_operand)
    magnitudes = [max(step.largest, _SMALLEST) for step in path]
    return jump(path, magnitudes, _ENLARGED) or note


def _largest_operand(note: Note) -> Note | None:
    """Returns the largest operand of the backward pass, except for its seed."""
    reads = [read for read in note.reads if read.is_backward and not read.is_argument]
    return max(reads, key=lambda read: read.largest, default=None)


def out_of_proportion(at_1: Note | None, note: Note, scale: float) -> float:
    """Measures how far a result in float32 is from growing in proportion to the scale.

    The measure is 0 if the result does not depend on the scale, or is too small to be
    compared.

    Args:
      at_1: the note of the result in the run at a loss scale of 1, if there is one.
      note: its note in the run at `scale`.
      scale: the loss scale of that run.
    """
    if at_1 is None or not note.is_backward or at_1.rms < COMPARABLE:
        return 0.0
    return abs(note.rms / (at_1.rms * scale) - 1)


def underflow_by_group(
    at_1: Mapping[str, Value], judged: Mapping[str, Value], right: Container[str]
) -> dict[str, Underflow]:
    """Measures underflow by group of parameters, for groups that lose more than 1%.

    Parameters whose names differ only in numbers form a group, such as the weights of
    all layers.

    Args:
      at_1: the gradients of a run at a loss scale of 1, by name.
      judged: the gradients of the run whose results are judged, by name.
      right: the names of the gradients that float32 determines and that are right.

    Returns:
      The underflow of each group that loses more than 1% in either run, by its name,
      with the group of all parameters first and the others sorted, those that lose
      most first.
    """
    groups: dict[str, list[_GradientMagnitudes]] = defaultdict(list)
    for name, value in at_1.items():
        if name in right:
            gradient = _gradient_magnitudes(value, judged[name])
            groups[ALL].append(gradient)
            groups[without_numbers(name)].append(gradient)
    notable = []
    for name, gradients in groups.items():
        group = _joint_underflow(gradients)
        if max(group.lost, group.left) > _NOTABLE:
            notable.append((name, group))
    notable.sort(key=lambda item: (item[0] != ALL, -item[1].lost))
    return dict(notable)


class _GradientMagnitudes(NamedTuple):
    """The elements of a gradient that some loss scale can keep.

    Attributes:
      magnitudes: their absolute values, of shape (elements,) and in float32.
      n_lost: how many of them underflow at a loss scale of 1.
      n_left: how many of them still underflow in the judged run.
    """

    magnitudes: np.ndarray
    n_lost: int
    n_left: int


def _gradient_magnitudes(at_1: Value, judged: Value) -> _GradientMagnitudes:
    """Compares a gradient in the run at 1 with itself in the judged run."""
    magnitudes = _flat_magnitudes(at_1.pair.reference)
    can_be_kept = magnitudes > magnitudes.max(initial=0) * _REACH
    has_vanished = _is_zero_or_subnormal(judged)
    # An element that is 0 in the judged run, although in float32 it is large enough for
    # a normal float16, did not underflow. Its terms have canceled.
    is_normal = _flat_magnitudes(judged.pair.reference) >= least_normal(np.float16)
    has_canceled = has_vanished & is_normal
    are_lost = _is_zero_or_subnormal(at_1) & ~has_canceled
    are_left = has_vanished & ~is_normal
    return _GradientMagnitudes(
        magnitudes[can_be_kept],
        n_lost=int((are_lost & can_be_kept).sum()),
        n_left=int((are_left & can_be_kept).sum()),
    )


def _joint_underflow(gradients: Sequence[_GradientMagnitudes]) -> Underflow:
    """Measures the underflow of several gradients together."""
    magnitudes = np.concatenate([gradient.magnitudes for gradient in gradients])
    count = magnitudes.size
    if not count:
        return Underflow(0.0, 0.0, 0)
    return Underflow(
        lost=sum(gradient.n_lost for gradient in gradients) / count,
        left=sum(gradient.n_left for gradient in gradients) / count,
        bits=_needed_bits(magnitudes),
    )


def _flat_magnitudes(x: ArrayLike) -> np.ndarray:
    """Returns the absolute values of an array, flattened, in float32."""
    magnitudes = np.abs(np.asarray(x))
    return magnitudes.astype(np.float32).ravel()


def _is_zero_or_subnormal(value: Value) -> np.ndarray:
    """Marks the elements of a gradient that are zero, or in float16, subnormal.

    The dtype is read from the note, which says float16 if the gradient was computed in
    float16 and then widened, as for a float32 parameter that the model casts.
    """
    magnitudes = _flat_magnitudes(value.pair.actual)
    if value.note is not None and value.note.dtype == np.float16:
        return magnitudes < least_normal(np.float16)
    return magnitudes == 0


def _needed_bits(magnitudes: np.ndarray) -> int:
    """Returns the `Underflow.bits` of elements with these magnitudes."""
    normal = np.float32(least_normal(np.float16))
    # A magnitude is `normal` times 2**exponent, times a factor from 0.5 to 1. It is in
    # the normal range if the exponent is 1 or more; otherwise, a scale of
    # 2**(1 - exponent) brings it there.
    _, exponents = np.frexp(magnitudes / normal)
    bits = np.quantile(1 - exponents, 1 - _NOTABLE, method="inverted_cdf")
    return int(np.clip(bits, 0, HIGHEST))
