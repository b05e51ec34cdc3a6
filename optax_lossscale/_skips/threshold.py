"""Rules that skip a step whose norm is above a threshold, fixed or adaptive.

For example, `skips.megatron(10.0)` skips every step whose norm is above 10. An adaptive
threshold follows the norms of applied steps: `skips.drop_norm_by_grad_norm_ema()`
describes one that is 20 times their moving average.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.stateful import checked, choose, state_field
from optax_lossscale._skips.rule import SkipRule

# AXLearn's threshold for the first `min_count` applied steps
_EARLY_THRESHOLD = 1e10


class ThresholdSkipRule(SkipRule):
    """The rule of `skips.megatron`, and of `skips.axlearn` for a fixed threshold.

    Args:
      threshold: steps with a larger norm are skipped.
      strict: whether a step whose norm equals the threshold is skipped, too. AXLearn
        skips it, and Megatron-LM applies it.
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

    Once `min_count` steps have been applied, the threshold is `mean_factor` times the
    moving average of the norms of applied steps, plus `stddev_factor` times their
    standard deviation. Before that, it is 1e10.

    Attributes:
      mean_factor: the factor of the mean norm; a Python float.
      stddev_factor: the factor of the standard deviation; a Python float.
      min_count: how many steps must be applied first; a Python int.
    """

    mean_factor: float
    stddev_factor: float
    min_count: int


class MovingAverageSkipRule(SkipRule):
    """The rule of `skips.axlearn` for a threshold that follows the norms.

    Skips a step unless its norm is below the threshold, which `DropNorm` describes.
    Only applied steps change the threshold.

    Args:
      mean_factor: the factor of the mean in the threshold.
      stddev_factor: the factor of the standard deviation in the threshold.
      min_count: how many steps must be applied first.
      grad_norm_ema_decay: the decay of the moving averages, in (0, 1).

    Attributes:
      count: how many steps have been applied so far; int32, shape ().
      mean: moving average of the norms of applied steps, 1 at first; float32, shape ().
      mean_square: moving average of the squares of these norms, 1 at first; float32,
        shape ().
    """

    mean_factor: float = checked(validation.positive)
    stddev_factor: float = checked(
        validation.number_between, least=0, most=validation.LARGEST_FLOAT32
    )
    min_count: int = checked(validation.count)
    grad_norm_ema_decay: float = checked(
        validation.number_between,
        least=validation.SMALLEST_NORMAL,
        most=validation.BELOW_ONE,
        allowed="a number in (0, 1), normal in float32, such as 0.99",
    )
    count: jax.Array = state_field(0)
    mean: jax.Array = state_field(1.0)
    mean_square: jax.Array = state_field(1.0)

    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        is_usual = norm < self._threshold()
        # An infinite square would make all later thresholds infinite.
        square = jnp.square(norm)
        square = jnp.minimum(square, validation.LARGEST_FLOAT32)
        updated = self.replace(
            count=optax.safe_increment(self.count),
            mean=self._averaged(self.mean, norm),
            mean_square=self._averaged(self.mean_square, square),
        )
        return choose(is_usual, updated, self), is_usual

    def _threshold(self) -> jax.Array:
        """Returns the smallest norm at which a step is skipped; float32, shape ()."""
        threshold = self.mean * self.mean_factor
        if self.stddev_factor:
            variance = self.mean_square - jnp.square(self.mean)
            stddev = jnp.sqrt(jnp.maximum(variance, 0))
            threshold = threshold + stddev * self.stddev_factor
        is_early = self.count < self.min_count
        return jnp.where(is_early, _EARLY_THRESHOLD, threshold)

    def _averaged(self, average: jax.Array, number: jax.Array) -> jax.Array:
        """Adds a number to a bias-corrected moving average."""
        old_weight = self._weight(self.count)
        new_weight = self._weight(self.count + 1)
        correction = old_weight / new_weight
        decay = self.grad_norm_ema_decay * correction
        return decay * average + (1 - decay) * number

    def _weight(self, count: jax.Array) -> jax.Array:
        """Returns the total weight of `count` numbers in an average that began at 0."""
        return 1 - self.grad_norm_ema_decay ** count.astype(jnp.float32)
