"""The loss scale that keeps the largest gradient a little below overflow.

At each step, the rule reads the exponent of the largest gradient. It remembers the
largest exponent of recent steps, and chooses the scale that keeps a gradient with this
exponent `margin` bits below 2**16, where float16 overflows. For example, a gradient of
2**-9 has the exponent -8, because the next larger power of two is 2**-8. With a margin
of 1 bit, the scale becomes 2**(16 - 1 + 8) = 2**23.

Only the gradients of the parameters are measured. If gradients inside the model are
larger, steps overflow all the same. Such overflows lower the scale by some more bits,
which are called the `reserve`.

Both the remembered exponent and the reserve decay while no step confirms them, by at
least one bit in `memory` steps. The memory is short at first, and a run of overflows
lengthens it. While all gradients are zero, the decay is 64 times as slow.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.finite import AxisName, largest_on_all_replicas
from optax_lossscale._arrays.stateful import checked, choose, state_field
from optax_lossscale._scales.loss_scale import LossScale, checks_gradients

_OVERFLOW_BITS = 16  # All finite float16 numbers are below 2**16.
# A reserve this deep means that the batch is at fault: it would leave at most 8 of the
# 40 bits that float16's numbers span, and gradients further below the largest would
# underflow. This is also the most that one overflow adds to the reserve, apart from
# rounding.
_DEEP_BITS = 32
# The remembered exponent decays twice as fast if the step's is this many bits lower.
_GAP_BITS = 10
_MAX_EXPONENT = 100  # The scale stays between 2**-100 and 2**100.

_LOWEST = 2.0**-_MAX_EXPONENT
_HIGHEST = 2.0**_MAX_EXPONENT

# How many overflows are excused once the batch has been found at fault. That takes six
# overflows, with reserves of 1, 3, 7, 15, 31 and 63 bits.
_EXCUSED_STEPS = 64

# A longer memory would let a rare outlier keep the scale low for long.
_SHORTEST_MEMORY = 32
_LONGEST_MEMORY = 512  # Overflows that recur less often than this cost few steps.
_FIRST_MEMORY = 1e-3  # Replaces 0, so that the first measurement decides alone.
_LENGTHENING = 2  # Each measured step adds this to a memory below `_SHORTEST_MEMORY`.
_SHORTENING = 4096  # Each measured step takes 1 part in 4096 from a longer memory.

_GROWTH_STEPS = 2048  # About as many as in TensorFlow and PyTorch.
# This many steps with all-zero gradients count as one measured step. Few of them are
# due to underflow.
_ZERO_STEPS = 64


class HeadroomLossScale(LossScale):
    """Measures the largest gradient, and keeps it a little below overflow.

    Use it for short runs, and for gradients that jump in size or are zero at most
    steps. If gradients inside the model are larger than those of its parameters,
    `DynamicLossScale` skips fewer steps.

    In the following rule, `size` is the least integer for which the step's largest
    gradient is below `2**size` (the exponent that `frexp` returns), and `largest` is
    the remembered size, which falls slowly::

        if grads_overflow:
            overflows += 1
            if overflows == 1: memory = clip(2 * memory, 32, 512)
            if overflows >= 1: reserve = ceil(reserve + min(reserve + 1, 32))
        elif all gradients are zero:
            fall = 1 / (64 * max(memory, 32))
            largest -= fall
            fade(fall)
        else:
            if size > largest + margin:         # explains earlier overflows, if any
                reserve = overflows = 0
            else:
                fade(1 / max(memory, 1e-3))
            fall = (1 + max(largest - size, 0) / 10) / max(memory, 1e-3)
            largest = max(size, largest - fall)
            memory = memory + 2 if memory < 32 else max(memory * (1 - 1 / 4096), 32)
        loss_scale = 2 ** floor(16 - margin - largest - reserve)

    where `fade(fall)` is::

        if reserve >= 32:                       # the batch was at fault: excuse 64
            reserve = 0
            overflows = -64
        else:
            reserve = max(reserve - (1 + reserve) * fall, 0)
            overflows = min(overflows, 0)

    An overflow has one of two causes: some gradient is too large for the scale, or the
    batch itself produces a NaN or an infinity. At first, the rule assumes the former,
    and lowers the scale by 1, 2, 4, 8, … bits. It holds these bits in reserve. The
    reserve shrinks while steps are finite. It is given up at once when a measured
    gradient is large enough to explain the overflow, or when not even 32 bits have
    helped. In the latter case, the batch is to blame, and 64 overflows are excused.

    The `memory` is the number of steps in which `largest` and `reserve` fall by at
    least one bit. While all gradients are zero, that takes 64 times as many steps. The
    memory begins at 0, and each measured step lengthens it up to 32. Each run of
    overflows doubles it, to at least 32 and at most 512. From there it slowly shrinks
    back to 32.

    If all gradients of a step are zero, nonzero gradients may be rare, or all gradients
    may have underflowed. So the scale grows at such steps, but slowly: without a
    reserve, by one bit in 2048 to 32,768 of them, depending on the memory. The scale is
    a power of two between 2**-100 and 2**100.

    Source: this library, after OpenSeq2Seq's `LogMaxScaler`.

    Args:
      initial_scale: the initial loss scale, from 2**-100 to 2**100, rounded down to a
        power of two.
      margin: how many bits to leave between the largest gradient and overflow, from 0
        to 24. With more bits, fewer steps overflow, but more gradients underflow.

    Attributes:
      spare_bits: the bits between the largest remembered gradient and overflow. They
        are the margin, the reserve, and the fraction of a bit by which the scale is
        rounded down; float32, shape ().

    Raises:
      ValueError: for an argument outside the ranges above.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> ls, should_apply = ols.HeadroomLossScale().update({"w": jnp.array([0.0, 2.0**-9])})
      >>> print(ls() * 2.0**-9)  # below 2**16 by the margin of one bit and at most one more
      16384.0
    """

    initial_scale: float = checked(
        validation.number_between, least=_LOWEST, most=_HIGHEST, default=2.0**15
    )
    margin: int = checked(validation.int_between, least=0, most=24, default=1)
    spare_bits: jax.Array = state_field()
    _reserve: jax.Array = state_field(0.0)  # in bits
    _memory: jax.Array = state_field(0.0)  # in steps
    # Overflows since the last finite step, or -n while n more are excused
    _overflows: jax.Array = state_field(0)

    def __post_init__(self):
        super().__post_init__()
        _, exponent = np.frexp(self.initial_scale)
        power_of_two = np.ldexp(np.float32(0.5), exponent)
        self._set(loss_scale=power_of_two, spare_bits=np.float32(self.margin))

    @checks_gradients
    def update(
        self, grads: Any, axis_name: AxisName | None = None
    ) -> tuple[Self, jax.Array]:
        largest_gradient = largest_on_all_replicas(grads, axis_name)
        finite = jnp.isfinite(largest_gradient)
        is_nonzero = largest_gradient > 0
        after_nonzero_step = self._after_nonzero_step(largest_gradient)
        after_zero_step = self._after_zero_step()
        after_finite_step = choose(is_nonzero, after_nonzero_step, after_zero_step)
        new = choose(finite, after_finite_step, self._after_overflow())
        return new, finite

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Adapts the scale to one step, given only whether its gradients are finite.

        The scale falls at overflows as in `update`, and doubles with every 2048 finite
        steps, whether or not they are consecutive.

        Args:
          grads_finite: whether the step's gradients were finite; bool, shape ().

        Returns:
          The new loss scale.
        """
        # The reserve is merged into `largest`, which falls at each finite step.
        largest = self._largest() + self._reserve
        fallen = largest - 1 / _GROWTH_STEPS
        after_finite_step = self._scaled_for(fallen, reserve=0.0, overflows=0)
        return choose(grads_finite, after_finite_step, self._after_overflow())

    def exhausted(self) -> jax.Array:
        """Whether gradients overflowed, and the scale would have to fall below 2**-100.

        Excused overflows do not count. A step that is skipped because of its loss, or
        by a skip rule, does not change the answer.

        Returns:
          A bool, shape ().
        """
        exponent = _OVERFLOW_BITS - self.margin - self._largest() - self._reserve
        return (self._overflows > 0) & (exponent < -_MAX_EXPONENT)

    def _after_overflow(self) -> Self:
        """Lowers the scale after an overflow, which does not show how far it went.

        So the reserve grows by 1, 2, 4, 8, … bits, unless the overflow is excused. The
        first overflow of a run lengthens the memory.
        """
        is_excused = self._overflows < 0
        increment = jnp.minimum(self._reserve + 1, _DEEP_BITS)
        deeper_reserve = jnp.ceil(self._reserve + increment)
        reserve = jnp.where(is_excused, self._reserve, deeper_reserve)

        is_first = self._overflows == 0
        doubled = jnp.clip(2 * self._memory, _SHORTEST_MEMORY, _LONGEST_MEMORY)
        memory = jnp.where(is_first, doubled, self._memory)

        overflows = optax.safe_increment(self._overflows)
        new = self._scaled_for(self._largest(), reserve, overflows)
        return new.replace(_memory=memory)

    def _after_nonzero_step(self, largest_gradient: jax.Array) -> Self:
        """Adapts the scale to a finite step whose largest gradient is not zero.

        The first such step decides alone, because the memory is still 0.
        """
        _, exponent = jnp.frexp(largest_gradient)
        size = exponent.astype(jnp.float32)
        memory = jnp.maximum(self._memory, _FIRST_MEMORY)
        fall = 1 / memory

        old_largest = self._largest()
        gap = jnp.maximum(old_largest - size, 0)
        acceleration = 1 + gap / _GAP_BITS
        fallen = old_largest - acceleration * fall
        largest = jnp.maximum(size, fallen)

        explains_overflow = size > old_largest + self.margin
        explained = self._scaled_for(largest, reserve=0.0, overflows=0)
        unexplained = self._faded(largest, fall)
        new = choose(explains_overflow, explained, unexplained)
        return new.replace(_memory=self._next_memory())

    def _next_memory(self) -> jax.Array:
        """Returns the memory after a measured step; float32, shape ()."""
        is_short = self._memory < _SHORTEST_MEMORY
        longer = self._memory + _LENGTHENING
        shorter = self._memory * (1 - 1 / _SHORTENING)
        shorter = jnp.maximum(shorter, _SHORTEST_MEMORY)
        return jnp.where(is_short, longer, shorter)

    def _after_zero_step(self) -> Self:
        """Raises the scale after a step whose gradients are all zero.

        They may all have underflowed, but usually they have not. So the scale rises far
        more slowly than after a step whose gradients are small but not zero.
        """
        memory = jnp.maximum(self._memory, _SHORTEST_MEMORY)
        fall = 1 / (_ZERO_STEPS * memory)
        fallen = self._largest() - fall
        return self._faded(fallen, fall)

    def _faded(self, largest: jax.Array, fall: jax.Array) -> Self:
        """Shrinks the reserve after a finite step that does not explain an overflow.

        It shrinks by `fall * (1 + reserve)`, and not by `fall * reserve`, so that it
        reaches 0. A deep reserve has not helped, so the batch was at fault. Then the
        reserve is given up, and further overflows are excused.
        """
        batch_is_at_fault = self._reserve >= _DEEP_BITS
        faded = self._reserve - (1 + self._reserve) * fall
        faded = jnp.maximum(faded, 0)
        reserve = jnp.where(batch_is_at_fault, 0, faded)
        excuses_left = jnp.minimum(self._overflows, 0)
        overflows = jnp.where(batch_is_at_fault, -_EXCUSED_STEPS, excuses_left)
        return self._scaled_for(largest, reserve, overflows)

    def _largest(self) -> jax.Array:
        """Returns the `size` of the largest remembered gradient.

        The size has a fraction because it decays. It is not stored, but computed from
        the scale, so that the rule continues from a scale that was set by hand.
        """
        _, exponent = jnp.frexp(self() / 2)  # The scale is 2**exponent.
        max_size = _OVERFLOW_BITS - exponent  # A larger gradient would overflow.
        return max_size.astype(jnp.float32) - self.spare_bits

    def _scaled_for(
        self, largest: jax.Array, reserve: ArrayLike, overflows: ArrayLike
    ) -> Self:
        """Returns the loss scale for a largest gradient and a reserve, both in bits.

        All arguments have shape (); `largest` and `reserve` are float32.
        """
        # The exponent that the scale would have without a reserve and without rounding
        ideal = _OVERFLOW_BITS - self.margin - largest
        ideal = jnp.clip(ideal, -_MAX_EXPONENT, _MAX_EXPONENT)
        unrounded = jnp.maximum(ideal - reserve, -_MAX_EXPONENT)
        exponent = jnp.floor(unrounded)
        # `exp2` is inexact, and would not return a power of two.
        one = jnp.float32(1)
        loss_scale = jnp.ldexp(one, exponent.astype(jnp.int32))
        spare_bits = self.margin + ideal - exponent
        return self.replace(
            loss_scale=loss_scale,
            spare_bits=spare_bits,
            _reserve=reserve,
            _overflows=overflows,
        )
