"""The loss scale that keeps the largest gradient a little below overflow.

It measures the exponent of each step's largest gradient, and sets the scale so that the
largest one that it remembers stays below 2**16, where float16 overflows, by `margin`
bits. Where gradients inside the model are larger than those of the parameters, which
alone are measured, steps overflow all the same. For these, it lowers the scale by some
bits more, the `reserve`.

All of this is in bits, that is, in powers of two. Both the largest gradient remembered
and the reserve fall while no step confirms them, by a bit in about `memory` steps; and
each row of overflows makes the memory longer.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.stateful import checked, state_field
from optax_lossscale._scales.loss_scale import (
    AxisName,
    LossScale,
    choose,
    largest_of_all,
)

# These are in bits.
_OVERFLOW = 16  # all finite float16 numbers are below 2**16
# If steps overflow in spite of a reserve this deep, the batch is at fault: float16's
# numbers span 40 bits, so gradients that used to fit underflow at such a scale. It is
# also the most that one overflow adds.
_DEEP = 32
_BOUND = 100  # the scale lies between 2**-100 and 2**100
_GAP = 10  # this far above a step's size, the largest remembered falls twice as fast

# These are in steps.
# How many overflows are excused once the batch is found at fault: many, compared with
# the six that it takes to find that.
_EXCUSED = 64
_SHORTEST = 32  # short, as a rare outlier should not lower the scale for long
_LONGEST = 512  # an overflow that recurs less often than this costs few steps
_AT_FIRST = 1e-3  # used for a memory of 0, so that the first size alone decides
_LENGTHENING = 2  # how much each measured step adds to a memory below _SHORTEST
_SHORTENING = 4096  # each measured step takes 1 part in 4096 from a longer memory
_GROWTH = 2048  # about as long as TensorFlow and PyTorch wait before a scale grows
_ZEROS = 64  # steps of zero gradients that count as one, as few are due to underflow


class HeadroomLossScale(LossScale):
    """Measures the largest gradient, and keeps it a little below overflow.

    For short runs, and for gradients that jump in size or are rare. Where gradients
    inside the model are larger than those of its parameters, `DynamicLossScale` skips
    fewer steps.

    The rule, where `size` is the exponent of the step's largest gradient, and `largest`
    that of the largest that is remembered::

        if grads_overflow:
            if reserve == 0 or reserve has faded since the last overflow:
                memory = clip(2 * memory, 32, 512)
            reserve = ceil(reserve + clip(reserve + 1, 1, 32))
        else:
            fall = 1 / memory if size is measured else 1 / (64 * max(memory, 32))
            if size > largest + margin: reserve = 0         # the overflow was due to the size
            elif reserve >= 32:         reserve = -64       # it was the batch: excuse 64 more
            elif reserve > 0:           reserve = max(reserve - (1 + reserve) * fall, 0)
            largest = max(size, largest - (1 + max(largest - size, 0) / 10) * fall)
            memory = memory + 2 if memory < 32 else max(memory * (1 - 1 / 4096), 32)
        loss_scale = 2 ** floor(16 - margin - largest - max(reserve, 0))

    An overflow means that some gradient is too large for the scale, or that the batch
    is broken. So the scale falls by 1, 2, 4, 8, … bits, which are held in reserve until
    a gradient explains the overflow, nothing overflows any more, or 32 bits have not
    helped. Each row of overflows doubles the `memory`: the number of steps, 0 at first,
    in which `largest` and `reserve` fall by a bit.

    Gradients that are all zero have no size: `largest` stands for it above, and
    `memory` stays. They may be rare, or may all have underflowed. So the scale grows by
    one bit in 2048 to 32,768 such steps. It is a power of two between 2**-100 and
    2**100.

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
      >>> print(ls() * 2.0**-9)  # below 2**16 by the margin of one bit and less than one more
      16384.0
    """

    initial_scale: float = checked(
        validation.number(
            f"between 2**-{_BOUND} and 2**{_BOUND}",
            lambda x: 2.0**-_BOUND <= x <= 2.0**_BOUND,
        ),
        default=2.0**15,
    )
    margin: int = checked(validation.count(0, 24), default=1)
    # shape=(), dtype=float32, like all that follow
    spare_bits: jax.Array = state_field()
    # In bits; a negative reserve says how many further overflows are excused
    _reserve: jax.Array = state_field(0.0)
    _memory: jax.Array = state_field(0.0)  # in measured steps

    def __post_init__(self):
        super().__post_init__()
        _, exponent = np.frexp(self.initial_scale)
        self._set(
            loss_scale=np.ldexp(np.float32(0.5), exponent),
            spare_bits=np.float32(self.margin),
        )

    def update(
        self, grads: Any, axis_name: AxisName | None = None
    ) -> tuple[Self, jax.Array]:
        gradient = largest_of_all(grads, axis_name)
        finite = jnp.isfinite(gradient)
        is_measured = gradient > 0
        after_finite_step = choose(
            is_measured, self._after_measuring(gradient), self._after_zeros()
        )
        new = choose(finite, after_finite_step, self._after_overflow())
        return new, finite

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """The loss scale after one step, from the flag alone, without a measured size.

        The scale falls at overflows as in `update`, and doubles every 2048 finite steps
        in a row.

        Args:
          grads_finite: whether the step's gradients were finite; bool, shape ().
        """
        fallen_to = self._largest() + jnp.maximum(self._reserve, 0)
        after_finite_step = self._with(fallen_to - 1 / _GROWTH, 0.0, self._memory)
        return choose(grads_finite, after_finite_step, self._after_overflow())

    def exhausted(self) -> jax.Array:
        """Whether the last step overflowed at a scale of 2**-100, the lowest.

        False for an overflow that is excused. A bool, shape ().
        """
        has_overflowed = (self._reserve > 0) & ~self._has_faded()
        return (self() <= 2.0**-_BOUND) & has_overflowed

    def _after_overflow(self) -> Self:
        """The loss scale after an overflow, which nothing has measured.

        The reserve grows by 1, 2, 4, 8, … bits, or one excuse is used up; and the first
        overflow of a row lengthens the memory.
        """
        more = jnp.clip(self._reserve + 1, 1, _DEEP)  # 1 while overflows are excused
        is_first = (self._reserve == 0) | self._has_faded()
        longer = jnp.clip(2 * self._memory, _SHORTEST, _LONGEST)
        memory = jnp.where(is_first, longer, self._memory)
        reserve = jnp.ceil(self._reserve + more)
        return self._with(self._largest(), reserve, memory)

    def _after_measuring(self, gradient: jax.Array) -> Self:
        """The loss scale after a finite step whose largest gradient is not zero.

        The first such step decides alone, as the memory is still 0.
        """
        _, exponent = jnp.frexp(gradient)
        size = exponent.astype(jnp.float32)
        fall = 1 / jnp.maximum(self._memory, _AT_FIRST)

        largest = self._largest()
        above = jnp.maximum(largest - size, 0)
        fallen = largest - (1 + above / _GAP) * fall

        explains_overflow = size > largest + self.margin
        reserve = jnp.where(explains_overflow, 0, self._reserve_after(fall))

        longer = self._memory + _LENGTHENING
        shorter = self._memory * (1 - 1 / _SHORTENING)
        shorter = jnp.maximum(shorter, _SHORTEST)
        memory = jnp.where(self._memory < _SHORTEST, longer, shorter)
        return self._with(jnp.maximum(size, fallen), reserve, memory)

    def _after_zeros(self) -> Self:
        """The loss scale after a finite step whose gradients are all zero.

        They may all have underflowed, so the scale rises, but far more slowly than
        after a step that measures small gradients.
        """
        fall = 1 / (_ZEROS * jnp.maximum(self._memory, _SHORTEST))
        largest = self._largest() - fall
        return self._with(largest, self._reserve_after(fall), self._memory)

    def _reserve_after(self, fall: jax.Array) -> jax.Array:
        """The reserve after a finite step, whose gradients do not explain an overflow.

        It loses `fall` times one more than itself, but nothing if it is negative, as
        excuses do not fade.
        """
        left = self._reserve - (1 + self._reserve) * fall
        left = jnp.maximum(left, 0)
        # An overflow leaves a whole number, by which `_has_faded` tells that nothing
        # has faded since. So a faded reserve must not be one: with a memory of 32, 31
        # bits fall to 30, and are moved to just below that.
        is_whole = left % 1 == 0
        left = jnp.where(is_whole, jnp.nextafter(left, 0), left)
        left = jnp.where(self._reserve < 0, self._reserve, left)
        return jnp.where(self._reserve >= _DEEP, -_EXCUSED, left)

    def _has_faded(self) -> jax.Array:
        """Whether the reserve has fallen since an overflow left it a whole number."""
        return self._reserve % 1 > 0

    def _largest(self) -> jax.Array:
        """The exponent of the largest gradient remembered, with a fraction as it falls.

        It is not stored, but computed back from the scale and `spare_bits`.
        """
        _, exponent = jnp.frexp(self() / 2)
        return _OVERFLOW - exponent - self.spare_bits

    def _with(self, largest: jax.Array, reserve: ArrayLike, memory: jax.Array) -> Self:
        """The loss scale that these three numbers make; all are float32, shape ()."""
        fits = _OVERFLOW - self.margin - largest
        fits = jnp.clip(fits, -_BOUND, _BOUND)
        with_reserve = fits - jnp.maximum(reserve, 0)
        exponent = jnp.floor(jnp.maximum(with_reserve, -_BOUND))
        # Not by exp2, which is inexact: the scale would not be a power of two.
        loss_scale = jnp.ldexp(jnp.float32(1), exponent.astype(jnp.int32))
        return self.replace(
            loss_scale=loss_scale,
            spare_bits=self.margin + fits - exponent,
            _reserve=reserve,
            _memory=memory,
        )
