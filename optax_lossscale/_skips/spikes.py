"""The recommended rule: norms and losses far above the usual ones, by order statistics."""

from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._scales import validation
from optax_lossscale._scales.stateful import checked, state_field
from optax_lossscale._skips.rule import APPLIED_PER_SKIP, SkipRule

_DEVIATION = 1.4826  # of a normal distribution, in distances from its median to a quartile
_FEWEST = 8  # steps without which nothing is known
_ENOUGH = 24.0  # before them, proportionally more is allowed
_COMMON = 3  # as many steps as this are no accident
_ABOVE_ALL = 1e3  # in the place of a logarithm that is not known

_POSITIVE = validation.number("above 0 and at most 1e6", lambda x: 0 < x <= 1e6)


class SpikeSkipRule(SkipRule):
    """Skips a step whose norm or loss is far above the usual one, and never many steps.

    The usual norm is the median of those last applied, on a logarithmic scale, and their spread
    the distance from there to the upper quartile. So a spike that was applied hardly moves them,
    and one that was skipped not at all. What 1 in 20 of them reached is usual as well. Of the
    losses likewise, if the step is given them, where they are positive. The rule::

        for x, xs in [
            (log2(norm), log2 of the last `window` norms applied that were not 0),
            (log2(loss), log2 of the last `window` losses applied that were positive),
        ]:
            spread = 1.4826 * (upper_quartile(xs) - median(xs))
            allowed = max(factor * spread, least * max(1, 24 / len(xs)))
            common = the max(3, len(xs) // 20)th largest of xs
            limit = max(median(xs) + allowed, common + allowed / 2)
            is_spike = len(xs) >= 8 and x > limit
        if either is a spike and budget >= 1:   # which begins as max_skips
            skip
            budget -= 1
        else:
            if either is a spike:
                budget = 0                      # they are too common to be spikes
            apply
            if norm > 0:
                budget = min(budget + 1 / 20, max_skips)

    In any series, at most `max_skips` finite steps are skipped, and then no more than 1 in 20, of
    which steps whose gradients are all zero do not count. So where the level changes for good, at
    most `max_skips` steps are skipped; old batches may come in between, and both levels are usual
    for as long as a window holds three of either. A norm or a loss of up to 2**least times the
    median is no spike, so none is while they rise by less than that within a window. The scale of
    the norms is of no account, nor is that of the losses.

    The rule is this library's own. docs/skipping.md says what it does not do, and
    docs/benchmarks/skips.md compares it with the others.
    """

    factor: float = checked(_POSITIVE, default=6.0)
    least: float = checked(_POSITIVE, default=1.0)
    window: int = checked(partial(validation.count, least=16, most=2**20), default=64)
    max_skips: int = checked(partial(validation.count, least=0, most=2**20), default=16)
    # The norm and the loss up to which the last step was to be applied, infinite while too little
    # is known; shape=(), dtype=float32.
    norm_limit: jax.Array = state_field(float("inf"))
    value_limit: jax.Array = state_field(float("inf"))
    # Of the logarithms of norms and of losses.
    _seen: jax.Array = state_field(np.zeros(2, np.int32))  # how many are remembered; shape=(2,)
    _next: jax.Array = state_field(np.zeros(2, np.int32))  # the place of the oldest; shape=(2,)
    _last: jax.Array = state_field()  # shape=(2, window), dtype=float32

    def __post_init__(self):
        super().__post_init__()
        self._set(_last=np.zeros((2, self.window), np.float32))

    def decide(self, norm: jax.Array, value: jax.Array | None) -> tuple[Self, jax.Array]:
        """Compares with the steps applied before; see the class."""
        sizes = jnp.stack([norm, jnp.float32(0) if value is None else value])
        given = sizes > 0
        measured = jnp.log2(jnp.maximum(sizes, validation.SMALLEST))
        limits = self._limits()
        is_spike = jnp.any((measured > limits) & given)
        most = APPLIED_PER_SKIP * self.max_skips
        is_common = is_spike & (self.skip_debt + APPLIED_PER_SKIP > most)
        should_apply = ~is_spike | is_common
        new = self._with(measured, given & should_apply).replace(
            norm_limit=jnp.exp2(limits[0]),
            value_limit=jnp.exp2(limits[1]),
            skip_debt=jnp.where(is_common, most, self.skip_debt),
        )
        return new, should_apply

    def _limits(self) -> jax.Array:
        """The largest logarithms of a norm and of a loss that are usual; shape (2,)."""
        held = jnp.arange(self.window)[None] < self._seen[:, None]
        ordered = jnp.sort(jnp.where(held, self._last, _ABOVE_ALL))
        count = jnp.maximum(self._seen, _FEWEST)
        at = lambda rank: jnp.take_along_axis(ordered, rank[:, None], 1)[:, 0]
        median, quartile = at(count // 2), at(3 * count // 4)
        common = at(count - jnp.maximum(_COMMON, count // APPLIED_PER_SKIP))
        floor = self.least * jnp.maximum(1, _ENOUGH / count.astype(jnp.float32))
        allowed = jnp.maximum(self.factor * _DEVIATION * (quartile - median), floor)
        limits = jnp.maximum(median + allowed, common + allowed / 2)
        return jnp.where(self._seen < _FEWEST, jnp.inf, limits)

    def _with(self, measured: jax.Array, remembered: jax.Array) -> Self:
        """With one more of each in the place of the oldest, if it is to be remembered."""
        one_more = remembered.astype(jnp.int32)
        here = remembered[:, None] & (jnp.arange(self.window)[None] == self._next[:, None])
        return self.replace(
            _last=jnp.where(here, measured[:, None], self._last),
            _seen=jnp.minimum(self._seen + one_more, self.window),
            _next=(self._next + one_more) % self.window,
        )
