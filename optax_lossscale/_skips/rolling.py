"""The rule of a rolling window: mean and deviation of the last losses and norms.

The window is a ring: the newest number takes the place of the oldest, and `seen` says
how many of the places hold one. OLMo-core, MaxText and Levanter share it, and differ in
the deviation.
"""

from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.stateful import checked, state_field
from optax_lossscale._skips.rule import SkipRule

_LENGTH = partial(validation.count, least=2, most=2**20)
_NOT_NEGATIVE = partial(validation.count, least=0)
_ZERO_OR_ONE = partial(validation.count, least=0, most=1)


class RollingSkipRule(SkipRule):
    """The rule of `skips.olmo_core`, `skips.maxtext` and `skips.levanter`."""

    needs_value = True
    length: int = checked(_LENGTH)
    sigma_factor: float = checked(validation.positive)
    least_history: int = checked(_NOT_NEGATIVE)  # without a skip
    ddof: int = checked(_ZERO_OR_ONE, default=1)  # 1 for unbiased
    least_deviation: float = checked(validation.finite, default=0.0)
    # How many steps the window holds; shape=(), dtype=int32
    seen: jax.Array = state_field(0)
    _next: jax.Array = state_field(0)  # the place of the oldest; shape=(), dtype=int32
    _losses: jax.Array = state_field()  # shape=(length,), dtype=float32
    _norms: jax.Array = state_field()  # shape=(length,), dtype=float32

    def __post_init__(self):
        super().__post_init__()
        empty = np.zeros(self.length, np.float32)
        self._set(_losses=empty, _norms=empty)

    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        assert value is not None  # as this rule needs it
        loss_is_usual = self._is_usual(value, self._losses)
        norm_is_usual = self._is_usual(norm, self._norms)
        is_early = self.seen < self.least_history
        is_oldest = jnp.arange(self.length) == self._next
        new = self.replace(
            seen=jnp.minimum(self.seen + 1, self.length),
            _next=(self._next + 1) % self.length,
            _losses=jnp.where(is_oldest, value, self._losses),
            _norms=jnp.where(is_oldest, norm, self._norms),
        )
        are_usual = loss_is_usual & norm_is_usual
        return new, are_usual | is_early

    def _is_usual(self, x: jax.Array, window: jax.Array) -> jax.Array:
        """Whether a number is at most `sigma_factor` deviations above the window's mean."""
        is_filled = jnp.arange(self.length) < self.seen
        count = jnp.maximum(self.seen, 1)
        degrees = jnp.maximum(self.seen - self.ddof, 1)  # of freedom
        numbers = jnp.where(is_filled, window, 0)
        mean = jnp.sum(numbers) / count.astype(jnp.float32)
        squares = jnp.where(is_filled, jnp.square(window - mean), 0)
        variance = jnp.sum(squares) / degrees.astype(jnp.float32)
        deviation = jnp.maximum(jnp.sqrt(variance), self.least_deviation)
        return x - mean <= self.sigma_factor * deviation
