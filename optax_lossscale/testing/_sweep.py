"""A sweep runs a step at falling loss scales and collects its outputs.

All of these scales are powers of two. As multiplying a float by a power of two changes
only its exponent, no digit of a correct step's gradients depends on the scale, and
neither do its outputs, unless a float overflows or underflows.

The sweep begins at the highest loss scale at which the step is applied, or at 2**30 if
the step computes in a dtype of wide range, such as float32. From there, it divides the
scale by 4 and by 8 in turn: a float16 step that is applied up to 2**15 is run at 2**15,
2**13, 2**10, 2**8 and so on.
"""

import bisect
from typing import NamedTuple

import numpy as np

from optax_lossscale.testing._experiment import Experiment, log2_of
from optax_lossscale.testing._numbers import Arrays, Path, difference, norm
from optax_lossscale.testing._output_names import name_of
from optax_lossscale.testing._trial import Trial

# How far the exponent of each loss scale is below the first one: 0, 2, 5, 7, 10, …, 30.
# If all distances were equal, the rounding error of a number such as 1/3, whose bits
# repeat, could grow by the same factor from each loss scale to the next, and so seem to
# follow a power of the loss scale.
_OFFSETS = [5 * i // 2 for i in range(13)]

LOWEST_EXPONENT = -125
"""The exponent of a loss scale at which all gradients in float16 become 0.

Multiplied by 2**-125, they are far below 2**-25, half of float16's smallest number. A
loss scale can hardly be lower, because the smallest normal float32 number is 2**-126.
"""

# The exponent of a loss scale that tells dtypes of wide range from float16. A
# heuristic: a step that is applied even at 2**90 is taken to compute in float32 or
# bfloat16, because in float16 even gradients of 2**-74 would overflow.
_WIDE_EXPONENT = 90
# How far apart the exponents are at which the search begins. A float16 gradient neither
# overflows nor becomes 0 at 40 exponents in a row. A heuristic: smaller, because other
# values of the step may overflow earlier.
_SEARCH_STEP = 8
# The exponent at which the sweep of a float32 or bfloat16 step starts. The sweep covers
# the loss scales that are used in practice, 2**30 to 1, at which hardly anything
# underflows in these dtypes.
_START_EXPONENT = 30
# How much two runs at the same loss scale may differ, relative to the norm of an
# output. A heuristic.
_MAX_NOISE = 0.01
# The largest change that rounding explains, relative to the norm of an output. A
# heuristic: about 8 times 2**-23, the distance from 1 to the next float32 number.
_ROUNDING = 1e-6
# The largest change that noise explains, as a multiple of the difference between two
# runs at the same loss scale. A heuristic.
_NOISE_FACTOR = 8


class Sweep(NamedTuple):
    """The outputs of a step at several loss scales, in falling order.

    Attributes:
      exponents: the log2 of each loss scale; float64, shape (scales,).
      outputs: the samples of each output at all loss scales; float64 or int64, shape
        (scales, elements).
      repeated: the outputs of a second run at the highest loss scale, each of shape
        (elements,).
      is_narrow: whether the step is taken to compute in float16, because it is skipped
        at 2**90.
      underflowed: the outputs at a loss scale at which all gradients underflow, each of
        shape (elements,); empty if there is no such loss scale, or if the step is
        skipped there.
    """

    exponents: np.ndarray
    outputs: Arrays
    repeated: Arrays
    is_narrow: bool
    underflowed: Arrays

    def noise(self, path: Path) -> np.ndarray:
        """Computes the norm of the difference between two runs at one loss scale."""
        return norm(difference(self.outputs[path][0], self.repeated[path]))

    def tolerance(self, path: Path, x: np.ndarray) -> np.ndarray:
        """Computes the largest change from `x` that rounding and noise explain.

        `x` has the values of the output at one or more loss scales, of shape
        (…, elements). The result is a norm for each of them, of shape (…).
        """
        return np.maximum(_ROUNDING * norm(x), _NOISE_FACTOR * self.noise(path))


def trials_at_falling_scales(experiment: Experiment) -> list[Trial]:
    """Runs a step at falling loss scales and returns the trials that were not skipped.

    A silent step (see `Trial.is_silent`) counts as applied at every loss scale.
    """
    highest = _highest_applied(experiment)
    start = _START_EXPONENT if highest == _WIDE_EXPONENT else highest
    falling = [start - offset for offset in _OFFSETS]
    trials = [experiment.trial_at(x) for x in falling if x >= LOWEST_EXPONENT]
    return [trial for trial in trials if trial.was_applied]


def _highest_applied(experiment: Experiment) -> int:
    """Finds the exponent of the highest loss scale at which a step is applied.

    It searches upwards, by bisection, from a loss scale at which the step is applied.
    Far below, the step may be skipped again: if all gradients underflow, normalizing
    them divides 0 by 0. If the step is applied nowhere, the result is below
    `LOWEST_EXPONENT`.
    """

    def is_skipped(exponent):
        return not experiment.trial_at(exponent).was_applied

    own = min(round(log2_of(experiment.loss_scale)), _WIDE_EXPONENT)
    candidates = range(own, LOWEST_EXPONENT, -_SEARCH_STEP)
    applied = (exponent for exponent in candidates if not is_skipped(exponent))
    exponents = range(next(applied, LOWEST_EXPONENT), _WIDE_EXPONENT + 1)
    n_applied = bisect.bisect_left(exponents, True, key=is_skipped)
    return exponents.start + n_applied - 1


def sweep_of(
    experiment: Experiment,
    trials: list[Trial],
    outputs: list[Path],
) -> Sweep:
    """Collects some outputs of the trials, and of a second run at the highest scale.

    Raises a `ValueError` if an output differs by more than 1% between the two runs at
    the highest loss scale.

    Args:
      experiment: runs the step again.
      trials: the trials of `trials_at_falling_scales`, at least one.
      outputs: the outputs to collect. An output that some trial did not return is left
        out.
    """
    is_narrow = not experiment.trial_at(_WIDE_EXPONENT).was_applied
    # In float16, all gradients underflow at the lowest loss scale.
    lowest = experiment.trial_at(LOWEST_EXPONENT)
    values = {
        path: np.stack([trial.outputs[path] for trial in trials])
        for path in outputs
        if all(path in trial.outputs for trial in trials)
    }
    sweep = Sweep(
        exponents=np.array([log2_of(trial.loss_scale) for trial in trials]),
        outputs=values,
        repeated=experiment.trial(trials[0].loss_scale).outputs,
        is_narrow=is_narrow,
        underflowed=lowest.outputs if is_narrow and lowest.was_applied else {},
    )
    _check_repeatable(sweep)
    return sweep


def _check_repeatable(sweep: Sweep) -> None:
    """Raises a `ValueError` if two runs at the highest loss scale differ by over 1%."""
    for path, rows in sweep.outputs.items():
        if sweep.noise(path) > _MAX_NOISE * norm(rows[0]):
            raise ValueError(
                f"two runs at the same loss scale differ in {name_of(path)}. Pass "
                "everything that the step depends on as arguments that can be copied: "
                "batches and PRNG keys as arrays, not iterators or generators"
            )
