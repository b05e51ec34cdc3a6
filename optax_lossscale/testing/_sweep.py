"""A sweep runs a step at falling loss scales and collects its outputs.

It begins at the highest loss scale at which the step is applied, and divides it by 4
and by 8 in turn. Multiplying a float by a power of two changes only its exponent, so no
digit of a correct step's gradients depends on the scale.
"""

import bisect
from typing import NamedTuple

import numpy as np

from optax_lossscale.testing._experiment import Experiment, log2_of
from optax_lossscale.testing._numbers import Arrays, Path, difference, norm
from optax_lossscale.testing._output_names import name_of
from optax_lossscale.testing._trial import Trial

# How far the exponent of each loss scale is below the highest one: 0, 2, 5, 7, 10, …
# If all distances were equal, the rounding error of a number such as 1/3, in which every
# second bit is set, could follow the loss scale.
_OFFSETS = [5 * i // 2 for i in range(13)]
LOWEST_EXPONENT = -125  # of a loss scale at which nearly all gradients underflow
# A step that is applied even at 2**90 computes in float32 or bfloat16. There, nothing
# underflows at the loss scales that are used in practice, from 2**30 down.
_WIDE_EXPONENT = 90
_START_EXPONENT = 30
_MAX_NOISE = 0.01  # the largest relative difference of two runs at one loss scale
_ROUNDING = 1e-6  # the largest relative change that is put down to rounding
_NOISE_FACTOR = 8  # a change is noise up to this multiple of two runs' difference


class Sweep(NamedTuple):
    """The outputs of a step at several loss scales, in falling order.

    Attributes:
      exponents: the exponents of the loss scales; shape (scales,).
      outputs: the values of each output at all loss scales; shape (scales, numbers).
      repeated: the outputs of a second run at the highest loss scale.
      underflowed: the outputs at a loss scale at which all gradients underflow; empty
        if there is no such loss scale.
    """

    exponents: np.ndarray
    outputs: Arrays
    repeated: Arrays
    underflowed: Arrays

    def tolerance(self, path: Path, x: np.ndarray) -> np.ndarray:
        """Computes the largest change from `x` that rounding and noise explain."""
        noise = difference(self.outputs[path][0], self.repeated[path])
        return np.maximum(_ROUNDING * norm(x), _NOISE_FACTOR * norm(noise))


def trials_at_falling_scales(experiment: Experiment) -> list[Trial]:
    """Runs a step at falling loss scales, and returns the trials that were not skipped.

    Bisection finds the highest loss scale at which the step is applied. Silent steps
    count as applied.
    """

    def is_skipped(exponent):
        return not experiment.trial_at(exponent).was_applied

    exponents = range(LOWEST_EXPONENT, _WIDE_EXPONENT + 1)
    num_applied = bisect.bisect_left(exponents, True, key=is_skipped)
    highest = LOWEST_EXPONENT + num_applied - 1
    start = _START_EXPONENT if highest == _WIDE_EXPONENT else highest
    trials = []
    for offset in _OFFSETS:
        if start - offset >= LOWEST_EXPONENT:
            trials.append(experiment.trial_at(start - offset))
    return [trial for trial in trials if trial.was_applied]


def sweep_of(
    experiment: Experiment,
    trials: list[Trial],
    outputs: list[Path],
) -> Sweep:
    """Collects some outputs of the trials, and of a second run at the highest scale.

    Raises a `ValueError` if these outputs differ by more than 1% between the two runs
    at the highest loss scale.

    Args:
      experiment: runs the step again.
      trials: the trials of `trials_at_falling_scales`, at least one.
      outputs: the outputs to collect. Those that a trial does not return are left out.
    """
    values = {
        path: np.stack([trial.outputs[path] for trial in trials])
        for path in outputs
        if all(path in trial.outputs for trial in trials)
    }
    lowest = experiment.trial_at(LOWEST_EXPONENT)
    is_narrow = not experiment.trial_at(_WIDE_EXPONENT).was_applied
    repeated = experiment.trial(trials[0].loss_scale).outputs
    for path, rows in values.items():
        noise = difference(rows[0], repeated[path])
        if norm(noise) > _MAX_NOISE * norm(rows[0]):
            raise ValueError(
                f"two runs at the same loss scale differ, in {name_of(path)}. Pass "
                "everything that the step depends on as arguments that can be copied: "
                "batches and PRNG keys as arrays, not iterators or generators"
            )
    return Sweep(
        exponents=np.array([log2_of(trial.loss_scale) for trial in trials]),
        outputs=values,
        repeated=repeated,
        # A step that is skipped at 2**90 computes in float16, where all gradients
        # underflow at the lowest loss scale.
        underflowed=lowest.outputs if is_narrow and lowest.was_applied else {},
    )
