"""One run of a step: its arguments, its outputs, and whether the step was applied.

A training step may report in two ways whether it was applied: by returning a state,
which has the flag `should_apply`, or by returning its loss scale, which usually adapts
differently after a skipped step than after an applied one. `DynamicLossScale`, for
instance, backs off only after a skipped step. A step that returns neither, or only a
fixed loss scale, is called *silent* and counts as applied.
"""

import dataclasses
import functools

import jax
import numpy as np

from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.state import LossScaleState
from optax_lossscale.testing._numbers import Arrays, Fingerprint, Path


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trial:
    """One run of a step.

    Attributes:
      loss_scale: the loss scale among the step's arguments.
      is_infinite: whether gradients overflow because the loss scale is infinite. In
        such a trial, fixed loss scales are infinite as well.
      arguments: the samples of the arrays among the step's arguments, by path; float64
        or int64, of shape (elements,).
      argument_fingerprints: the fingerprints of these arrays, computed from all of
        their elements.
      outputs: the samples of the arrays that the step returned or changed in place,
        like `arguments`.
      output_fingerprints: the fingerprints of these arrays.
      loss_scales: the loss scales that the step returned or changed in place, without
        fixed ones.
      states: each `LossScaleState` that the step returned or changed in place.
      skip_count_change: how much the highest count of skipped steps rose; zero or
        negative if the step returned no state.
      diverged: the paths of outputs and loss scales that are replicated, but differ
        between devices.
    """

    loss_scale: LossScale
    is_infinite: bool
    arguments: Arrays
    argument_fingerprints: dict[Path, Fingerprint]
    outputs: Arrays
    output_fingerprints: dict[Path, Fingerprint]
    loss_scales: list[LossScale]
    states: list[LossScaleState]
    skip_count_change: int
    diverged: list[Path]

    @functools.cached_property
    def adjusted(self) -> tuple[LossScale, LossScale]:
        """The loss scales that `adjust` returns after a skipped and an applied step.

        `adjust` is not told the magnitude of gradients, so after an applied step, a
        loss scale that adapts to this magnitude may differ from the second one.
        """
        on_device = jax.device_put(self.loss_scale)
        return jax.device_get(_adjusted(on_device))

    @functools.cached_property
    def applied_flags(self) -> np.ndarray:
        """Whether each state or loss scale says the step was applied; bool, shape (n,).

        A returned state has one flag per replica: its `should_apply`, or False if its
        loss scale shows that the step was skipped. If the step returned no state, each
        loss scale has one flag, which is False if the scale shows the same.
        """
        if not self.states:
            flags = [not self._shows_skip(x) for x in self.loss_scales]
            return np.array(flags, bool)
        flags = [
            np.ravel(state.should_apply) & (not self._shows_skip(state.loss_scale))
            for state in self.states
        ]
        return np.concatenate(flags)

    def _shows_skip(self, loss_scale: LossScale) -> bool:
        """Whether a step returns this loss scale if it is skipped, and only then."""
        if_skipped, if_applied = self.adjusted
        return loss_scale == if_skipped and loss_scale != if_applied

    @property
    def is_silent(self) -> bool:
        """Whether no output reports whether the step was applied."""
        return self.applied_flags.size == 0

    @property
    def was_applied(self) -> bool:
        """Whether no output reports that the step or one of its updates was skipped."""
        return self.skip_count_change <= 0 and bool(np.all(self.applied_flags))

    @property
    def was_skipped(self) -> bool:
        """Whether there are `applied_flags`, and all say that the step was skipped."""
        return not self.is_silent and not np.any(self.applied_flags)

    def returns_only(self, loss_scale: LossScale) -> bool:
        """Whether the step returned this loss scale, once or more, and no other."""
        are_same = [x == loss_scale for x in self.loss_scales]
        return bool(are_same) and all(are_same)


@jax.jit
def _adjusted(loss_scale: LossScale) -> tuple[LossScale, LossScale]:
    """Computes `Trial.adjusted`, for a loss scale on the device."""
    return loss_scale.adjust(False), loss_scale.adjust(True)
