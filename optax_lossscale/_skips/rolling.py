"""The rule of a rolling window: mean and deviation of the last losses and norms."""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._scales.stateful import state_field
from optax_lossscale._skips.rule import SkipRule


class RollingSkipRule(SkipRule):
    """The rule of `skips.olmo_core`, `skips.maxtext` and `skips.levanter`."""

    needs_value = True
    length: int
    sigma_factor: float
    least_history: int  # how many steps it takes before one is skipped
    ddof: int = 1  # of the deviation: 1 for the unbiased one, or 0
    least_deviation: float = 0.0
    seen: jax.Array = state_field(0)  # how many steps the window holds; shape=(), dtype=int32
    _next: jax.Array = state_field(0)  # the place of the oldest; shape=(), dtype=int32
    _losses: jax.Array = state_field()  # shape=(length,), dtype=float32
    _norms: jax.Array = state_field()  # shape=(length,), dtype=float32

    def __post_init__(self):
        empty = lambda: np.zeros(self.length, np.float32)
        self._set(_losses=empty(), _norms=empty())

    def decide(self, norm: jax.Array, value: jax.Array | None) -> tuple[Self, jax.Array]:
        assert value is not None  # as this rule needs it
        usual = self._is_usual(value, self._losses) & self._is_usual(norm, self._norms)
        here = jnp.arange(self.length) == self._next
        new = self.replace(
            seen=jnp.minimum(self.seen + 1, self.length),
            _next=(self._next + 1) % self.length,
            _losses=jnp.where(here, value, self._losses),
            _norms=jnp.where(here, norm, self._norms),
        )
        return new, usual | (self.seen < self.least_history)

    def _is_usual(self, x: jax.Array, window: jax.Array) -> jax.Array:
        held = jnp.arange(self.length) < self.seen
        count = lambda n: jnp.maximum(n, 1).astype(jnp.float32)
        mean = jnp.sum(jnp.where(held, window, 0)) / count(self.seen)
        squares = jnp.where(held, jnp.square(window - mean), 0)
        variance = jnp.sum(squares) / count(self.seen - self.ddof)
        deviation = jnp.maximum(jnp.sqrt(variance), self.least_deviation)
        return x - mean <= self.sigma_factor * deviation
