"""The loss scale that keeps the largest gradient a little below overflow."""

from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._scales import validation
from optax_lossscale._scales.loss_scale import AxisName, LossScale, choose, largest_of_all
from optax_lossscale._scales.stateful import checked, state_field

# Exponents of two, or differences of them: bits.
_OVERFLOW = 16  # float16's numbers are below 2**16
_DEEP = 32  # of float16's 40: any deeper, what used to fit is lost, and a smaller scale is no help
_BOUND = 100  # of the scale's exponent, either way
_NEVER = -1000  # below all possible exponents

# Steps.
_LONG = 2000  # how long TensorFlow and PyTorch wait before a scale grows
_EXCUSED = 64  # many, compared with the six overflows after which the batch is found at fault

_MEMORY = 8  # times the shortest window: a rare outlier should not lower the scale for long


class HeadroomLossScale(LossScale):
    """Measures the largest gradient, and keeps it a little below overflow.

    For short runs, and for gradients that jump in size or are rare. Where gradients inside the
    model are larger than those of its parameters, `DynamicLossScale` skips fewer steps. Two things
    cannot be measured:

    - An overflow means that a gradient is too large for the scale, or that the batch is broken.
      So the scale falls by more bits each time, and these are held in reserve until a gradient
      explains the overflow, or it is clear that no scale would have prevented it.
    - A step of zeros means that there is no gradient, or that all of it underflowed. So 2000 of
      them raise the scale by 32 bits. If that is too much for the next gradient, the raise is
      undone, and the next raise takes 16 times as many zeros.

    The rule, where `k` is the scale's exponent, and `size` that of the step's largest gradient::

        raised = 32 * (zeros // wait)                            # wait = 2000 at first
        base = k + max(reserve, 0) - raised                      # which fits what was measured
        if grads_overflow:
            if raised > 0: zeros, wait = 0, 16 * wait
            elif reserve < 0: reserve += 1                       # excused
            else: quiet, reserve = 0, reserve + min(reserve + 1, 32)
        elif all_zero:
            zeros += 1
            if reserve >= 32: reserve = -64                      # it was the batch
        else:
            quiet += 1
            if size + base > 16: reserve = 0                     # it was the size
            elif reserve >= 32: reserve = -64                    # it was the batch
            elif reserve > 0 and quiet % patience == 0: reserve //= 2
            if raised > 0: base = 16 - margin - size             # it had underflowed
            elif a_window_ends: base = 16 - margin - largest_size_in_it
            else: base = min(base, 16 - margin - size)
            zeros = 0
        k = base - max(reserve, 0) + 32 * (zeros // wait)

    Windows double from a single step to `window`, from then on the shortest; the patience is a
    quarter of that, or of a longer window. An overflow that is neither excused nor a continuation
    of the last one doubles the window: up to 8 times the shortest or, if it comes just after half
    of the reserve was given up, up to 8000 steps. Every 2000 quiet steps halve it. Sizes are
    remembered for at most 8 times the shortest. The scale is a power of two between 2**-100 and
    2**100, and zeros do not count if 32 bits more would be too many.

    These properties follow from the rule, and are tested:

    - Of gradients of about one size, with up to 10,000 zeros between any two, 95% are applied.
    - Without NaNs, and with gradients below 2**115, it skips at most 75 steps in a row.
    - After any history, and with a margin of 1, 4608 steps whose largest gradients are alike bring
      the scale within a factor of 4 of the best, unless it flushed all of them to zero.

    Source: this library, after OpenSeq2Seq's `LogMaxScaler`.

    Args:
      initial_scale: the first loss scale, from 2**-100 to 2**100, rounded down to a power of two.
      margin: how many bits to leave between the largest gradient and overflow, from 0 to 24. With
        more bits, fewer steps overflow, but more gradients underflow.
      window: for how many measured steps, at least, the largest gradient is remembered. While
        nothing overflows, it is remembered for at most twice as many. From 4 to 2**20.

    Attributes:
      spare_bits: the bits between overflow and the largest gradient of the last step that was
        measured; 0 after an overflow and before the first step; int32, shape ().

    Raises:
      ValueError: for an argument outside the ranges above.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> ls, should_apply = ols.HeadroomLossScale().update({"w": jnp.array([0.0, 2.0**-9])})
      >>> print(ls() * 2.0**-9)  # below 2**16 by the margin of one bit and less than one more
      16384.0
    """

    margin: int = checked(partial(validation.count, least=0, most=24), default=1)
    window: int = checked(partial(validation.count, least=4, most=2**20), default=64)
    spare_bits: jax.Array = state_field(0)  # shape=(), dtype=int32, like all that follow
    _largest: jax.Array = state_field(_NEVER)  # the largest size in this window
    _window: jax.Array = state_field(1)  # its length
    _quiet: jax.Array = state_field(0)  # measured steps since an overflow that was not excused
    _reserve: jax.Array = state_field(0)  # bits; below zero, how many overflows are excused
    _zeros: jax.Array = state_field(0)  # steps since the last one that measured something
    _wait: jax.Array = state_field(_LONG)  # how many of them raise the scale
    _exhausted: jax.Array = state_field(False)  # dtype=bool

    def __post_init__(self):
        super().__post_init__()
        if not 2.0**-_BOUND <= self.initial_scale <= 2.0**_BOUND:
            allowed = f"between 2**-{_BOUND} and 2**{_BOUND}"
            validation.refuse("initial_scale", self.initial_scale, allowed)
        _, exponent = np.frexp(self.initial_scale)
        self._set(loss_scale=np.ldexp(np.float32(0.5), exponent))

    def update(self, grads: Any, axis_name: AxisName | None = None) -> tuple[Self, jax.Array]:
        largest = largest_of_all(grads, axis_name)
        finite = jnp.isfinite(largest)
        finite_step = choose(largest > 0, self._after_measuring(largest), self._after_zeros())
        new, base = choose(finite, finite_step, self._after_overflow())
        return new._at(base), finite

    def adjust(self, grads_finite: jax.typing.ArrayLike) -> Self:
        """Adapts by the flag alone, which measures nothing.

        The scale falls at overflows as in `update`, and doubles every 2000 finite steps in a row.
        """
        quiet = self._quiet + 1
        kept = self.replace(_quiet=quiet, _reserve=0, _exhausted=False)
        finite_step = kept, kept._base() + (quiet % _LONG == 0)
        new, base = choose(grads_finite, finite_step, self._after_overflow())
        return new._at(base)

    def exhausted(self) -> jax.Array:
        """Whether the last step overflowed at a scale of 2**-100, the lowest."""
        return jnp.asarray(self._exhausted)

    # Each of these three returns the new loss scale, still with the old scale, and the new `base`.

    def _after_overflow(self) -> tuple[Self, jax.Array]:
        taken_back = self.replace(_zeros=0, _wait=16 * self._wait)
        excused = self.replace(_reserve=self._reserve + 1)
        new = choose(self._reserve < 0, excused, self._fallen())
        new = choose(self._raised() > 0, taken_back, new)
        return new.replace(spare_bits=0, _exhausted=self._exponent() <= -_BOUND), self._base()

    def _after_zeros(self) -> tuple[Self, jax.Array]:
        can_rise = self._base() + self._raised() <= _BOUND - _DEEP
        new = self.replace(
            _reserve=jnp.where(self._reserve >= _DEEP, -_EXCUSED, self._reserve),
            _zeros=self._zeros + can_rise,
            _exhausted=False,
        )
        return new, self._base()

    def _after_measuring(self, gradient: jax.Array) -> tuple[Self, jax.Array]:
        _, size = jnp.frexp(gradient)
        base, raised, quiet = self._base(), self._raised() > 0, self._quiet + 1
        largest = jnp.where(raised, size, jnp.maximum(self._largest, size))
        remembered = jnp.minimum(self._window, _MEMORY * self.window)
        ends = raised | (quiet % remembered == 0)
        fits = lambda size: _OVERFLOW - self.margin - size
        new = self.replace(
            spare_bits=_OVERFLOW - size - self._exponent(),
            _largest=jnp.where(ends, _NEVER, largest),
            _window=self._window_after(quiet),
            _quiet=quiet,
            _reserve=self._reserve_after(size + base > _OVERFLOW, quiet),
            _zeros=0,
            _exhausted=False,
        )
        return new, jnp.where(ends, fits(largest), jnp.minimum(base, fits(size)))

    def _fallen(self) -> Self:
        at_once = self._quiet % self._patience() == 0
        longest = jnp.where(at_once, 4 * _LONG, _MEMORY * self.window)
        longer = (self._quiet > 0) & (self._window < longest)
        reserve = self._reserve + jnp.minimum(self._reserve + 1, _DEEP)
        return self.replace(
            _window=jnp.where(longer, 2 * self._window, self._window),
            _reserve=jnp.minimum(reserve, self._base() + _BOUND),
            _quiet=0,
        )

    def _reserve_after(self, explained: jax.Array, quiet: jax.Array) -> jax.Array:
        half = jnp.minimum(self._reserve, self._reserve // 2)  # a negative one stays
        left = jnp.where(quiet % self._patience() == 0, half, self._reserve)
        left = jnp.where(self._reserve >= _DEEP, -_EXCUSED, left)
        return jnp.where(explained, 0, left)

    def _window_after(self, quiet: jax.Array) -> jax.Array:
        window, shortest = self._window, self.window
        longer = jnp.where(quiet % window == 0, jnp.minimum(2 * window, shortest), window)
        shorter = jnp.where(quiet % _LONG == 0, jnp.maximum(window // 2, shortest), window)
        return jnp.where(window < shortest, longer, shorter)

    def _patience(self) -> jax.Array:
        return jnp.maximum(self._window, self.window) // 4

    def _raised(self) -> jax.Array:
        return _DEEP * (self._zeros // self._wait)

    def _exponent(self) -> jax.Array:
        return jnp.frexp(self())[1] - 1

    def _above_base(self) -> jax.Array:
        return self._raised() - jnp.maximum(self._reserve, 0)

    def _base(self) -> jax.Array:
        return self._exponent() - self._above_base()

    def _at(self, base: jax.Array) -> Self:
        k = jnp.clip(base + self._above_base(), -_BOUND, _BOUND)
        return self.replace(loss_scale=jnp.ldexp(jnp.float32(1), k))  # exp2 is inexact on CPU
