"""The loss scale that grows while gradients are finite and backs off when not."""

from typing import Literal, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale import _validation
from optax_lossscale._loss_scale import LossScale, state

Refill = Literal["growth", "rescale", "finite"]


class DynamicLossScale(LossScale):
    """Grows after a run of finite steps, backs off at a step that is not.

    Source: TensorFlow's `DynamicLossScale`, of which these are the defaults, after
    Micikevicius et al., "Mixed Precision Training" (https://arxiv.org/abs/1710.03740);
    the further options are what PyTorch, Flax, Megatron-LM, DeepSpeed and
    tf.contrib add to it. The rule:

        if grads_finite:
            growth_counter += 1
            if growth_counter == growth_interval:
                growth_counter = 0
                if loss_scale * growth_factor <= max_scale:
                    loss_scale *= growth_factor
        else:
            growth_counter = 0
            if hysteresis_left > 1:
                hysteresis_left -= 1
            else:
                loss_scale = max(loss_scale * backoff_factor, min_scale)

    Every product is rounded once, from the factor as given: a `backoff_factor` of
    `1 / 3` is TensorFlow's division by 3.

    Args:
      initial_scale: the loss scale before the first step.
      growth_interval: finite steps in a row after which it grows.
      growth_factor: what it grows by, at least 1.
      backoff_factor: what a non-finite step multiplies it by, in (0, 1].
      min_scale: the floor. Below 1 for models whose gradients are large.
      max_scale: the cap.
      hysteresis: how many non-finite steps it takes to back off: the first
        `hysteresis - 1` are skipped at an unchanged scale.
      hysteresis_refill: when those are granted anew: `"growth"`, when the scale is
        due to grow (Megatron-LM, DeepSpeed); `"rescale"`, then and at a back-off
        (tf.contrib); `"finite"`, at each finite step (DeepSpeed's
        `consecutive_hysteresis`).
      clip_growth: whether a growth past `max_scale` ends at `max_scale` (Flax) or
        does not take place (TensorFlow).

    Attributes:
      loss_scale: the loss scale now; float32, shape ().
      growth_counter: finite steps in a row since the last growth; int32, shape ().
      hysteresis_left: non-finite steps from now to a back-off; int32, shape ().

    Raises:
      ValueError: for an argument outside what is said above, or bounds that do
        not hold `initial_scale`.

    Example:
      >>> import optax_lossscale as ols
      >>> ls = ols.DynamicLossScale(initial_scale=1024, growth_interval=2)
      >>> scales = []
      >>> for finite in (True, True, False):
      ...     ls = ls.adjust(finite)
      ...     scales.append(float(ls()))
      >>> scales
      [1024.0, 2048.0, 1024.0]
    """

    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    min_scale: float = 1.0
    max_scale: float = _validation.LARGEST
    hysteresis: int = 1
    hysteresis_refill: Refill = "growth"
    clip_growth: bool = False
    growth_counter: jax.Array = state(0)  # shape=(), dtype=int32
    hysteresis_left: jax.Array = state()  # shape=(), dtype=int32

    def __post_init__(self):
        super().__post_init__()
        bounds = {k: _validation.scale(k, getattr(self, k)) for k in ("min_scale", "max_scale")}
        if not bounds["min_scale"] <= self.initial_scale <= bounds["max_scale"]:
            allowed = f"between min_scale={self.min_scale!r} and max_scale={self.max_scale!r}"
            _validation.refuse("initial_scale", self.initial_scale, allowed)
        self._set(
            **bounds,
            growth_interval=_validation.count("growth_interval", self.growth_interval),
            growth_factor=_validation.growth_factor("growth_factor", self.growth_factor),
            backoff_factor=_validation.backoff_factor("backoff_factor", self.backoff_factor),
            hysteresis=_validation.count("hysteresis", self.hysteresis),
            hysteresis_left=np.int32(self.hysteresis),
        )
        _validation.one_of("hysteresis_refill", self.hysteresis_refill, get_args(Refill))
        _validation.one_of("clip_growth", self.clip_growth, (False, True))

    def adjust(self, grads_finite: jax.typing.ArrayLike) -> Self:
        """The loss scale after one step; see the class for the rule."""
        choose = lambda grown, backed_off: jnp.where(grads_finite, grown, backed_off)
        return jax.tree.map(choose, self._after_finite_step(), self._after_overflow())

    def _after_finite_step(self) -> Self:
        counter = self.growth_counter + 1
        due = counter >= self.growth_interval
        grown = _times(self(), self.growth_factor)
        if self.clip_growth:
            grown = jnp.minimum(grown, self.max_scale)
        else:
            grown = jnp.where(grown <= self.max_scale, grown, self.loss_scale)
        refill = True if self.hysteresis_refill == "finite" else due
        return self.replace(
            loss_scale=jnp.where(due, grown, self.loss_scale),
            growth_counter=jnp.where(due, 0, counter),
            hysteresis_left=jnp.where(refill, self.hysteresis, self.hysteresis_left),
        )

    def _after_overflow(self) -> Self:
        backs_off = self.hysteresis_left <= 1
        lowered = jnp.maximum(_times(self(), self.backoff_factor), self.min_scale)
        left_after = self.hysteresis if self.hysteresis_refill == "rescale" else 1
        return self.replace(
            loss_scale=jnp.where(backs_off, lowered, self.loss_scale),
            growth_counter=0,
            hysteresis_left=jnp.where(backs_off, left_after, self.hysteresis_left - 1),
        )


def _times(scale: jax.Array, factor: float) -> jax.Array:
    """The product, rounded to float32 once, whatever float32 makes of the factor."""
    if float(np.float32(factor)) == factor:
        return scale * np.float32(factor)
    # The references divide by 3, or multiply by a C double of 0.3. A float32 product
    # with a rounded 1/3 is an ulp off, and XLA makes exactly that of a division by a
    # constant. In float64 both come out right.
    with jax.enable_x64(True):
        product = lax.convert_element_type(scale, np.float64) * np.float64(factor)
        return lax.convert_element_type(product, np.float32)
