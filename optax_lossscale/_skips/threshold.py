"""The rule of a threshold: norms above it are skipped."""

from typing import Self

import jax

from optax_lossscale._skips.rule import SkipRule


class ThresholdSkipRule(SkipRule):
    """Skips a step whose norm is above a threshold.

    Source: Megatron-LM's `grad_norm_skip_threshold`, which applies a norm of the threshold itself,
    and AxLearn's `drop_norm`, which skips it.
    """

    threshold: float  # the largest norm to apply, positive
    strict: bool = False  # whether to skip the threshold itself, too

    def decide(self, norm: jax.Array, value: jax.Array | None) -> tuple[Self, jax.Array]:
        """Compares the norm with the threshold."""
        return self, norm < self.threshold if self.strict else norm <= self.threshold
