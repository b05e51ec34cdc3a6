"""The loss scale that keeps the largest gradient a little below overflow.

The rule works with the *exponent* of each step's largest gradient: the least integer
for which the gradient is below `2**exponent`. A gradient of 2**-9, for example, has the
exponent -8. Float16 overflows at 2**16, so with a margin of 1 bit, the scale for this
exponent is 2**(16 - 1 + 8) = 2**23.

The rule remembers the exponent of the largest recent gradient and chooses the scale
that keeps such a gradient `margin` bits below 2**16. While gradients are smaller, the
remembered exponent falls, so that the scale can rise again. The *memory* is the number
of steps in which it falls by about a bit, or by more if gradients are much smaller.
Runs of overflows lengthen the memory, up to 512 steps.

An overflow has one of two causes: some gradient is too large for the scale, or the
batch itself produces a NaN or an infinity. The rule first assumes the former. Because
an infinity does not show by how much the scale is too large, overflows in a row lower
it by more and more bits, whose sum is the *reserve*. While steps are finite, the
reserve shrinks, and it becomes 0 as soon as a measured gradient is large enough to
explain the overflow. There may be no such gradient, because only the gradients of
parameters are measured, and those inside the model may be larger. But if the reserve
reaches 32 bits, and the next finite step has no such gradient, the batch is taken to be
at fault: this step sets the reserve to 0, and up to 64 later overflows are *excused*,
which means that they do not lower the scale.

If all gradients of a step are zero, nonzero gradients may be rare, or all gradients may
have underflowed, so the scale rises on such steps, too, but far more slowly.

On each step, where `exponent` is that of the largest gradient and `largest` is the
remembered exponent::

    if grads_overflow:
        overflows += 1
        if overflows == 1: memory = clip(2 * memory, 32, 512)
        if overflows >= 1: reserve = ceil(reserve + min(reserve + 1, 32))
    elif all gradients are zero:
        fall = 1 / (64 * max(memory, 32))       # 1 bit in 2048 to 32,768 steps
        largest -= fall
        fade(fall)
    else:
        if exponent > largest + margin:         # explains earlier overflows, if any
            reserve = overflows = 0
        else:
            fade(1 / max(memory, 1e-3))
        fall = (1 + max(largest - exponent, 0) / 10) / max(memory, 1e-3)
        largest = max(exponent, largest - fall)
        memory = memory + 2 if memory < 32 else max(memory * (1 - 1 / 4096), 32)
    largest = clip(largest, -84 - margin, 116 - margin)
    loss_scale = 2 ** max(floor(16 - margin - largest - reserve), -100)

where `fade(fall)` is::

    if reserve >= 32:                           # the batch was at fault: excuse 64
        reserve = 0
        overflows = -64
    else:
        reserve = max(reserve - (1 + reserve) * fall, 0)
        overflows = min(overflows, 0)

When a run begins, `largest` is `16 - margin - log2(initial_scale)`, with the initial
scale rounded down to a power of two, and `memory`, `reserve` and `overflows` are 0. The
state holds the scale, `spare_bits`, `reserve`, `memory` and `overflows`; `largest` is
computed from the first two.
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
from optax_lossscale._scales.loss_scale import LossScale

# These numbers were chosen by trial, on synthetic sequences of gradients like those in
# tests/scales/test_hostile_sequences.py, unless a comment derives them. A *measured step* is one
# with finite gradients that are not all zero.

# All finite float16 numbers are below 2**16.
_OVERFLOW_BITS = 16
# At this reserve or above, the batch is taken to be at fault rather than the scale.
# Float16's numbers span 40 bits, from 2**-24 to 2**16. A reserve of 32 leaves at most 8
# of them below the largest gradient, and all smaller gradients underflow. This is also
# the most that one overflow adds to the reserve, apart from rounding.
_DEEP_BITS = 32
# The remembered exponent falls twice as fast if that of the step is this much smaller.
# If that of the step is 20 smaller, and the memory is 32 steps, the remembered exponent
# reaches it in about 320 * ln(3) = 350 steps.
_GAP_BITS = 10
# The scale stays between 2**-100 and 2**100, well within float32's 2**-126 and 2**128.
_MAX_EXPONENT = 100

# How many overflows are excused once the batch has been found to be at fault. It takes
# six overflows to find that, with reserves of 1, 3, 7, 15, 31 and 63 bits.
_EXCUSED_STEPS = 64

# Measured steps lengthen the memory to this many steps. If it were longer, one rare
# outlier would keep the scale low for longer.
_SHORTEST_MEMORY = 32
# Runs of overflows double the memory up to this many steps. Overflows that recur less
# often cost less than 1 step in 512.
_LONGEST_MEMORY = 512
# Stands in for a memory of 0, which lasts until the first overflow or measured step. If
# the measured step comes first, the remembered exponent would fall by 1000 or more, so
# the measured one replaces it.
_FIRST_MEMORY = 1e-3
# Each measured step adds this to a memory below `_SHORTEST_MEMORY`.
_LENGTHENING = 2
# Each measured step takes 1 part in 4096 from a longer memory.
_SHORTENING = 4096

# Close to the 2000 of TensorFlow and PyTorch, with a reciprocal that is exact
_GROWTH_STEPS = 2048
# This many steps with all-zero gradients count as one measured step, on the assumption
# that few of them are due to underflow.
_ZERO_STEPS = 64


class HeadroomLossScale(LossScale):
    """Measures the largest gradient and keeps it a little below overflow.

    Use it for short runs, for gradients whose magnitude jumps, and for gradients that
    are all zero on most steps. It measures only the gradients of parameters: if those
    inside the model are larger, `DynamicLossScale` skips fewer steps.

    The scale is a power of two between 2**-100 and 2**100. The rule chooses it so that
    the largest recent gradient, times the scale, is at least `margin` bits below 2**16,
    where float16 overflows. Usually, the first finite step with nonzero gradients sets
    the scale, whatever the initial scale. But after an earlier overflow that is not due
    to large gradients, a scale that is too low rises slowly: by 20 bits in about 350
    steps. While gradients are smaller, the scale rises again; while all of them are
    zero, far more slowly.

    Overflows in a row lower the scale by 1, 2, 4 and more bits, up to about 32 at a
    time. If they lower it by 32 bits or more in all, and the gradients of the next
    finite step are too small to explain them, the batches are taken to be at fault
    rather than the scale. The scale then rises at once, and up to 64 later overflows do
    not lower it.

    Args:
      initial_scale: the initial loss scale, from 2**-100 to 2**100, rounded down to a
        power of two.
      margin: how many bits to leave between the largest gradient and overflow, from 0
        to 24. With more bits, fewer steps overflow, but more gradients underflow.

    Attributes:
      spare_bits: by how many bits the largest recent gradient could grow without an
        overflow; float32, shape (). It is `16 - largest - log2(loss_scale)`, where
        `2**largest` is the bound that the rule remembers for that gradient. This is the
        sum of the margin, the bits by which earlier overflows still lower the scale,
        and the fraction of a bit by which the scale is rounded down, or less if the
        scale would otherwise be below 2**-100.

    Raises:
      ValueError: for an argument outside the ranges above.

    Source: a new rule.

    Example:
      After one step, the largest scaled gradient is one to two bits below 2**16:

      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> grads = {"w": jnp.array([0.0, 2.0**-9])}
      >>> ls, should_apply = ols.HeadroomLossScale().update(grads)
      >>> print(ls() * 2.0**-9)
      16384.0
    """

    _gradients_checked_by = "update"
    initial_scale: float = checked(
        validation.number_between,
        least=2.0**-_MAX_EXPONENT,
        most=2.0**_MAX_EXPONENT,
        default=2.0**15,
    )
    margin: int = checked(validation.int_between, least=0, most=24, default=1)
    spare_bits: jax.Array = state_field()
    # As in the pseudocode above: the reserve in bits, the memory in steps, and the
    # overflows since the last finite step, or -n while n more are excused
    _reserve: jax.Array = state_field(0.0)
    _memory: jax.Array = state_field(0.0)
    _overflows: jax.Array = state_field(0)

    def __post_init__(self):
        super().__post_init__()
        _, exponent = np.frexp(self.initial_scale)
        power_of_two = np.ldexp(np.float32(0.5), exponent)
        self._set(loss_scale=power_of_two, spare_bits=np.float32(self.margin))

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

        The scale falls on overflow as in `update`, and doubles with every 2048 finite
        steps, whether or not they are consecutive.

        Args:
          grads_finite: whether the step's gradients were finite; bool, shape ().

        Returns:
          The new loss scale.
        """
        # The reserve is added to `largest`, which falls on each finite step.
        largest = self._largest() + self._reserve
        fallen = largest - 1 / _GROWTH_STEPS
        after_finite_step = self._scaled_for(fallen, reserve=0.0, overflows=0)
        return choose(grads_finite, after_finite_step, self._after_overflow())

    def exhausted(self) -> jax.Array:
        """Whether gradients overflowed, and the scale would have to fall below 2**-100.

        Overflows that do not lower the scale, because the batch is taken to be at
        fault, do not count. A step that is skipped because of its loss, or by a skip
        rule, does not change the answer.

        Returns:
          A bool, shape ().
        """
        exponent = _OVERFLOW_BITS - self.margin - self._largest() - self._reserve
        return (self._overflows > 0) & (exponent < -_MAX_EXPONENT)

    def _after_overflow(self) -> Self:
        """Lowers the scale after an overflow or excuses the overflow."""
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
        """Adapts the scale to a finite step whose largest gradient is not zero."""
        _, exponent = jnp.frexp(largest_gradient)
        exponent = exponent.astype(jnp.float32)
        memory = jnp.maximum(self._memory, _FIRST_MEMORY)
        fall = 1 / memory

        old_largest = self._largest()
        gap = jnp.maximum(old_largest - exponent, 0)
        acceleration = 1 + gap / _GAP_BITS
        fallen = old_largest - acceleration * fall
        largest = jnp.maximum(exponent, fallen)

        explains_overflow = exponent > old_largest + self.margin
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
        """Raises the scale a little after a step whose gradients are all zero."""
        memory = jnp.maximum(self._memory, _SHORTEST_MEMORY)
        fall = 1 / (_ZERO_STEPS * memory)
        fallen = self._largest() - fall
        return self._faded(fallen, fall)

    def _faded(self, largest: jax.Array, fall: jax.Array) -> Self:
        """Shrinks the reserve after a finite step that does not explain an overflow.

        This is `fade` in the pseudocode. The reserve shrinks by `fall * (1 + reserve)`
        rather than by `fall * reserve`, so that it reaches 0.
        """
        batch_is_at_fault = self._reserve >= _DEEP_BITS
        faded = self._reserve - (1 + self._reserve) * fall
        faded = jnp.maximum(faded, 0)
        reserve = jnp.where(batch_is_at_fault, 0, faded)
        excuses_left = jnp.minimum(self._overflows, 0)
        overflows = jnp.where(batch_is_at_fault, -_EXCUSED_STEPS, excuses_left)
        return self._scaled_for(largest, reserve, overflows)

    def _largest(self) -> jax.Array:
        """Returns the remembered exponent; float32, shape ().

        It has a fraction because it falls by fractions of a bit. It is not stored but
        computed from the scale, so that the rule continues from a scale that was set
        with `replace`.
        """
        _, scale_exponent = jnp.frexp(self() / 2)  # The scale is 2**scale_exponent.
        highest = _OVERFLOW_BITS - scale_exponent  # A larger gradient would overflow.
        return highest.astype(jnp.float32) - self.spare_bits

    def _scaled_for(
        self, largest: jax.Array, reserve: ArrayLike, overflows: ArrayLike
    ) -> Self:
        """Returns the loss scale for a remembered exponent and a reserve in bits.

        All arguments have shape (). `largest` and `reserve` are float32.
        """
        # The exponent that the scale would have without a reserve and without rounding
        ideal = _OVERFLOW_BITS - self.margin - largest
        ideal = jnp.clip(ideal, -_MAX_EXPONENT, _MAX_EXPONENT)
        unrounded = jnp.maximum(ideal - reserve, -_MAX_EXPONENT)
        exponent = jnp.floor(unrounded)
        # `exp2` is inexact: on CPU, it often does not return a power of two.
        one = jnp.float32(1)
        loss_scale = jnp.ldexp(one, exponent.astype(jnp.int32))
        spare_bits = self.margin + ideal - exponent
        return self.replace(
            loss_scale=loss_scale,
            spare_bits=spare_bits,
            _reserve=reserve,
            _overflows=overflows,
        )
