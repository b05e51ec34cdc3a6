"""The loss scale that keeps the largest gradient a little below overflow."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._scales import validation
from optax_lossscale._scales.loss_scale import AxisName, LossScale, choose, largest_of_all, state

# All of these are exponents, or differences of them: bits.
_OVERFLOW = 16  # float16's numbers are below 2**16
_FALL = 8
_MOST_CAUTION = 3
_ENOUGH = 24  # the scale for gradients that are all zero, in case they underflowed
_BOUND = 100  # of the scale, either way
_NEVER = 1000  # above all exponents there are; below them with a minus


class HeadroomLossScale(LossScale):
    """Measures the largest gradient, and keeps it a little below overflow.

    It does not grow until a step breaks: the check reads all gradients anyway, and the
    largest of them says where the scale should be. What cannot be measured is an overflow.
    Most are explained by the gradients of the next step, which are larger than those before. If
    not, either gradients inside the model overflow before those of the parameters do, and the
    ceiling for these is lower than thought; or there was something wrong with the batch. A size
    that was seen to survive tells one from the other. The rule, where all numbers are exponents
    of two, `k` that of the scale, and the size of a step is its largest gradient, scaled::

        if grads_overflow:
            overflowed = k
            k -= 8
        else:
            largest = max(the unscaled sizes of the last one to two windows)
            if the step before overflowed and largest + overflowed <= 16:  # it is not explained
                if largest + overflowed <= survived:   # by the batch or by noise
                    caution, survived = min(caution + 1, 3), survived - 1
                elif largest + overflowed < failed:    # once may be the batch: try again
                    failed = largest + overflowed
                else:
                    ceiling, survived = failed - 1, size
            survived = max(survived, size)             # and what survives has not failed
            every probe_interval finite steps: caution -= 1, or if there is none, ceiling += 1
            target = ceiling - margin - caution - largest
            k = target, but beyond survived - largest three quarters of the way

    with a ceiling of at most 16, where float16 overflows, and a scale from 2**-100 to 2**100.
    All-zero gradients say nothing: before anything else was seen, they raise the scale to 2**24
    in case they underflowed, and no further.

    The source of the idea to follow the largest gradient is OpenSeq2Seq's `LogMaxLossScale`; the
    rule is this library's own. docs/policies.md compares it with the others.

    Args:
      initial_scale: the loss scale before the first step, from 2**-100 to 2**100, rounded down
        to a power of two. It matters for a few steps only.
      margin: how many bits to leave between the largest gradient and overflow, from 0 to 24.
        More make fewer steps overflow and more gradients underflow.
      window: how many finite steps a largest gradient is remembered for at least, and twice as
        many at most.
      probe_interval: after how many finite steps it tries to be one bit bolder, where overflows
        have made it cautious.

    Attributes:
      loss_scale: the loss scale now, a power of two; float32, shape ().
      headroom: the bits between the largest gradient of the last step that was measured and
        overflow: after a finite step at least 1 in float16, and 0 after an overflow and before
        the first step; int32, shape ().

    Raises:
      ValueError: for an argument outside what is said above.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> ls = ols.HeadroomLossScale(initial_scale=2.0**20)
      >>> for _ in range(5):
      ...     ls, should_apply = ls.update({"w": jnp.array([2.0**-10, -(2.0**-9)])})
      >>> float(ls() * 2.0**-9), int(ls.headroom)  # below 2**16 by the margin of one bit
      (16384.0, 1)
    """

    margin: int = 1
    window: int = 75
    probe_interval: int = 2000
    headroom: jax.Array = state(0)  # shape=(), dtype=int32, as all that follow
    _largest: jax.Array = state(-_NEVER)  # unscaled, in this window
    _largest_before: jax.Array = state(-_NEVER)  # in the window before
    _finite_steps: jax.Array = state(0)
    _overflowed: jax.Array = state()  # the scale that last did
    _has_overflowed: jax.Array = state(False)  # at the last step; dtype=bool
    _survived: jax.Array = state(-_NEVER)
    _failed: jax.Array = state(_NEVER)
    _ceiling: jax.Array = state(_OVERFLOW)
    _caution: jax.Array = state(0)

    def __post_init__(self):
        super().__post_init__()
        validation.bounded(
            "initial_scale",
            self.initial_scale,
            f"between 2**-{_BOUND} and 2**{_BOUND}",
            lambda x: 2.0**-_BOUND <= x <= 2.0**_BOUND,
        )
        _, exponent = np.frexp(self.initial_scale)
        self._set(
            loss_scale=np.ldexp(np.float32(0.5), exponent),
            # As if the next higher scale had.
            _overflowed=np.int32(exponent),
            margin=validation.count("margin", self.margin, least=0, most=24),
            window=validation.count("window", self.window),
            probe_interval=validation.count("probe_interval", self.probe_interval),
        )

    def update(self, grads: Any, axis_name: AxisName | None = None) -> tuple[Self, jax.Array]:
        """Adapts the scale to the largest gradient; see the class for the rule."""
        largest = largest_of_all(grads, axis_name)
        finite = jnp.isfinite(largest)
        after_finite_step = choose(
            largest > 0, self._after_measuring(largest), self._after_zeros()
        )
        return choose(finite, after_finite_step, self._after_overflow()), finite

    def adjust(self, grads_finite: jax.typing.ArrayLike) -> Self:
        """From the flag alone, which measures nothing.

        An overflow lowers the scale by 8 bits. Finite steps raise it by three quarters of
        the way to right below the last scale that overflowed, which is tried again one bit higher
        after every `probe_interval` of them.
        """
        k = self._exponent()
        steps = self._finite_steps + 1
        overflowed = self._overflowed + (steps % self.probe_interval == 0)
        risen = self._at(k + _part(jnp.maximum(overflowed - 1 - k, 0)))
        risen = risen.replace(_finite_steps=steps, _overflowed=overflowed, _has_overflowed=False)
        return choose(grads_finite, risen, self._after_overflow())

    def exhausted(self) -> jax.Array:
        """Whether the last step overflowed at a scale of 2**-100, the lowest."""
        at_bound = (self._overflowed <= -_BOUND) & (self._exponent() <= -_BOUND)
        return self._has_overflowed & at_bound

    def _after_overflow(self) -> Self:
        k = self._exponent()
        return self._at(k - _FALL).replace(headroom=0, _overflowed=k, _has_overflowed=True)

    def _after_zeros(self) -> Self:
        k, largest = self._exponent(), jnp.maximum(self._largest, self._largest_before)
        target = jnp.where(largest > -_NEVER, self._target(largest), _ENOUGH)
        return self._at(k + _part(jnp.maximum(target - k, 0)))

    def _after_measuring(self, gradient: jax.Array) -> Self:
        _, exponent = jnp.frexp(gradient)
        size = exponent + self._exponent()
        steps = self._finite_steps + 1
        window_ends = steps % self.window == 0
        in_window = jnp.maximum(self._largest, exponent)
        largest = jnp.maximum(in_window, self._largest_before)
        learned = self._learned(size, largest + self._overflowed)
        new = choose(steps % self.probe_interval == 0, learned._bolder(), learned)
        new = new.replace(
            headroom=_OVERFLOW - size,
            _largest=jnp.where(window_ends, -_NEVER, in_window),
            _largest_before=jnp.where(window_ends, in_window, self._largest_before),
            _finite_steps=steps,
            _has_overflowed=False,
        )
        # All of the way down, or up to what has survived; beyond that three quarters of the way.
        target = new._target(largest)
        start = jnp.minimum(jnp.maximum(self._exponent(), new._survived - largest), target)
        return new._at(start + _part(target - start))

    def _learned(self, size: jax.Array, overflow: jax.Array) -> Self:
        """What there is to learn from a finite step of a size after an overflow of another."""
        unexplained = self._has_overflowed & (overflow <= _OVERFLOW)
        had_survived = unexplained & (overflow <= self._survived)
        fails_first = unexplained & ~had_survived & (overflow < self._failed)
        fails_again = unexplained & ~had_survived & ~fails_first
        survived = jnp.where(fails_again, size, jnp.maximum(self._survived - had_survived, size))
        failed = jnp.where(fails_first, overflow, self._failed)
        return self.replace(
            _caution=jnp.minimum(self._caution + had_survived, _MOST_CAUTION),
            _ceiling=jnp.where(fails_again, self._failed - 1, self._ceiling),
            _survived=survived,
            _failed=jnp.where(size >= failed, _NEVER, failed),
        )

    def _bolder(self) -> Self:
        cautious = self._caution > 0
        return self.replace(
            _caution=self._caution - cautious,
            _ceiling=jnp.minimum(self._ceiling + ~cautious, _OVERFLOW),
        )

    def _target(self, largest: jax.Array) -> jax.Array:
        return self._ceiling - self.margin - self._caution - largest

    def _exponent(self) -> jax.Array:
        return jnp.frexp(self())[1] - 1

    def _at(self, exponent: jax.Array) -> Self:
        # Not exp2, which is inexact on CPU.
        one = jnp.float32(1)
        return self.replace(loss_scale=jnp.ldexp(one, jnp.clip(exponent, -_BOUND, _BOUND)))


def _part(distance: jax.Array) -> jax.Array:
    """Three quarters, rounded up, so that it arrives."""
    return (3 * distance + 3) // 4
