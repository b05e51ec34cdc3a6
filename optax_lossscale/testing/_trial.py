"""One run of a step: what it was given, what it made, and whether it was applied.

A step says whether it was applied in two ways: by the flag `should_apply` of a state
that it returns, and by the loss scale, which adapts one way after a skipped step and
another way after an applied one. A step that returns neither is silent.
"""

import dataclasses
import functools
import math

import jax
import numpy as np

from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale.testing._contents import Contents, Numbers, equal, flat


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """One run of a step.

    Attributes:
      loss_scale: the loss scale that the step was given.
      fixed_overflow: whether all fixed loss scales were infinite.
      before: what its arguments held.
      after: what it returned or changed in place.
    """

    loss_scale: LossScale
    fixed_overflow: bool
    before: Contents
    after: Contents

    @property
    def outputs(self) -> Numbers:
        """The arrays that the step returned or changed in place, flat, by path."""
        return self.after.numbers

    @property
    def exponent(self) -> float:
        """The log2 of the loss scale that the step was given."""
        scale = np.max(self.loss_scale.loss_scale)
        return float(np.log2(scale))

    @property
    def is_infinite(self) -> bool:
        """Whether the loss scale was infinite, where all gradients overflow."""
        is_fixed = not jax.tree.leaves(self.loss_scale)
        return self.fixed_overflow if is_fixed else math.isinf(self.exponent)

    @functools.cached_property
    def adapted(self) -> tuple[LossScale, LossScale]:
        """The loss scale as it is after a skipped step, and after an applied one."""
        on_device = jax.device_put(self.loss_scale)
        return jax.device_get(_adapted(on_device))

    @functools.cached_property
    def flags(self) -> np.ndarray:
        """Whether the step was applied, by each output that says it; bools, (flags,).

        Each state gives a flag for each of its replicas. They are all False if a loss
        scale has adapted as after a skipped step. Without states, each loss scale gives
        a flag.
        """
        if_skipped, if_applied = self.adapted
        loss_scales = self.after.loss_scales
        states = self.after.states
        by_scales = [
            same(x, if_applied) or not same(x, if_skipped) for x in loss_scales
        ]
        if not states:
            return np.array(by_scales, bool)
        by_states = [np.ravel(state.should_apply) for state in states]
        return np.concatenate(by_states) & all(by_scales)

    @property
    def is_silent(self) -> bool:
        """Whether no output says whether the step was applied."""
        return self.flags.size == 0

    @property
    def more_skipped(self) -> int:
        """How many steps were skipped, by the states with the highest counts."""
        return _skipped_steps(self.after) - _skipped_steps(self.before)

    @property
    def was_applied(self) -> bool:
        """Whether no output says that the step, or a part of it, was skipped."""
        none_skipped = self.more_skipped <= 0
        return none_skipped and bool(np.all(self.flags))

    @property
    def was_skipped(self) -> bool:
        """Whether outputs say that the step was skipped, and none that it was not."""
        return not self.is_silent and not np.any(self.flags)


@jax.jit
def _adapted(loss_scale):
    """`Trial.adapted`, compiled, for a loss scale on the device."""
    return loss_scale.adjust(False), loss_scale.adjust(True)


def _skipped_steps(contents):
    """How many steps were skipped, by the state with the highest count; or 0."""
    counts = [np.sum(state.skipped_steps) for state in contents.states]
    return max(counts, default=0)


def same(x: LossScale, y: LossScale) -> bool:
    """Whether two loss scales have the same state.

    True if one of them is fixed, as it has no state that could differ.
    """
    numbers = [flat(number) for number in jax.tree.leaves(x)]
    others = [flat(number) for number in jax.tree.leaves(y)]
    if not numbers or not others:
        return True
    return len(numbers) == len(others) and all(map(equal, numbers, others))
