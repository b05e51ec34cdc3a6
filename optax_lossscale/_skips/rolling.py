"""The rule of a rolling window, which compares each step with the mean of recent steps.

For example, with a window of 128 steps and a `sigma_factor` of 6, a step is skipped if
its norm is more than 6 standard deviations above the mean norm of the last 128 steps,
or its loss above their mean loss.

OLMo-core, MaxText and Levanter use this rule. Levanter divides by another number in the
standard deviation (`ddof`), bounds it from below (`least_deviation`), and waits one
step longer before it may skip (`least_history`).
"""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.stateful import checked, state_field
from optax_lossscale._skips.rule import SkipRule, with_newest


class RollingSkipRule(SkipRule):
    """The rule of `skips.olmo_core`, `skips.maxtext` and `skips.levanter`.

    Skips a step whose norm or loss is more than `sigma_factor` standard deviations
    above the mean of the window. The window holds the last `length` finite steps,
    including those that the rule skipped.

    Args:
      length: the length of the window, in steps.
      sigma_factor: a norm or loss more than this many standard deviations above the
        mean is skipped.
      least_history: how many steps the window must contain before any is skipped.
      ddof: 1 for the unbiased standard deviation, 0 for the biased one.
      least_deviation: a lower bound on the standard deviation.

    Attributes:
      seen: how many steps the window contains so far; int32, shape ().
    """

    needs_value = True
    length: int = checked(validation.int_between, least=2, most=2**20)
    sigma_factor: float = checked(validation.positive)
    least_history: int = checked(validation.count)
    ddof: int = checked(validation.int_between, least=0, most=1, default=1)
    least_deviation: float = checked(validation.finite, default=0.0)
    seen: jax.Array = state_field(0)
    # Norms in the first row and losses in the second, newest first; zeros stand for
    # steps that are still to come; float32, shape (2, length)
    _window: jax.Array = state_field()

    def __post_init__(self):
        super().__post_init__()
        empty = np.zeros((2, self.length), np.float32)
        self._set(_window=empty)

    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        assert value is not None  # for type checkers: `update` has checked it
        numbers = jnp.stack([norm, value])
        is_early = self.seen < self.least_history
        is_usual = jnp.all(self._are_usual(numbers))
        new = self.replace(
            seen=jnp.minimum(self.seen + 1, self.length),
            _window=with_newest(self._window, numbers),
        )
        return new, is_usual | is_early

    def _are_usual(self, numbers: jax.Array) -> jax.Array:
        """Whether the norm and the loss are usual; bools, shape (2,).

        A number is usual if it is at most `sigma_factor` standard deviations above the
        mean of its row of the window.
        """
        count = self.seen.astype(jnp.float32)
        is_filled = jnp.arange(self.length) < self.seen

        # How far the number is above each number in the window: exactly 0 if all are
        # the same. Subtracting the mean of the window instead would not do: the mean is
        # rounded, and XLA may compute it twice, with two roundings, so that a constant
        # looks like a spike (as many did on CPU with jax 0.10).
        excess = numbers[:, None] - self._window
        excess = jnp.where(is_filled, excess, 0)
        mean_excess = jnp.sum(excess, axis=1) / jnp.maximum(count, 1)

        residuals = excess - mean_excess[:, None]
        residuals = jnp.where(is_filled, residuals, 0)
        squares = jnp.square(residuals)
        sum_of_squares = jnp.sum(squares, axis=1)
        degrees_of_freedom = jnp.maximum(count - self.ddof, 1)
        variance = sum_of_squares / degrees_of_freedom
        deviation = jnp.sqrt(variance)
        deviation = jnp.maximum(deviation, self.least_deviation)
        return mean_excess <= self.sigma_factor * deviation
