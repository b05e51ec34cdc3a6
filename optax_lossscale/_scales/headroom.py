"""The loss scale that keeps the largest gradient a little below overflow.

It measures the exponent of each step's largest gradient, and sets the scale so that the
largest one that it remembers stays below 2**16, where float16 overflows, by `margin`
bits. Where gradients inside the model are larger than those of the parameters, which
alone are measured, steps overflow all the same. For these, it lowers the scale by some
bits more, the `reserve`.

All of this is in bits, that is, in powers of two. Both the largest gradient remembered
and the reserve fall while no step confirms them, by at least a bit in `memory` steps,
or 64 times as slowly while all gradients are zero. The memory is short at first, and a
run of overflows lengthens it.
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

_OVERFLOW_BITS = 16  # all finite float16 numbers are below 2**16
# If steps overflow in spite of a reserve this deep, the batch is at fault: float16's
# numbers span 40 bits, so gradients that used to fit underflow at such a scale. One
# overflow adds at most this much to the reserve, apart from rounding.
_DEEP_BITS = 32
# The largest gradient remembered falls twice as fast if it is this many bits above the
# step's.
_GAP_BITS = 10
_MAX_EXPONENT = 100  # of the highest scale, and of the inverse of the lowest

_LOWEST = 2.0**-_MAX_EXPONENT
_HIGHEST = 2.0**_MAX_EXPONENT

# How many overflows are excused once the batch is found at fault. That takes six, with
# reserves of 1, 3, 7, 15, 31 and 63 bits.
_EXCUSED_STEPS = 64
_SHORTEST_MEMORY = 32  # short, as a rare outlier should not lower the scale for long
_LONGEST_MEMORY = 512  # an overflow that recurs less often than this costs few steps
_FIRST_MEMORY = 1e-3  # in place of 0, so that the first size alone decides
_LENGTHENING = 2  # how much each measured step adds to a memory below _SHORTEST_MEMORY
_SHORTENING = 4096  # each measured step takes 1 part in 4096 from a longer memory
_GROWTH_STEPS = 2048  # about as many as in TensorFlow and PyTorch
# This many steps with zero gradients count as one that is measured, as few of them are
# due to underflow.
_ZERO_STEPS = 64


class HeadroomLossScale(LossScale):
    """Measures the largest gradient, and keeps it a little below overflow.

    For short runs, and for gradients that jump in size or are zero at most steps. Where
    gradients inside the model are larger than those of its parameters,
    `DynamicLossScale` skips fewer steps.

    The rule, where `size` is the least integer for which the step's largest gradient is
    below `2**size` (the exponent of `frexp`), and `largest` is the size of the largest
    gradient that is remembered::

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

        if reserve >= 32:                       # it was the batch: excuse 64
            reserve = 0
            overflows = -64
        else:
            reserve = max(reserve - (1 + reserve) * fall, 0)
            overflows = min(overflows, 0)

    An overflow means that some gradient is too large for the scale, or that the batch
    itself gives a NaN or an infinity. So the scale falls by 1, 2, 4, 8, … bits, which
    are held in reserve until a gradient explains the overflow, nothing overflows any
    more, or 32 bits have not helped.

    The `memory` is the number of steps in which `largest` and `reserve` fall by at
    least a bit; if all gradients are zero, they take 64 times as many. It is 0 at
    first, and grows to 32 with the steps measured. Each run of overflows doubles it, to
    at least 32 and at most 512; from there, it shrinks slowly back to 32.

    Gradients that are all zero may be rare, or may all have underflowed. So without a
    reserve, the scale grows by one bit in 2048 to 32,768 such steps. The scale is a
    power of two between 2**-100 and 2**100.

    Source: this library, after OpenSeq2Seq's `LogMaxScaler`.

    Args:
      initial_scale: the first loss scale, from 2**-100 to 2**100, rounded down to a
        power of two.
      margin: how many bits to leave between the largest gradient and overflow, from 0
        to 24. With more bits, fewer steps overflow, but more gradients underflow.

    Attributes:
      spare_bits: the bits between the largest gradient that is remembered and overflow:
        the margin, the reserve, and what rounding leaves; float32, shape ().

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
    # The overflows since the last finite step; -n while n more are excused
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
        gradient = largest_on_all_replicas(grads, axis_name)
        finite = jnp.isfinite(gradient)
        is_measured = gradient > 0
        measured = self._after_measuring(gradient)
        after_finite_step = choose(is_measured, measured, self._after_zeros())
        new = choose(finite, after_finite_step, self._after_overflow())
        return new, finite

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """The loss scale after one step, from the flag alone, without a measured size.

        The scale falls at overflows as in `update`, and doubles with every 2048 finite
        steps, in a row or not.

        Args:
          grads_finite: whether the step's gradients were finite; bool, shape ().

        Returns:
          The new loss scale.
        """
        # The reserve becomes part of the largest gradient, which falls with each step.
        largest = self._largest() + self._reserve
        fallen = largest - 1 / _GROWTH_STEPS
        after_finite_step = self._with(fallen, reserve=0.0, overflows=0)
        return choose(grads_finite, after_finite_step, self._after_overflow())

    def exhausted(self) -> jax.Array:
        """Whether gradients overflowed, and the scale would fall below 2**-100.

        An overflow that is excused does not count. A step that is skipped for its loss,
        or by a skip rule, does not change the answer.

        Returns:
          A bool, shape ().
        """
        exponent = _OVERFLOW_BITS - self.margin - self._largest() - self._reserve
        return (self._overflows > 0) & (exponent < -_MAX_EXPONENT)

    def _after_overflow(self) -> Self:
        """The loss scale after an overflow, which nothing has measured.

        The reserve grows by 1, 2, 4, 8, … bits, unless the overflow is excused; and the
        first overflow of a run lengthens the memory.
        """
        is_excused = self._overflows < 0
        more = jnp.minimum(self._reserve + 1, _DEEP_BITS)
        deeper = jnp.ceil(self._reserve + more)
        reserve = jnp.where(is_excused, self._reserve, deeper)

        is_first = self._overflows == 0
        longer = jnp.clip(2 * self._memory, _SHORTEST_MEMORY, _LONGEST_MEMORY)
        memory = jnp.where(is_first, longer, self._memory)

        overflows = optax.safe_increment(self._overflows)
        new = self._with(self._largest(), reserve, overflows)
        return new.replace(_memory=memory)

    def _after_measuring(self, gradient: jax.Array) -> Self:
        """The loss scale after a finite step whose largest gradient is not zero.

        The first such step decides alone, as the memory is still 0.
        """
        _, exponent = jnp.frexp(gradient)
        size = exponent.astype(jnp.float32)
        memory = jnp.maximum(self._memory, _FIRST_MEMORY)
        fall = 1 / memory

        old_largest = self._largest()
        above = jnp.maximum(old_largest - size, 0)
        fallen = old_largest - (1 + above / _GAP_BITS) * fall
        largest = jnp.maximum(size, fallen)

        explains_overflow = size > old_largest + self.margin
        explained = self._with(largest, reserve=0.0, overflows=0)
        new = choose(explains_overflow, explained, self._faded(largest, fall))
        return new.replace(_memory=self._next_memory())

    def _next_memory(self) -> jax.Array:
        """The memory after a step that was measured; float32, shape ()."""
        longer = self._memory + _LENGTHENING
        shorter = self._memory * (1 - 1 / _SHORTENING)
        shorter = jnp.maximum(shorter, _SHORTEST_MEMORY)
        return jnp.where(self._memory < _SHORTEST_MEMORY, longer, shorter)

    def _after_zeros(self) -> Self:
        """The loss scale after a finite step whose gradients are all zero.

        They may all have underflowed, so the scale rises, but far more slowly than
        after a step that measures small gradients.
        """
        memory = jnp.maximum(self._memory, _SHORTEST_MEMORY)
        fall = 1 / (_ZERO_STEPS * memory)
        fallen = self._largest() - fall
        return self._faded(fallen, fall)

    def _faded(self, largest: jax.Array, fall: jax.Array) -> Self:
        """The loss scale after a finite step that does not explain an overflow.

        The reserve shrinks by `fall * (1 + reserve)`, so that it reaches 0. But a deep
        reserve has not helped, so the batch was at fault: the reserve is given up, and
        further overflows are excused.
        """
        batch_is_at_fault = self._reserve >= _DEEP_BITS
        faded = self._reserve - (1 + self._reserve) * fall
        faded = jnp.maximum(faded, 0)
        reserve = jnp.where(batch_is_at_fault, 0, faded)
        excuses_left = jnp.minimum(self._overflows, 0)
        overflows = jnp.where(batch_is_at_fault, -_EXCUSED_STEPS, excuses_left)
        return self._with(largest, reserve, overflows)

    def _largest(self) -> jax.Array:
        """The `size` of the largest gradient remembered, with a fraction as it falls.

        It is computed back from the scale, not stored, so that the rule goes on from a
        scale that was set by hand.
        """
        _, exponent = jnp.frexp(self() / 2)  # the scale is 2**exponent
        overflow = _OVERFLOW_BITS - exponent
        return overflow.astype(jnp.float32) - self.spare_bits

    def _with(
        self, largest: jax.Array, reserve: ArrayLike, overflows: ArrayLike
    ) -> Self:
        """The loss scale that a largest gradient and a reserve make.

        All numbers have shape (), and the first two are float32.
        """
        max_exponent = _OVERFLOW_BITS - self.margin - largest
        max_exponent = jnp.clip(max_exponent, -_MAX_EXPONENT, _MAX_EXPONENT)
        with_reserve = jnp.maximum(max_exponent - reserve, -_MAX_EXPONENT)
        exponent = jnp.floor(with_reserve)
        # Not by exp2, which is inexact: the scale would not be a power of two.
        one = jnp.float32(1)
        loss_scale = jnp.ldexp(one, exponent.astype(jnp.int32))
        spare_bits = self.margin + max_exponent - exponent
        return self.replace(
            loss_scale=loss_scale,
            spare_bits=spare_bits,
            _reserve=reserve,
            _overflows=overflows,
        )
