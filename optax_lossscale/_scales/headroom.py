"""The loss scale that measures the largest gradient and stays below overflow.

It works with *exponents*: the exponent of a gradient is the least integer for which the
gradient is below `2**exponent`. Float16 overflows at 2**16, so for a largest gradient of
exponent -8 and a margin of 1 bit, the scale is 2**(16 - 1 + 8) = 2**23.
"""

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.finite import AxisName, largest, reduce_replicas
from optax_lossscale._arrays.stateful import choose, state_field
from optax_lossscale._scales.loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScale


# The bound before any gradient, below the exponent of every float32 number. An infinity
# would stop a program that runs with `jax_debug_infs`.
_UNKNOWN = -1e3


class HeadroomLossScale(LossScale):
    """Measures the largest gradient and keeps it a little below overflow.

    Use it for short runs, for gradients whose magnitude jumps, and for gradients that
    are all zero on most steps. It measures only the gradients of parameters: if those
    inside the model are larger, each overflow lowers the scale by one bit. The rule::

        if not grads_finite:
            bound = bound of the current scale + 1
        elif largest_gradient > 0:              # zeros say nothing
            bound = max(exponent of largest_gradient, bound - 1 / memory)
        loss_scale = 2 ** floor(16 - margin - bound), at least min_scale

    `bound` is an exponent that no recent gradient exceeded. At first there is none, so
    the first finite step sets the scale.

    Args:
      initial_scale: the loss scale before the first step, from 2**-60 to 2**60, rounded
        down to a power of two.
      margin: how many bits to leave between the largest gradient and overflow, from 0
        to 24. With more bits, fewer steps overflow, but more gradients underflow.
      memory: in how many steps a bound that no gradient reaches falls by a bit.
      min_scale: the floor. A batch that is not finite by itself lowers the scale, too,
        so do not set the floor far below 1.

    Attributes:
      bound: every recent gradient is below `2**bound`; float32, shape ().

    Raises:
      ValueError: for an argument outside the ranges above.

    Source: a new rule, inspired by OpenSeq2Seq's `LogMaxScaler`.

    Example:
      After one step, the largest scaled gradient is one to two bits below 2**16:

      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> grads = {"w": jnp.array([0.0, 2.0**-9])}
      >>> ls, should_apply = ols.HeadroomLossScale().update(grads)
      >>> print(ls() * 2.0**-9)
      16384.0
    """

    margin: int = 1
    memory: int = 512
    min_scale: float = 1.0
    bound: jax.Array = state_field(_UNKNOWN)

    def __post_init__(self):
        super().__post_init__()
        self._check("margin", checks.integer, 0, 24)
        self._check("memory", checks.integer, 1)
        self._check("min_scale", checks.number, SMALLEST_SCALE, self.initial_scale)
        exponent = max(math.floor(math.log2(self.initial_scale)), self._floor())
        self._set(loss_scale=np.ldexp(np.float32(1), exponent))

    def update(
        self, grads: Any, axis_name: AxisName | None = None
    ) -> tuple[Self, jax.Array]:
        magnitude = reduce_replicas(lax.pmax, largest(grads), axis_name)
        finite = jnp.isfinite(magnitude)
        _, exponent = jnp.frexp(magnitude)
        measured = jnp.maximum(exponent, self.bound - 1 / self.memory)
        after_finite_step = choose(magnitude > 0, self._below(measured), self)
        return choose(finite, after_finite_step, self._after_overflow()), finite

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Adapts the scale to one step, given only whether its gradients are finite.

        The scale halves on overflow, and doubles with every `memory` finite steps.
        """
        after_finite_step = self._below(self._known_bound() - 1 / self.memory)
        return choose(grads_finite, after_finite_step, self._after_overflow())

    def exhausted(self) -> jax.Array:
        return self.bound > self._headroom() - self._floor()

    def _after_overflow(self) -> Self:
        """Lowers the scale by a bit; at the floor, notes that it cannot."""
        bound = self._known_bound() + 1
        noted = jnp.minimum(bound, self._headroom() - self._floor() + 1)
        return self._below(bound).replace(bound=noted)

    def _known_bound(self) -> jax.Array:
        """Returns the bound, or before any gradient the one that fits the scale."""
        _, exponent = jnp.frexp(self())
        fitting = self._headroom() - (exponent - 1).astype(jnp.float32)
        return jnp.where(self.bound == _UNKNOWN, fitting, self.bound)

    def _below(self, bound: jax.Array) -> Self:
        """Returns the loss scale that keeps gradients below `2**bound` from overflow."""
        headroom = self._headroom()
        largest_exponent = math.log2(LARGEST_SCALE)
        bound = jnp.clip(bound, headroom - largest_exponent, headroom - self._floor())
        exponent = jnp.floor(headroom - bound).astype(jnp.int32)
        # `exp2` is inexact: on CPU, it often does not return a power of two.
        return self.replace(bound=bound, loss_scale=jnp.ldexp(jnp.float32(1), exponent))

    def _headroom(self) -> int:
        """Returns the exponent that scaled gradients may reach; float16 ends at 16."""
        return 16 - self.margin

    def _floor(self) -> int:
        """Returns the exponent of the smallest power of two that `min_scale` allows."""
        return math.ceil(math.log2(self.min_scale))
