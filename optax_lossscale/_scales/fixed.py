"""The fixed loss scale, which never changes.

The scale is configuration rather than state, so a compiled step contains it as a
constant. With a scale of 1, the step contains no scaling.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.precision import T, map_inexact
from optax_lossscale._arrays.replicas import AxisName
from optax_lossscale._scales.loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScale


class FixedLossScale(LossScale):
    """A constant loss scale; `update` checks nothing.

    Use it if you have measured a scale at which gradients neither overflow nor
    underflow. You can pass the number alone: `with_loss_scale(optimizer, 1024)`. If
    gradients do overflow, `with_loss_scale` skips the step, unless `skip=None`.

    Args:
      scale: from 2**-60 to 2**60.

    Raises:
      ValueError: if `scale` is not a number in this range.

    Source: TensorFlow's `FixedLossScale`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> ls = ols.FixedLossScale(128)
      >>> float(ls())
      128.0
      >>> ls.update({"w": jnp.array([jnp.nan])})
      (FixedLossScale(128.0), True)
    """

    # A field `scale` would stand in the place of the method.
    # pyrefly: ignore[bad-override]
    loss_scale: np.float32 = dataclasses.field(init=False)

    def __init__(self, scale: float):
        super().__init__(checks.number("scale", scale, SMALLEST_SCALE, LARGEST_SCALE))

    def __init_subclass__(cls, **kwargs: Any):
        # The `__init__` above accepts only `scale`, so a subclass could not initialize
        # fields of its own.
        raise TypeError(
            f"{cls.__name__} cannot subclass FixedLossScale; subclass LossScale"
        )

    def __repr__(self) -> str:
        return f"FixedLossScale({self.initial_scale})"

    def adjust(self, grads_finite: ArrayLike) -> Self:
        return self

    def update(
        self, grads: Any, axis_name: AxisName | None = None
    ) -> tuple[Self, bool]:
        """Returns this loss scale and True, without checking the gradients."""
        return self, True

    def scale(self, tree: T) -> T:
        return super().scale(tree) if self.initial_scale != 1 else _widened(tree)

    def unscale(self, tree: T) -> T:
        return super().unscale(tree) if self.initial_scale != 1 else _widened(tree)

    def get_config(self) -> dict[str, Any]:
        return {"class_name": "FixedLossScale", "config": {"scale": self.initial_scale}}

    def _upper_bound(self) -> float:
        return self.initial_scale

    def _succeeded_by(self, new: Self, method: str) -> Self:
        return new


def _widened(tree: T) -> T:
    """Converts floats of 16 bits or fewer to float32, as any other scale does."""
    return map_inexact(jnp.asarray, tree)
