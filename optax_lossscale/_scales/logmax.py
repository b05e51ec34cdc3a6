"""The loss scale that predicts how large the next gradients will be.

At each step, the rule computes log2 of the largest gradient and updates moving averages
of this number and of its square, from which it computes a mean and a standard
deviation. It then chooses the scale so that the next step's largest gradient overflows
only if its log2 is several standard deviations above the mean.

For example, let the mean be -10 and the standard deviation 1. With the default of 3.09
standard deviations, the scale becomes 2**(16 + 10 - 3.09), so that a gradient of
2**(-10 + 3.09) becomes 2**16.
"""

from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.finite import AxisName, largest_on_all_replicas
from optax_lossscale._arrays.stateful import checked, choose, state_field
from optax_lossscale._scales.loss_scale import LossScale

_decay = partial(
    validation.number_between,
    least=0,
    most=validation.BELOW_ONE,
    allowed="a number in [0, 1), below 1 in float32",
)


class LogMaxLossScale(LossScale):
    """Predicts the largest gradients and scales them so that few overflow.

    Use it to resume a run that was started in OpenSeq2Seq. For other runs, prefer
    `HeadroomLossScale`, which measures the gradients, too. With the defaults here, a
    single overflow enters the averages as a number so large that it keeps the scale at
    `min_scale` for thousands of steps.

    The rule assumes that log2 of each step's largest gradient is normally distributed.
    It scales a gradient whose log2 is `overflow_std_dev` standard deviations above the
    mean to 2**16. The averages are bias-corrected::

        x = log2(largest_gradient) if grads_finite else 2 ** log_max
        mean = average(x, beta1)
        std_dev = sqrt(average(x ** 2, beta2) - average(x, beta2) ** 2)
        highest = mean + overflow_std_dev * std_dev
        loss_scale = clip(2 ** (16 - highest), min_scale, max_scale)

    A step whose gradients are all zero is averaged as if its largest gradient were
    2**-126. `adjust` is given only a flag, so it averages overflows and leaves the
    scale as it is on finite steps.

    Args:
      initial_scale: the loss scale before the first step, within the bounds.
      min_scale: the floor.
      max_scale: the cap.
      log_max: an overflow enters the averages as `x = 2**log_max`, although `x` is
        otherwise a logarithm, as in OpenSeq2Seq. With the default of 16, that is 65536.
        It may be at most 60, so that the square of `x` is finite in float32.
      beta1: the decay of the mean, in [0, 1).
      beta2: the decay of the averages for the standard deviation, in [0, 1).
      overflow_std_dev: how many standard deviations above the mean a gradient's log2
        may be before it overflows, from 0 to 1e6. The default of 3.09 is OpenSeq2Seq's:
        1 in 1000 normally distributed numbers is farther above the mean.

    Attributes:
      mean: moving average of `x` with decay `beta1`, not bias-corrected; float32, shape
        ().
      slow_mean: moving average of `x` with decay `beta2`, not bias-corrected; float32,
        shape ().
      square: moving average of `x ** 2` with decay `beta2`, not bias-corrected;
        float32, shape ().
      weight1: the weight of the initial 0 in `mean`: `beta1` to the power of the number
        of averaged steps; float32, shape ().
      weight2: the weight of the initial 0 in `slow_mean` and `square`, a power of
        `beta2`; float32, shape ().

    Raises:
      ValueError: for an argument outside the ranges above.

    Source: OpenSeq2Seq's `LogMaxScaler` (https://arxiv.org/abs/1805.10387).

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> ls = ols.presets.LogMaxLossScale()
      >>> ls, should_apply = ls.update({"w": jnp.array([0.25, -1.0])})
      >>> print(ls(), should_apply)
      65536.0 True
    """

    _gradients_checked_by = "update"
    initial_scale: float = 1.0  # `LossScale` has declared its check.
    min_scale: float = checked(validation.scale, default=1.0)
    max_scale: float = checked(validation.scale, default=2.0**24)
    log_max: float = checked(
        validation.number_between,
        least=-validation.LARGEST_FLOAT32,
        most=60,
        allowed="a number of at most 60, in float32's range",
        default=16.0,
    )
    beta1: float = checked(_decay, default=0.99)
    beta2: float = checked(_decay, default=0.999)
    overflow_std_dev: float = checked(
        validation.number_between, least=0, most=10**6, default=3.09
    )
    mean: jax.Array = state_field(0.0)
    slow_mean: jax.Array = state_field(0.0)
    square: jax.Array = state_field(0.0)
    weight1: jax.Array = state_field(1.0)
    weight2: jax.Array = state_field(1.0)

    def __post_init__(self):
        super().__post_init__()
        validation.check_bounds(self.min_scale, self.initial_scale, self.max_scale)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        after_overflow = self._observe(self._x_of_overflow())
        return choose(grads_finite, self, after_overflow)

    def update(
        self, grads: Any, axis_name: AxisName | None = None
    ) -> tuple[Self, jax.Array]:
        largest_gradient = largest_on_all_replicas(grads, axis_name)
        finite = jnp.isfinite(largest_gradient)
        positive = jnp.maximum(largest_gradient, validation.SMALLEST_NORMAL)
        x = jnp.where(finite, jnp.log2(positive), self._x_of_overflow())
        return self._observe(x), finite

    def _upper_bound(self) -> float:
        return self.max_scale

    def _x_of_overflow(self) -> jax.Array:
        """Returns the `x` of an overflow, `2**log_max`; float32, shape ()."""
        return jnp.float32(2.0**self.log_max)

    def _observe(self, x: jax.Array) -> Self:
        """Averages one more `x` and sets the next scale."""
        new = self.replace(
            mean=_average(self.mean, x, self.beta1),
            slow_mean=_average(self.slow_mean, x, self.beta2),
            square=_average(self.square, x * x, self.beta2),
            weight1=self.weight1 * self.beta1,
            weight2=self.weight2 * self.beta2,
        )
        return new.replace(loss_scale=new._predicted_scale())

    def _predicted_scale(self) -> jax.Array:
        """Returns the scale at which the highest log2 becomes 16; float32, shape ()."""
        # The averages begin at 0. To correct this bias, they are divided by the total
        # weight of what has been averaged so far, as in Adam.
        mean = self.mean / (1 - self.weight1)
        slow_mean = self.slow_mean / (1 - self.weight2)
        mean_square = self.square / (1 - self.weight2)
        variance = mean_square - slow_mean**2
        std_dev = jnp.sqrt(jnp.maximum(variance, 0))
        highest = mean + self.overflow_std_dev * std_dev
        scale = jnp.exp2(16 - highest)
        return jnp.clip(scale, self.min_scale, self.max_scale)


def _average(average: jax.Array, x: jax.Array, decay: float) -> jax.Array:
    """Adds a number to a moving average that began at 0 and is not bias-corrected."""
    weight = jnp.float32(decay)  # rounded first, so that both weights add up to 1
    return weight * average + (1 - weight) * x
