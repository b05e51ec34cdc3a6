"""The dynamic loss scale, which grows by trial and backs off on overflow.

The largest scale at which no gradient overflows depends on the gradients and changes
during training. This rule follows it by trial and error: it raises the scale from time
to time until gradients overflow, and then lowers it again. For example, with the
defaults::

    2**15  -- 2000 finite steps -->  2**16  -- an overflow -->  2**15

Each overflow costs one skipped step, so with the default interval, a scale that stays
near the largest possible one costs about one step in 2000.

While a step is traced, it is not known whether its gradients are finite, so `adjust`
computes the loss scale for both cases and selects one of them.
"""

import math
from typing import Literal, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.precision import precise_product
from optax_lossscale._arrays.stateful import checked, choose, state_field
from optax_lossscale._scales.loss_scale import LossScale

Refill = Literal["growth", "rescale", "finite"]


class DynamicLossScale(LossScale):
    """Grows after a run of finite steps and backs off on a non-finite one.

    This is the default of `with_loss_scale`. If the gradients of most steps are zero,
    use `HeadroomLossScale` instead: zeros are finite, so such steps keep raising this
    scale until the next nonzero gradients overflow. The rule::

        if grads_finite:
            growth_counter += 1
            if growth_counter == growth_interval:
                growth_counter = 0
                loss_scale = min(loss_scale * growth_factor, max_scale)
                hysteresis_left = hysteresis    # see hysteresis_refill
        else:
            growth_counter = 0
            if hysteresis_left > 1:
                hysteresis_left -= 1
            else:
                loss_scale = max(loss_scale * backoff_factor, min_scale)

    Each product is computed as if in float64, without rounding the factor to float32
    first, so a `backoff_factor` of `1 / 3` reproduces TensorFlow's division by 3.

    Args:
      initial_scale: the loss scale before the first step, within the bounds. If it is
        far too large, the first steps are skipped, one for each back-off. `diagnose`
        finds a scale that fits.
      growth_interval: the scale grows after this many finite steps in a row.
      growth_factor: the factor by which the scale grows, at least 1.
      backoff_factor: the factor by which the scale backs off, in (0, 1].
      min_scale: the floor. Set it below 1 for models whose gradients overflow even
        unscaled. With None, there is no floor, but the scale stays in float32's normal
        range.
      max_scale: the cap, at which growth ends. With None, there is no cap, but the
        scale stays in float32's range.
      hysteresis: how many non-finite steps it takes to back off; `hysteresis_refill`
        determines when the count starts over. With 2 or more, one broken batch does not
        lower the scale, unless others have used up the count.
      hysteresis_refill: when `hysteresis_left` is set back to `hysteresis`: with
        `"growth"`, when the scale is due to grow, as in Megatron-LM and DeepSpeed; with
        `"rescale"`, also when it backs off, as in tf.contrib; with `"finite"`, on each
        finite step, as with DeepSpeed's `consecutive_hysteresis`.
      can_be_exhausted: whether an overflow makes the scale `exhausted` if it is due to
        back off but cannot be lowered, so that `raise_if_stuck` raises an error.
      initial_growth_counter: the initial value of `growth_counter`, from 0 to
        `growth_interval - 1`.

    Attributes:
      growth_counter: finite steps in a row since the last growth; int32, shape ().
      hysteresis_left: non-finite steps left until a back-off; int32, shape ().

    Raises:
      ValueError: for an argument outside the ranges above.

    Source: TensorFlow's `DynamicLossScale` and its defaults, after Micikevicius et al.,
    "Mixed Precision Training" (https://arxiv.org/abs/1710.03740). The other options
    come from PyTorch, Flax, Megatron-LM, DeepSpeed and tf.contrib.

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

    growth_interval: int = checked(validation.positive_int, default=2000)
    growth_factor: float = checked(validation.growth_factor, default=2.0)
    backoff_factor: float = checked(validation.backoff_factor, default=0.5)
    min_scale: float | None = checked(validation.scale_or_none, default=1.0)
    max_scale: float | None = checked(validation.scale_or_none, default=None)
    hysteresis: int = checked(validation.positive_int, default=1)
    hysteresis_refill: Refill = checked(
        validation.one_of, options=get_args(Refill), default="growth"
    )
    can_be_exhausted: bool = checked(validation.flag, default=True)
    initial_growth_counter: int = 0
    growth_counter: jax.Array = state_field()
    hysteresis_left: jax.Array = state_field()
    _exhausted: jax.Array = state_field(False)

    def __post_init__(self):
        super().__post_init__()
        validation.check_bounds(self.min_scale, self.initial_scale, self.max_scale)
        counter = validation.int_between(
            "initial_growth_counter",
            self.initial_growth_counter,
            least=0,
            most=self.growth_interval - 1,
        )
        self._set(
            initial_growth_counter=counter,
            growth_counter=np.int32(counter),
            hysteresis_left=np.int32(self.hysteresis),
        )

    def adjust(self, grads_finite: ArrayLike) -> Self:
        return choose(grads_finite, self._after_finite_step(), self._after_overflow())

    def exhausted(self) -> jax.Array:
        return jnp.asarray(self._exhausted)

    def _upper_bound(self) -> float:
        return math.inf if self.max_scale is None else self.max_scale

    def _after_finite_step(self) -> Self:
        """Counts a finite step and grows the scale if the interval is over."""
        counter = self.growth_counter + 1
        due = counter >= self.growth_interval
        grown = self._rescaled(self.growth_factor)
        refills = True if self.hysteresis_refill == "finite" else due
        return self.replace(
            loss_scale=jnp.where(due, grown, self()),
            growth_counter=jnp.where(due, 0, counter),
            hysteresis_left=jnp.where(refills, self.hysteresis, self.hysteresis_left),
            _exhausted=False,
        )

    def _after_overflow(self) -> Self:
        """Backs off, or counts one of the overflows that `hysteresis` tolerates."""
        scale = self()
        backs_off = self.hysteresis_left <= 1
        lowered = self._rescaled(self.backoff_factor)
        is_stuck = backs_off & (lowered >= scale)
        refills = self.hysteresis_refill == "rescale"
        left_after_backoff = self.hysteresis if refills else 1
        one_fewer = self.hysteresis_left - 1
        return self.replace(
            loss_scale=jnp.where(backs_off, lowered, scale),
            growth_counter=0,
            hysteresis_left=jnp.where(backs_off, left_after_backoff, one_fewer),
            _exhausted=self.can_be_exhausted & is_stuck,
        )

    def _rescaled(self, factor: float) -> jax.Array:
        """Returns the scale times a factor, within the bounds; float32, shape ().

        If the result would not be a normal float32 number, as may happen where a bound
        is None, the scale stays as it is.
        """
        scale = self()
        product = precise_product(scale, factor)
        clipped = jnp.clip(product, self.min_scale, self.max_scale)
        is_large_enough = clipped >= validation.SMALLEST_NORMAL
        is_small_enough = clipped <= validation.LARGEST_FLOAT32
        return jnp.where(is_large_enough & is_small_enough, clipped, scale)
