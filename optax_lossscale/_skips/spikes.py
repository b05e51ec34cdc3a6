"""The recommended rule, which skips steps far above the usual norm or loss.

Order statistics of the last applied steps say what is usual: the median, the upper
quartile, and a value that several steps reached. A single spike hardly moves them,
while it would move a mean and a standard deviation. They are computed of logarithms, so
the scale of norms and losses does not matter.
"""

from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.stateful import checked, state_field
from optax_lossscale._skips.rule import APPLIED_PER_SKIP, SkipRule, with_newest

# The standard deviation of a normal distribution is this many times the distance from
# its median to a quartile.
_DEVIATION = 1.4826
_MIN_HISTORY = 8  # with fewer steps in the window, nothing is a spike
_ENOUGH_HISTORY = 24.0  # with fewer steps in the window, proportionally more is allowed
# A value that at least 3 steps of the window reached, or 1 in 20 if that is more, is
# usual.
_COMMON = 3
_COMMON_SHARE = 20
# This marks an empty place of the window. It is above all logarithms, and sorts last.
_UNKNOWN = 1e3

_positive = partial(
    validation.number_between,
    least=validation.ABOVE_ZERO,
    most=1e6,
    allowed="above 0 and at most 1e6",
)


class SpikeSkipRule(SkipRule):
    """The rule of `skips.spikes`, which describes it and its arguments.

    Attributes:
      norm_limit: the norm above which the last step would have been a spike; infinite
        while fewer than 8 steps are known; float32, shape (); state.
      value_limit: the same for the loss; float32, shape (); state.
    """

    factor: float = checked(_positive, default=6.0)
    least: float = checked(_positive, default=1.0)
    window: int = checked(validation.int_between, least=16, most=2**20, default=64)
    max_skips: int = checked(validation.int_between, least=0, most=2**20, default=16)
    norm_limit: jax.Array = state_field(float("inf"))
    value_limit: jax.Array = state_field(float("inf"))
    # Logarithms of norms and of losses, the newest first; shape=(2, window), float32
    _last: jax.Array = state_field()

    def __post_init__(self):
        super().__post_init__()
        empty = np.full((2, self.window), _UNKNOWN, np.float32)
        self._set(_last=empty)

    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        if value is None:
            value = jnp.float32(0)
        numbers = jnp.stack([norm, value])
        is_positive = numbers > 0
        logarithms = jnp.log2(jnp.maximum(numbers, validation.SMALLEST))
        limits = self._limits()
        is_above = logarithms > limits
        is_spike = jnp.any(is_above & is_positive)

        # The debt is 20 * (max_skips - budget), with the budget of `skips.spikes`. If
        # that is used up, the spikes are too common to be accidents.
        max_debt = APPLIED_PER_SKIP * self.max_skips
        debt_if_skipped = self.skip_debt + APPLIED_PER_SKIP
        is_common = is_spike & (debt_if_skipped > max_debt)
        should_apply = ~is_spike | is_common

        is_learned = is_positive & should_apply
        with_one_more = with_newest(self._last, logarithms)
        norm_limit, value_limit = jnp.exp2(limits)
        new = self.replace(
            _last=jnp.where(is_learned[:, None], with_one_more, self._last),
            norm_limit=norm_limit,
            value_limit=value_limit,
            skip_debt=jnp.where(is_common, max_debt, self.skip_debt),
        )
        return new, should_apply

    def _limits(self) -> jax.Array:
        """The log2 of the largest usual norm and of the largest usual loss; shape (2,).

        Infinity where fewer than 8 of them are known.
        """
        seen = jnp.sum(self._last < _UNKNOWN, axis=1)
        count = jnp.maximum(seen, _MIN_HISTORY)
        how_many_reached = jnp.maximum(_COMMON, count // _COMMON_SHARE)
        ranks = [count // 2, 3 * count // 4, count - how_many_reached]
        places = jnp.stack(ranks, axis=1)
        ranked = jnp.take_along_axis(jnp.sort(self._last), places, axis=1)
        median, quartile, common = ranked.T
        deviation = _DEVIATION * (quartile - median)
        shortage = jnp.maximum(1, _ENOUGH_HISTORY / count.astype(jnp.float32))
        floor = self.least * shortage
        allowed = jnp.maximum(self.factor * deviation, floor)
        limits = jnp.maximum(median + allowed, common + allowed / 2)
        return jnp.where(seen < _MIN_HISTORY, jnp.inf, limits)
