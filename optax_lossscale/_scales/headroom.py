"""The loss scale that keeps the largest gradient a little below overflow."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._scales import validation
from optax_lossscale._scales.loss_scale import AxisName, LossScale, choose, largest_of_all
from optax_lossscale._scales.stateful import state_field

# Exponents of two, or differences of them: bits.
_OVERFLOW = 16  # float16's numbers are below 2**16
_DEEP = 32  # of float16's 40: deeper, what used to fit is lost, and a smaller scale is no help
_BOUND = 100  # of the scale, either way
_NEVER = -1000  # below all exponents there are

# Steps.
_LONG = 2000  # what TensorFlow and PyTorch wait before a scale grows
_EXCUSED = 64  # many, against the six overflows after which the batch is found to be at fault

# What the window may grow to, in multiples of the shortest.
_MEMORY = 8  # of gradients; a rare outlier should not lower the scale for long
_PATIENCE = 128  # for a reserve without which steps overflow


class HeadroomLossScale(LossScale):
    """Measures the largest gradient, and keeps it a little below overflow.

    It does not grow until a step breaks: the check reads all gradients anyway, and the
    largest of them says where the scale should be. What cannot be measured is an overflow. It
    means either "at least this large" or that the batch is broken, and only later steps can tell.
    So the scale falls by more bits each time, and these are held in reserve until a gradient
    explains the overflow, or it is clear that no scale would have prevented it. The rule, where
    `k` is the exponent of the scale, and the size of a step that of its largest gradient::

        if grads_overflow and excused > 0:
            excused -= 1
        elif grads_overflow:
            if quiet > 0:                            # not the same one, still
                at_once = quiet % patience == 0      # when half of the reserve was given up
                longest = (128 if at_once else 8) * shortest_window
                window = max(window, min(2 * window, longest))
            reserve += min(reserve + 1, 32)
            quiet = 0
        else:
            quiet += 1
            if size + k + reserve > 16:              # it was the size
                reserve = 0
            elif reserve >= 32:                      # it was the batch
                reserve, excused = 0, 64
            elif quiet % patience == 0:
                reserve //= 2
            if quiet % 2000 == 0:
                window = max(window // 2, shortest_window)
            largest = max(sizes of the last one to two windows)
        k = 16 - margin - largest - reserve

    The `patience` is a quarter of a window. The very first window is a step long, and each doubles
    up to the shortest in use; however long they are, what is remembered are gradients of at most
    twice eight of the shortest. All-zero gradients measure nothing, and end a reserve of 32 bits
    like others. After 2000 of them in a row, in case they underflowed, half of the reserve is
    given up and the scale doubles. It stays between 2**-100 and 2**100.

    It cannot follow gradients of two sizes more than 2**31 apart, one of which takes turns with
    the other or with zeros: there it holds the larger for broken.

    What follows from the rule, and is tested:

    - Without NaNs, and with gradients below 2**115, it skips at most 75 steps in a row: 64 that
      are excused, and 11 in which the scale falls all of the way from 2**100 to 2**-100.
    - After any history, and with a margin of 1, 4608 steps whose largest gradients are alike bring
      the scale within a factor of 4 of the best, unless it flushed all of them to zero.

    The source of the idea to follow the largest gradient is OpenSeq2Seq's `LogMaxLossScale`; the
    rule is this library's own. docs/policies.md compares it with the others, on sequences that
    were made to fool it as well.

    Args:
      initial_scale: the loss scale before the first step, from 2**-100 to 2**100, rounded down
        to a power of two. It matters for a few steps only.
      margin: how many bits to leave between the largest gradient and overflow, from 0 to 24.
        More make fewer steps overflow and more gradients underflow.
      window: the shortest window; how many measured steps a largest gradient is remembered for at
        least, and twice as many at most, while nothing overflows. From 4 to 2**20.

    Attributes:
      loss_scale: the loss scale now, a power of two; float32, shape ().
      spare_bits: the bits between the largest gradient of the last step that was measured and
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
      >>> float(ls() * 2.0**-9), int(ls.spare_bits)  # below 2**16 by the margin of one bit
      (16384.0, 1)
    """

    margin: int = 1
    window: int = 64
    spare_bits: jax.Array = state_field(0)  # shape=(), dtype=int32, as all that follow
    _largest: jax.Array = state_field(_NEVER)  # unscaled, in this window
    _largest_before: jax.Array = state_field(_NEVER)  # in the window before
    _window: jax.Array = state_field(1)  # how long one is
    _quiet: jax.Array = state_field(0)  # measured steps since an overflow that was not excused
    _zeros: jax.Array = state_field(0)  # steps in a row that measured nothing
    _reserve: jax.Array = state_field(0)  # bits, held for overflows without an explanation
    _excused: jax.Array = state_field(0)  # overflows to come that need none
    _exhausted: jax.Array = state_field(False)  # dtype=bool

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
            margin=validation.count("margin", self.margin, least=0, most=24),
            window=validation.count("window", self.window, least=4, most=2**20),
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

        The scale falls at an overflow as it does in `update`, but nothing explains one
        afterwards: what it fell, it doubles again only after each 2000 finite steps in a row.
        """
        kept = self.replace(_reserve=0)._remembered(self._reserve)
        return choose(grads_finite, kept._after_zeros(), self._after_overflow())

    def exhausted(self) -> jax.Array:
        """Whether the last step overflowed at a scale of 2**-100, the lowest."""
        return jnp.asarray(self._exhausted)

    def _after_overflow(self) -> Self:
        excused = self.replace(_excused=self._excused - 1)
        new = choose(self._excused > 0, excused, self._fallen())
        return new.replace(spare_bits=0, _zeros=0, _exhausted=self._exponent() <= -_BOUND)

    def _fallen(self) -> Self:
        at_once = self._quiet % self._patience() == 0
        longest = jnp.where(at_once, _PATIENCE, _MEMORY) * self.window
        doubled = jnp.maximum(self._window, jnp.minimum(2 * self._window, longest))
        fall = jnp.minimum(self._reserve + 1, _DEEP)
        fall = jnp.minimum(fall, self._exponent() + _BOUND)
        new = self.replace(
            _window=jnp.where(self._quiet > 0, doubled, self._window),
            _reserve=self._reserve + fall,
            _quiet=0,
        )
        return new._at(self._exponent() - fall)

    def _after_measuring(self, gradient: jax.Array) -> Self:
        _, size = jnp.frexp(gradient)
        k, quiet = self._exponent(), self._quiet + 1
        explained = size + k + self._reserve > _OVERFLOW
        new = self._with_less_reserve(explained, quiet % self._patience() == 0)
        new = new._remembering(size, quiet).replace(
            spare_bits=_OVERFLOW - size - k, _quiet=quiet, _zeros=0, _exhausted=False
        )
        largest = jnp.maximum(new._largest, new._largest_before)
        return new._at(_OVERFLOW - self.margin - largest - new._reserve)

    def _after_zeros(self) -> Self:
        zeros = self._zeros + 1
        long = zeros % _LONG == 0
        new = self._with_less_reserve(jnp.array(False), long)
        new = new._at(self._exponent() + self._reserve - new._reserve)
        new = new.replace(_zeros=zeros, _exhausted=False)
        doubled = new._at(new._exponent() + 1)._remembered(-1)
        return choose(long, doubled, new)

    def _with_less_reserve(self, explained: jax.Array, in_time: jax.Array) -> Self:
        deep = self._reserve >= _DEEP
        left = jnp.where(in_time, self._reserve // 2, self._reserve)
        return self.replace(
            _reserve=jnp.where(explained | deep, 0, left),
            _excused=jnp.where(deep & ~explained, _EXCUSED, self._excused),
        )

    def _remembering(self, size: jax.Array, quiet: jax.Array) -> Self:
        window, shortest = self._window, self.window
        largest = jnp.maximum(self._largest, size)
        ends = quiet % jnp.minimum(window, _MEMORY * shortest) == 0
        longer = jnp.where(ends, jnp.minimum(2 * window, shortest), window)
        shorter = jnp.where(quiet % _LONG == 0, jnp.maximum(window // 2, shortest), window)
        return self.replace(
            _largest=jnp.where(ends, _NEVER, largest),
            _largest_before=jnp.where(ends, largest, self._largest_before),
            _window=jnp.where(window < shortest, longer, shorter),
        )

    def _patience(self) -> jax.Array:
        return jnp.maximum(self._window, self.window) // 4

    def _exponent(self) -> jax.Array:
        return jnp.frexp(self())[1] - 1

    def _remembered(self, more: jax.typing.ArrayLike) -> Self:
        """With what is remembered so many bits larger."""
        return self.replace(
            _largest=self._largest + more, _largest_before=self._largest_before + more
        )

    def _at(self, exponent: jax.Array) -> Self:
        # Not exp2, which is inexact on CPU.
        one = jnp.float32(1)
        return self.replace(loss_scale=jnp.ldexp(one, jnp.clip(exponent, -_BOUND, _BOUND)))
