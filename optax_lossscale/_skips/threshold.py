"""Rules with a threshold for the norm: a fixed one, or one that follows the norms."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.stateful import checked, choose, state_field
from optax_lossscale._skips.rule import SkipRule

_EARLY_THRESHOLD = 1e10  # AXLearn's threshold for the first `min_count` applied steps


class ThresholdSkipRule(SkipRule):
    """The rule of `skips.megatron`, and of `skips.axlearn` for a fixed threshold.

    Args:
      threshold: steps with a larger norm are skipped.
      strict: whether a step is skipped also if its norm equals the threshold.
    """

    threshold: float = checked(validation.positive)
    strict: bool = checked(validation.flag, default=False)

    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        if self.strict:
            return self, norm < self.threshold
        return self, norm <= self.threshold


class DropNorm(NamedTuple):
    """A threshold for `skips.axlearn` that follows the norms of applied steps.

    Once `min_count` steps are applied, it is `mean_factor` times the moving average of
    their norms, plus `stddev_factor` times their standard deviation.
    """

    mean_factor: float
    stddev_factor: float
    min_count: int


class MovingAverageSkipRule(SkipRule):
    """The rule of `skips.axlearn` for a threshold that follows the norms.

    Skips a step whose norm is not below the threshold that `DropNorm` describes, and
    learns from applied steps alone.

    Args:
      mean_factor: the factor of the mean in the threshold.
      stddev_factor: the factor of the standard deviation in the threshold.
      min_count: how many steps must be applied first; until then, the threshold is
        1e10.
      grad_norm_ema_decay: the decay of the moving averages, in (0, 1).

    Attributes:
      count: the steps applied so far; int32, shape (); state.
      mean: moving average of their norms; float32, shape (); state.
      mean_square: moving average of the norms' squares; float32, shape (); state.
    """

    mean_factor: float = checked(validation.positive)
    stddev_factor: float = checked(
        validation.number_between, least=0, most=validation.LARGEST
    )
    min_count: int = checked(validation.count)
    grad_norm_ema_decay: float = checked(
        validation.number_between,
        least=validation.ABOVE_ZERO,
        most=validation.BELOW_ONE,
        allowed="in (0, 1) as a float32, such as 0.99",
    )
    count: jax.Array = state_field(0)
    mean: jax.Array = state_field(1.0)
    mean_square: jax.Array = state_field(1.0)

    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        is_usual = norm < self._threshold()
        # If one square were infinite, all thresholds from then on would be.
        square = jnp.minimum(jnp.square(norm), validation.LARGEST)
        learned = self.replace(
            count=optax.safe_increment(self.count),
            mean=self._averaged(self.mean, norm),
            mean_square=self._averaged(self.mean_square, square),
        )
        return choose(is_usual, learned, self), is_usual

    def _threshold(self) -> jax.Array:
        """The norm from which on a step is skipped; float32, shape ()."""
        threshold = self.mean * self.mean_factor
        if self.stddev_factor:
            variance = self.mean_square - jnp.square(self.mean)
            stddev = jnp.sqrt(jnp.maximum(variance, 0))
            threshold = threshold + stddev * self.stddev_factor
        is_early = self.count < self.min_count
        return jnp.where(is_early, _EARLY_THRESHOLD, threshold)

    def _averaged(self, average: jax.Array, number: jax.Array) -> jax.Array:
        """A moving average with one more number, without a bias towards its start."""
        correction = self._weight(self.count) / self._weight(self.count + 1)
        decay = self.grad_norm_ema_decay * correction
        return decay * average + (1 - decay) * number

    def _weight(self, count: jax.Array) -> jax.Array:
        """The weight of `count` numbers in a moving average that began at 0."""
        return 1 - self.grad_norm_ema_decay ** count.astype(jnp.float32)
