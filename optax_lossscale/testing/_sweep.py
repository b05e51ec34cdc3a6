"""A sweep: what a step returns at falling loss scales.

It begins at the highest loss scale at which the step is applied. The loss scales are
powers of two, which change no digit of a correct step's gradients.
"""

import bisect
from typing import NamedTuple

import numpy as np

from optax_lossscale.testing._experiment import Experiment, log2_of
from optax_lossscale.testing._numbers import Numbers, Path, difference, norm
from optax_lossscale.testing._output_names import name_of
from optax_lossscale.testing._trial import Trial

# How far the exponents of the loss scales are below the highest one. The distances
# between neighbours alternate: at equal ones, the rounding error of a number such as
# 1/3, of which every second bit is set, could follow the scale.
_OFFSETS = [5 * i // 2 for i in range(13)]
LOWEST_EXPONENT = -125  # of a loss scale at which nearly all gradients underflow
# A step that is applied even at 2**90 computes in float32 or bfloat16, where nothing
# underflows at the loss scales that matter, which are those from 2**30 down.
_WIDE_EXPONENT = 90
_START_EXPONENT = 30
_NOISE = 0.01  # how much two runs at the same loss scale may differ, relatively
_ROUNDING = 1e-6  # how much rounding may change an output, relatively
_MANY_RUNS = 8  # how many times the difference of two runs others may differ by


class Sweep(NamedTuple):
    """What a step returns at several loss scales, in falling order.

    Attributes:
      exponents: the exponents of the loss scales; shape (scales,).
      outputs: each output at all loss scales; shape (scales, numbers).
      repeated: the outputs of a second run at the highest loss scale.
      underflowed: the outputs at a loss scale at which all gradients underflow; empty
        if there is none.
    """

    exponents: np.ndarray
    outputs: Numbers
    repeated: Numbers
    underflowed: Numbers

    def negligible(self, path: Path, x: np.ndarray) -> np.ndarray:
        """The largest norm of a difference from `x` that rounding and noise explain."""
        noise = difference(self.outputs[path][0], self.repeated[path])
        return np.maximum(_ROUNDING * norm(x), _MANY_RUNS * norm(noise))


def trials_at_falling_scales(experiment: Experiment) -> list[Trial]:
    """Trials at falling loss scales, without those in which the step is skipped.

    The highest loss scale at which it is applied is found by bisection. A silent step
    counts as applied.
    """

    def is_skipped(exponent):
        return not experiment.at(exponent).was_applied

    exponents = range(LOWEST_EXPONENT, _WIDE_EXPONENT + 1)
    how_many_fit = bisect.bisect_left(exponents, True, key=is_skipped)
    highest = LOWEST_EXPONENT - 1 + how_many_fit
    start = _START_EXPONENT if highest == _WIDE_EXPONENT else highest
    tried = [start - offset for offset in _OFFSETS]
    trials = [experiment.at(x) for x in tried if x >= LOWEST_EXPONENT]
    return [trial for trial in trials if trial.was_applied]


def sweep_of(
    experiment: Experiment,
    trials: list[Trial],
    judged: list[Path],
) -> Sweep:
    """The sweep of these trials; raises a `ValueError` if two runs differ.

    They are those of `trials_at_falling_scales`, at least one.
    """
    lowest = experiment.at(LOWEST_EXPONENT)
    is_narrow = not experiment.at(_WIDE_EXPONENT).was_applied
    repeated = experiment.trial(trials[0].loss_scale).outputs
    outputs = {
        path: np.stack([trial.outputs[path] for trial in trials])
        for path in judged
        if all(path in trial.outputs for trial in trials)
    }
    for path, values in outputs.items():
        noise = difference(values[0], repeated[path])
        if norm(noise) > _NOISE * norm(values[0]):
            raise ValueError(
                f"two runs at the same loss scale differ, in {name_of(path)}. Pass the "
                "step all that it depends on as arguments that can be copied: batches "
                "and PRNG keys as arrays, not iterators or generators"
            )
    return Sweep(
        exponents=np.array([log2_of(trial.loss_scale) for trial in trials]),
        outputs=outputs,
        repeated=repeated,
        # A step that is skipped at 2**90 computes in float16, whose gradients all
        # underflow at the lowest loss scale.
        underflowed=lowest.outputs if is_narrow and lowest.was_applied else {},
    )
