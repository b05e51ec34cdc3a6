"""The recommended rule: norms far above the usual one, by order statistics of their logarithms."""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._scales import validation
from optax_lossscale._scales.stateful import state
from optax_lossscale._skips.rule import SkipRule

_DEVIATION = 1.4826  # of a normal distribution, in distances from its median to a quartile
_FEWEST = 8  # steps without which nothing is known
_EARLY = 16.0  # steps at which twice as much is allowed as in the end


class SpikeSkipRule(SkipRule):
    """Skips a step whose norm is far above the usual one, and never many in a row.

    The usual norm is the median of those last applied, on a logarithmic scale, and their spread
    the distance from there to the upper quartile. So a spike that was applied hardly moves them,
    and one that was skipped not at all. The rule::

        logs = log2 of the last `window` norms applied, that were not 0
        spread = 1.4826 * (upper_quartile(logs) - median(logs))
        allowed = (1 + 16 / len(logs)) * max(factor * spread, least)
        if len(logs) < 8 or log2(norm) <= median(logs) + allowed:
            apply
        elif skipped_in_a_row < max_skips:
            skip
        else:
            logs = []       # this is the level now
            apply

    What follows from it, and is tested:

    - It never skips more than `max_skips` finite steps in a row, whatever the norms are.
    - A norm of up to 2**least times the median is never skipped, so none is while norms rise by
      less than that within a window.
    - The scale of the norms is of no account.

    A minority of batches whose norms are regularly far above the others' keeps being skipped: see
    `skipped_by_rule`, and allow for them by `least`.

    The rule is this library's own. docs/skipping.md compares it with the others.

    Args:
      factor: how many deviations are too many, positive.
      least: from how many bits above the median on a norm is skipped at all, positive: of 1, from
        twice the median.
      window: how many norms are remembered, from 16 to 2**20.
      max_skips: how many finite steps in a row to skip at most.

    Attributes:
      norm_limit: the norm up to which the last finite step was to be applied, infinite while too
        little is known; float32, shape ().
      skipped_in_a_row: finite steps skipped since the last that was applied; int32, shape ().

    Raises:
      ValueError: for an argument outside what is said above.
    """

    factor: float = 6.0
    least: float = 1.0
    window: int = 64
    max_skips: int = 16
    norm_limit: jax.Array = state(float("inf"))  # shape=(), dtype=float32
    skipped_in_a_row: jax.Array = state(0)  # shape=(), dtype=int32
    _seen: jax.Array = state(0)  # how many are remembered; shape=(), dtype=int32
    _next: jax.Array = state(0)  # the place of the oldest; shape=(), dtype=int32
    _logs: jax.Array = state()  # shape=(window,), dtype=float32

    def __post_init__(self):
        window = validation.count("window", self.window, least=16, most=2**20)
        positive = lambda x: 0 < x <= 1e6
        self._set(
            factor=validation.bounded("factor", self.factor, "from 0 to 1e6", positive),
            least=validation.bounded("least", self.least, "from 0 to 1e6", positive),
            window=window,
            max_skips=validation.count("max_skips", self.max_skips, least=0),
            _logs=np.zeros(window, np.float32),
        )

    def decide(self, norm: jax.Array, value: jax.Array | None) -> tuple[Self, jax.Array]:
        """Compares with the norms applied before; see the class. The loss is not looked at."""
        log = jnp.log2(jnp.maximum(norm, validation.SMALLEST))
        limit = self._limit()
        usual = log <= limit
        new_level = ~usual & (self.skipped_in_a_row >= self.max_skips)
        should_apply = usual | new_level
        remembered = should_apply & (norm > 0)
        forgetful = self.replace(
            _seen=jnp.where(new_level, 0, self._seen), _next=jnp.where(new_level, 0, self._next)
        )
        new = forgetful._with(log, remembered).replace(
            norm_limit=jnp.exp2(limit),
            skipped_in_a_row=jnp.where(should_apply, 0, self.skipped_in_a_row + 1),
        )
        return new, should_apply

    def _limit(self) -> jax.Array:
        """The largest logarithm of a norm that is usual."""
        held = jnp.arange(self.window) < self._seen
        logs = jnp.sort(jnp.where(held, self._logs, jnp.inf))
        count = jnp.maximum(self._seen, _FEWEST)
        median, quartile = logs[count // 2], logs[3 * count // 4]
        spread = _DEVIATION * (quartile - median)
        allowed = (1 + _EARLY / count) * jnp.maximum(self.factor * spread, self.least)
        return jnp.where(self._seen < _FEWEST, jnp.inf, median + allowed)

    def _with(self, log: jax.Array, remembered: jax.Array) -> Self:
        """With one more logarithm in the place of the oldest, if it is to be remembered."""
        here = remembered & (jnp.arange(self.window) == self._next)
        return self.replace(
            _logs=jnp.where(here, log, self._logs),
            _seen=jnp.minimum(self._seen + remembered, self.window),
            _next=(self._next + remembered) % self.window,
        )
