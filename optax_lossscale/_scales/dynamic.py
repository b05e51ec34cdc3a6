"""The dynamic loss scale, which grows by trial and backs off on overflow.

The largest scale at which no gradient overflows is not known and changes during
training. The rule raises the scale from time to time until gradients overflow, and then
lowers it again, which costs about one step in 2000 with the defaults::

    2**15  -- 2000 finite steps -->  2**16  -- an overflow -->  2**15
"""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.stateful import choose, state_field
from optax_lossscale._scales.loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScale


class DynamicLossScale(LossScale):
    """Grows after a run of finite steps and backs off on a non-finite one.

    This is the default of `with_loss_scale`. The rule::

        if grads_finite:
            growth_counter += 1
            if growth_counter == growth_interval:
                growth_counter = 0
                hysteresis_left = hysteresis
                loss_scale = min(loss_scale * growth_factor, max_scale)
        else:
            growth_counter = 0
            if hysteresis_left > 1:
                hysteresis_left -= 1
            else:
                loss_scale = max(loss_scale * backoff_factor, min_scale)

    Zeros are finite. If the gradients of most steps are zero, use `HeadroomLossScale`:
    such steps keep raising this scale until the next nonzero gradients overflow.

    Args:
      initial_scale: the loss scale before the first step, within the bounds. If it is
        far too large, the first steps are skipped, one for each back-off.
      growth_interval: the scale grows after this many finite steps in a row.
      growth_factor: the factor by which the scale grows, at least 1.
      backoff_factor: the factor by which the scale backs off, in (0, 1].
      min_scale: the floor, or None for 2**-60. Set it below 1 for models whose
        gradients overflow even unscaled.
      max_scale: the cap, or None for 2**60.
      hysteresis: how many non-finite steps it takes to back off. The count starts over
        only at growth: once the scale has backed off, each one lowers it again.

    Attributes:
      growth_counter: finite steps in a row since the last growth; int32, shape ().
      hysteresis_left: non-finite steps left until a back-off; int32, shape ().

    Raises:
      ValueError: for an argument outside these ranges, or a scale outside 2**-60 to
        2**60.

    Source: TensorFlow's `DynamicLossScale`, after Micikevicius et al., "Mixed Precision
    Training" (https://arxiv.org/abs/1710.03740). Hysteresis is Megatron-LM's.

    Example:
      >>> import optax_lossscale as ols
      >>> ls = ols.DynamicLossScale(initial_scale=1024, growth_interval=2)
      >>> for finite in (True, True, False):
      ...     ls = ls.adjust(finite)
      ...     print(ls())
      1024.0
      2048.0
      1024.0
    """

    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float | None = 1.0
    max_scale: float | None = None
    hysteresis: int = 1
    growth_counter: jax.Array = state_field(0)
    hysteresis_left: jax.Array = state_field()
    _exhausted: jax.Array = state_field(False)

    def __post_init__(self):
        super().__post_init__()
        self._check("growth_interval", checks.integer, 1)
        self._check("growth_factor", checks.number, 1, LARGEST_SCALE)
        self._check("backoff_factor", checks.number, SMALLEST_SCALE, 1)
        if self.min_scale is not None:
            self._check("min_scale", checks.number, SMALLEST_SCALE, LARGEST_SCALE)
        if self.max_scale is not None:
            self._check("max_scale", checks.number, SMALLEST_SCALE, LARGEST_SCALE)
        bounds = (self._lower_bound(), self._upper_bound())
        self._check("initial_scale", checks.number, *bounds)
        self._check("hysteresis", checks.integer, 1)
        self._set(hysteresis_left=np.int32(self.hysteresis))

    def adjust(self, grads_finite: ArrayLike) -> Self:
        return choose(grads_finite, self._after_finite_step(), self._after_overflow())

    def exhausted(self) -> jax.Array:
        return jnp.asarray(self._exhausted)

    def _after_finite_step(self) -> Self:
        """Counts a finite step and grows the scale if the interval is over."""
        counter = self.growth_counter + 1
        due = counter >= self.growth_interval
        return self.replace(
            loss_scale=jnp.where(due, self._times(self.growth_factor), self()),
            growth_counter=jnp.where(due, 0, counter),
            hysteresis_left=jnp.where(due, self.hysteresis, self.hysteresis_left),
            _exhausted=False,
        )

    def _after_overflow(self) -> Self:
        """Backs off, or counts one of the overflows that `hysteresis` tolerates."""
        backs_off = self.hysteresis_left <= 1
        lowered = self._times(self.backoff_factor)
        return self.replace(
            loss_scale=jnp.where(backs_off, lowered, self()),
            growth_counter=0,
            hysteresis_left=jnp.maximum(self.hysteresis_left - 1, 1),
            _exhausted=backs_off & (lowered >= self()),
        )

    def _times(self, factor: float) -> jax.Array:
        """Returns the scale times a factor, within the bounds; float32, shape ()."""
        return jnp.clip(self() * factor, self._lower_bound(), self._upper_bound())

    def _lower_bound(self) -> float:
        return SMALLEST_SCALE if self.min_scale is None else self.min_scale

    def _upper_bound(self) -> float:
        return LARGEST_SCALE if self.max_scale is None else self.max_scale
