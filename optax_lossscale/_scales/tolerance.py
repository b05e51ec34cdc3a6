"""The loss scale that tolerates a share of overflows before it backs off.

For example, with a tolerance of 0.5, the scale backs off if the second step of training
overflows, but not if the third is the first to overflow, because only 1 step in 3 has
overflowed by then. With a tolerance of 0, the scale backs off on every overflow.
"""

from typing import Self

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays import messages, validation
from optax_lossscale._arrays.precision import precise_product
from optax_lossscale._arrays.stateful import checked, choose, state_field
from optax_lossscale._scales.loss_scale import LossScale


class ToleranceLossScale(LossScale):
    """Backs off on overflow if too many recent steps have overflowed.

    Use it to resume a run that was started in fairseq, or, with a `tolerance` above 0,
    to keep rare broken batches from lowering the scale. On overflow, the scale backs
    off if the overflows since the last back-off make up at least the share `tolerance`
    of the steps since the scale last changed. The rule::

        steps += 1
        if grads_finite:
            growth_counter += 1
            if growth_counter == growth_interval:
                growth_counter = steps = 0
                loss_scale *= factor
        else:
            growth_counter = 0
            overflows += 1
            if overflows / steps >= tolerance:
                overflows = steps = 0
                loss_scale = max(loss_scale / factor, threshold)

    There are two exceptions. A scale that would fall to `min_scale` or below stays as
    it is and becomes `exhausted`, so that `raise_if_stuck` raises an error. A scale
    that would grow beyond float32's range stays as it is.

    Args:
      initial_scale: the loss scale before the first step, above `min_scale`.
      growth_interval: the scale grows after this many finite steps in a row.
      factor: the scale grows by this factor and is divided by it to back off; at least
        1.
      tolerance: the share of overflows at which the scale backs off, in [0, 1].
      threshold: the lowest scale to back off to, or None. With a threshold above
        `min_scale`, the scale is never exhausted. As in the original, a scale below the
        threshold rises to it when it backs off.
      min_scale: a lower bound, above which the scale always stays. The default is
        fairseq's default for `min_loss_scale`.

    Attributes:
      growth_counter: finite steps in a row since the last growth; int32, shape ().
      steps: steps since the scale last changed, or would have changed but for a bound;
        int32, shape ().
      overflows: overflows since the last back-off, whether or not `min_scale` prevented
        it; int32, shape ().

    Raises:
      ValueError: for an argument outside the ranges above.

    Source: fairseq's `DynamicLossScaler`.

    Example:
      >>> import optax_lossscale as ols
      >>> ls = ols.presets.ToleranceLossScale(initial_scale=1024.0, tolerance=0.5)
      >>> for finite in (True, False):
      ...     ls = ls.adjust(finite)
      ...     print(ls())
      1024.0
      512.0
    """

    growth_interval: int = checked(validation.positive_int, default=2000)
    factor: float = checked(validation.growth_factor, default=2.0)
    tolerance: float = checked(
        validation.number_between,
        least=0,
        most=1,
        allowed="a number in [0, 1]",
        default=0.0,
    )
    threshold: float | None = checked(validation.scale_or_none, default=None)
    min_scale: float = checked(validation.scale, default=1e-4)
    growth_counter: jax.Array = state_field(0)
    steps: jax.Array = state_field(0)
    overflows: jax.Array = state_field(0)
    _exhausted: jax.Array = state_field(False)

    def __post_init__(self):
        super().__post_init__()
        if not self.initial_scale > self.min_scale:
            allowed = f"above {messages.user_name('min_scale')}={self.min_scale!r}"
            messages.refuse("initial_scale", self.initial_scale, allowed)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        return choose(grads_finite, self._after_finite_step(), self._after_overflow())

    def exhausted(self) -> jax.Array:
        return jnp.asarray(self._exhausted)

    def _after_finite_step(self) -> Self:
        """Counts a finite step and grows the scale if the interval is over."""
        scale = self()
        steps = optax.safe_increment(self.steps)
        counter = self.growth_counter + 1
        due = counter >= self.growth_interval
        product = precise_product(scale, self.factor)
        is_in_range = product <= validation.LARGEST_FLOAT32
        grown = jnp.where(is_in_range, product, scale)
        return self.replace(
            loss_scale=jnp.where(due, grown, scale),
            growth_counter=jnp.where(due, 0, counter),
            steps=jnp.where(due, 0, steps),
            _exhausted=False,
        )

    def _after_overflow(self) -> Self:
        """Counts an overflow and backs off if the share of overflows is too large.

        A scale that would fall to `min_scale` or below stays as it is and is exhausted.
        """
        scale = self()
        steps = optax.safe_increment(self.steps)
        overflows = optax.safe_increment(self.overflows)
        share = jnp.divide(overflows, steps)
        backs_off = share >= self.tolerance
        lowered = precise_product(scale, 1 / self.factor)
        if self.threshold is not None:  # a lower scale rises to it
            lowered = jnp.maximum(lowered, self.threshold)
        exhausted = backs_off & (lowered <= self.min_scale)
        is_rescaled = backs_off & ~exhausted
        return self.replace(
            loss_scale=jnp.where(is_rescaled, lowered, scale),
            growth_counter=0,
            steps=jnp.where(backs_off, 0, steps),
            overflows=jnp.where(backs_off, 0, overflows),
            _exhausted=exhausted,
        )
