"""The rule of a rolling window: the mean and deviation of the last losses and norms.

OLMo-core, MaxText and Levanter share this rule. Levanter computes the deviation
differently, and waits for one step more before it skips any.
"""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.stateful import checked, state_field
from optax_lossscale._skips.rule import SkipRule, with_newest


class RollingSkipRule(SkipRule):
    """The rule of `skips.olmo_core`, `skips.maxtext` and `skips.levanter`.

    Skips a step whose norm or loss is more than `sigma_factor` deviations above the
    mean of those in the window, which holds the last `length` steps, skipped ones
    included.

    Args:
      length: the size of the window, in steps.
      sigma_factor: how many deviations are too many.
      least_history: how many steps the window must hold before one is skipped.
      ddof: 1 for the unbiased deviation, 0 for the biased one.
      least_deviation: a lower bound of the deviation.

    Attributes:
      seen: how many places of the window are filled; int32, shape (); state.
    """

    needs_value = True
    length: int = checked(validation.int_between, least=2, most=2**20)
    sigma_factor: float = checked(validation.positive)
    least_history: int = checked(validation.count)
    ddof: int = checked(validation.int_between, least=0, most=1, default=1)
    least_deviation: float = checked(validation.finite, default=0.0)
    seen: jax.Array = state_field(0)
    # The norms in one row, and the losses in the other; shape=(2, length), float32
    _window: jax.Array = state_field()

    def __post_init__(self):
        super().__post_init__()
        empty = np.zeros((2, self.length), np.float32)
        self._set(_window=empty)

    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        assert value is not None  # for type checkers: `update` has checked it
        numbers = jnp.stack([norm, value])
        is_early = self.seen < self.least_history
        is_usual = jnp.all(self._are_usual(numbers))
        new = self.replace(
            seen=jnp.minimum(self.seen + 1, self.length),
            _window=with_newest(self._window, numbers),
        )
        return new, is_usual | is_early

    def _are_usual(self, numbers: jax.Array) -> jax.Array:
        """Whether the norm and the loss are usual; bools, shape (2,).

        A number is usual if it is at most `sigma_factor` deviations above the mean of
        its row of the window. Places that are not filled yet hold zeros.
        """
        seen = self.seen.astype(jnp.float32)
        total = jnp.sum(self._window, axis=1)
        mean = total / jnp.maximum(seen, 1)

        is_filled = jnp.arange(self.length) < self.seen
        differences = self._window - mean[:, None]
        differences = jnp.where(is_filled, differences, 0)
        squares = jnp.sum(jnp.square(differences), axis=1)
        degrees_of_freedom = jnp.maximum(seen - self.ddof, 1)
        deviation = jnp.sqrt(squares / degrees_of_freedom)
        deviation = jnp.maximum(deviation, self.least_deviation)
        return numbers - mean <= self.sigma_factor * deviation
