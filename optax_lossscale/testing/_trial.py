"""One run of a step: what it was given, what it made, and whether it was applied.

A step says whether it was applied in two ways: by the flag `should_apply` of a state
that it returns, and by the loss scale, which usually adapts differently after a
skipped and after an applied step. A step that returns neither is silent.
"""

import dataclasses
import functools

import jax
import numpy as np

from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.state import LossScaleState
from optax_lossscale.testing._numbers import Fingerprint, Numbers, Path


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trial:
    """One run of a step.

    Attributes:
      loss_scale: the loss scale that the step was given.
      is_infinite: whether the loss scale was infinite, so that all gradients overflow.
        If so, fixed loss scales were made infinite as well.
      given: the arrays among the step's arguments, sampled if they are large.
      given_fingerprints: the fingerprints of these arrays, unsampled.
      outputs: the arrays that it returned or changed in place, sampled likewise.
      output_fingerprints: the fingerprints of these arrays, unsampled.
      loss_scales: the loss scales that it returned or changed, if they can adapt.
      states: the states of loss scaling that it returned or changed.
      more_skipped: by how much the highest count of skipped steps has risen; negative
        or zero if no state came back.
      diverged: outputs and loss scales of which devices hold copies that differ.
    """

    loss_scale: LossScale
    is_infinite: bool
    given: Numbers
    given_fingerprints: dict[Path, Fingerprint]
    outputs: Numbers
    output_fingerprints: dict[Path, Fingerprint]
    loss_scales: list[LossScale]
    states: list[LossScaleState]
    more_skipped: int
    diverged: list[Path]

    @functools.cached_property
    def adapted(self) -> tuple[LossScale, LossScale]:
        """What `adjust` makes of the loss scale, after a skipped and an applied step.

        One that measures gradients may come out differently after an applied step.
        """
        on_device = jax.device_put(self.loss_scale)
        return jax.device_get(_adapted(on_device))

    @functools.cached_property
    def flags(self) -> np.ndarray:
        """Whether the step was applied, by each output that says it; bools, (flags,).

        Each state gives one flag per replica: its `should_apply`, but False if its loss
        scale is what only a skipped step returns. Without states, each loss scale gives
        one flag.
        """
        if self.states:
            flags = [
                np.ravel(state.should_apply) & self._may_be_applied(state.loss_scale)
                for state in self.states
            ]
            return np.concatenate(flags)
        return np.array(list(map(self._may_be_applied, self.loss_scales)), bool)

    def _may_be_applied(self, loss_scale):
        """Whether this is not a loss scale that only a skipped step returns."""
        if_skipped, if_applied = self.adapted
        looks_skipped = loss_scale == if_skipped and loss_scale != if_applied
        return not looks_skipped

    @property
    def is_silent(self) -> bool:
        """Whether no output says whether the step was applied."""
        return self.flags.size == 0

    @property
    def was_applied(self) -> bool:
        """Whether no output says that the step, or a part of it, was skipped."""
        return self.more_skipped <= 0 and bool(np.all(self.flags))

    @property
    def was_skipped(self) -> bool:
        """Whether outputs say that the step was skipped, and none that it was not."""
        return not self.is_silent and not np.any(self.flags)

    def returns(self, loss_scale: LossScale) -> bool:
        """Whether all loss scales that come back are this one, and there is one."""
        are_same = [x == loss_scale for x in self.loss_scales]
        return bool(are_same) and all(are_same)


@jax.jit
def _adapted(loss_scale):
    """`Trial.adapted`, compiled, for a loss scale on the device."""
    return loss_scale.adjust(False), loss_scale.adjust(True)
