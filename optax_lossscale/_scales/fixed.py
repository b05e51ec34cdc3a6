"""The fixed loss scale, which never changes.

It has no state: the scale is configuration, so a compiled step contains it as a
constant. XLA can fold it into other constants, and a scale of 1 costs nothing.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.contexts import OVERFLOWS
from optax_lossscale._arrays.finite import AxisName
from optax_lossscale._arrays.precision import T, map_inexact
from optax_lossscale._scales.loss_scale import LossScale

_MAX_INVERTIBLE = 2.0**126  # the reciprocal of a larger scale is subnormal


class FixedLossScale(LossScale):
    """A constant loss scale, which does not check the gradients.

    `with_loss_scale` still checks them, and skips steps that are not finite, unless
    `skip=None`. A compiled step contains the scale as a constant, and a scale of 1
    compiles to no scaling at all.

    Source: TensorFlow's `FixedLossScale`.

    Args:
      scale: from 1.18e-38 to 2**126, so that it and its reciprocal are normal float32
        numbers.

    Raises:
      ValueError: if `scale` is not a number in this range.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> ls = ols.FixedLossScale(128)
      >>> float(ls())
      128.0
      >>> ls.update({"w": jnp.array([jnp.nan])})
      (FixedLossScale(128.0), True)
    """

    loss_scale: np.float32 = dataclasses.field(init=False)  # pyrefly: ignore[bad-override]

    def __init__(self, scale: float):
        number = validation.number_between(
            "scale", scale, least=validation.SMALLEST, most=_MAX_INVERTIBLE
        )
        super().__init__(number)

    def __init_subclass__(cls, **kwargs: Any):
        # The `__init__` above accepts only `scale`, so a subclass could not initialize
        # fields of its own.
        raise TypeError(
            f"{cls.__name__} cannot subclass FixedLossScale; subclass LossScale"
        )

    def __call__(self) -> jax.Array:
        if OVERFLOWS.value:  # `testing` sets this to make a constant scale overflow.
            return jnp.float32(jnp.inf)
        return super().__call__()

    def __repr__(self) -> str:
        return f"FixedLossScale({self.initial_scale})"

    def adjust(self, grads_finite: ArrayLike) -> Self:
        return self

    def update(
        self, grads: Any, axis_name: AxisName | None = None
    ) -> tuple[Self, bool]:
        """Returns this loss scale and True, without looking at the gradients."""
        return self, True

    def scale(self, tree: T) -> T:
        if self._is_one():
            return _widened(tree)
        return super().scale(tree)

    def unscale(self, tree: T) -> T:
        if self._is_one():
            return _widened(tree)
        return super().unscale(tree)

    def get_config(self) -> dict[str, Any]:
        return {"class_name": "FixedLossScale", "config": {"scale": self.initial_scale}}

    def _is_one(self) -> bool:
        """Whether the scale is 1, so that multiplications by it can be left out."""
        return self.initial_scale == 1 and not OVERFLOWS.value


def _widened(tree: T) -> T:
    """Converts narrow floats to float32, as scaling by any other number does."""
    return map_inexact(lambda x: x, tree)
