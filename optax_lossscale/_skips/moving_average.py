"""The rule of moving averages: mean and deviation of the norms of the steps applied."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._scales import validation
from optax_lossscale._scales.stateful import checked, state_field
from optax_lossscale._skips.rule import SkipRule

_DECAY = validation.number("in (0, 1), such as 0.99", lambda x: 0 < x < 1)


@dataclasses.dataclass(frozen=True)
class DropNorm:
    """From which norm on a step is skipped, by the moving average of norms."""

    mean_factor: float  # how many times the mean
    stddev_factor: float  # and how many deviations more
    min_count: int  # how many steps it takes; before, it is a norm of 1e10

    def __call__(self, count: jax.Array, mean: jax.Array, stddev: jax.Array) -> jax.Array:
        """The norm, float32, shape ()."""
        threshold = mean * self.mean_factor
        if self.stddev_factor:
            threshold = threshold + stddev * self.stddev_factor
        return jnp.where(count < self.min_count, 1e10, threshold)


class MovingAverageSkipRule(SkipRule):
    """Skips a step whose norm is far above the moving average of the norms that were applied.

    Source: AxLearn's `skip_and_clip_by_global_norm`. The rule, with averages that begin at 1::

        if norm >= drop_norm(count, mean, sqrt(mean_square - mean ** 2)):
            skip
        else:
            decay = grad_norm_ema_decay * (1 - grad_norm_ema_decay ** count)
                    / (1 - grad_norm_ema_decay ** (count + 1))
            mean = decay * mean + (1 - decay) * norm
            mean_square = decay * mean_square + (1 - decay) * norm ** 2
            count += 1

    It learns nothing from what it skips: norms that stay above the threshold are skipped for ever.
    """

    drop_norm: DropNorm  # the threshold
    grad_norm_ema_decay: float = checked(_DECAY)  # of the averages
    count: jax.Array = state_field(0)  # steps applied; shape=(), dtype=int32
    mean: jax.Array = state_field(1.0)  # of their norms; shape=(), dtype=float32
    mean_square: jax.Array = state_field(1.0)  # of the norms' squares; shape=(), dtype=float32

    def decide(self, norm: jax.Array, value: jax.Array | None) -> tuple[Self, jax.Array]:
        """Compares with the averages, which an applied step moves; see the class."""
        variance = jnp.maximum(self.mean_square - jnp.square(self.mean), 0)
        usual = norm < self.drop_norm(self.count, self.mean, jnp.sqrt(variance))
        weight = lambda count: 1 - self.grad_norm_ema_decay ** count.astype(jnp.float32)
        decay = self.grad_norm_ema_decay * (weight(self.count) / weight(self.count + 1))
        average = lambda old, new: jnp.where(usual, decay * old + (1 - decay) * new, old)
        square = jnp.minimum(jnp.square(norm), validation.LARGEST)
        new = self.replace(
            count=jnp.where(usual, optax.safe_increment(self.count), self.count),
            mean=average(self.mean, norm),
            mean_square=average(self.mean_square, square),
        )
        return new, usual
