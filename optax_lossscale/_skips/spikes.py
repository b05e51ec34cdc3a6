"""The recommended rule, which skips steps far above the usual norm or loss.

A *spike* is a norm or a loss above a limit, which is computed from the last applied
steps: from their median, their upper quartile, and the largest value that several of
them reached. A single spike hardly moves these, whereas it would move a mean and a
standard deviation. The limit is computed on log2 of norms and losses, so multiplying
all norms, or all losses, by a constant changes nothing.

For example, after 24 steps with norms close to 1, a norm is a spike if it is more than
1 bit above their median, that is, above 2. If the norms vary more, the limit is higher.

The whole rule, with the arguments of `skips.spikes` and the `skip_debt` of `SkipRule`,
which begins at 0::

    for x, xs in [
        (log2(norm), log2 of the last `window` norms applied that were not 0),
        (log2(loss), log2 of the last `window` losses applied that were positive),
    ]:
        spread = 1.4826 * (upper_quartile(xs) - median(xs))
        allowed = max(factor * spread, least * max(1, 24 / len(xs)))
        common = the max(3, len(xs) // 20)th largest of xs
        limit = max(median(xs) + allowed, common + allowed / 2)
        is_spike = len(xs) >= 8 and x > limit
    if either is a spike and skip_debt + 20 <= 20 * max_skips:
        skip
        skip_debt += 20
    else:
        if either is a spike:
            skip_debt = 20 * max_skips      # they are too common to be spikes
        apply
        if norm > 0:
            skip_debt = max(skip_debt - 1, 0)

The constants were chosen by trial, in part on the runs that docs/skipping.md tells of,
unless a comment below derives them.
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
# its median to a quartile, which is 0.6745 standard deviations: 1 / 0.6745 = 1.4826.
_DEVIATION = 1.4826
# With fewer steps in the window, nothing is a spike.
_MIN_HISTORY = 8
# With fewer steps in the window, `least` is multiplied by this number / steps.
_ENOUGH_HISTORY = 24.0
# A value is common if at least _MIN_COMMON steps of the window reached it, or 1 in
# _COMMON_SHARE of them if that is more.
_MIN_COMMON = 3
_COMMON_SHARE = 20
# Marks an empty place of the window. It exceeds log2 of any float32, so it sorts last.
_UNKNOWN = 1e3

_positive = partial(
    validation.number_between,
    least=validation.SMALLEST_NORMAL,
    most=1e6,
    allowed="a number in (0, 1e6], normal in float32",
)


class SpikeSkipRule(SkipRule):
    """The rule of `skips.spikes`, which documents the arguments.

    Attributes:
      norm_limit: the norm above which the last step would have been a spike, or
        infinity while fewer than 8 norms are known; float32, shape ().
      value_limit: the loss above which the last step would have been a spike, or
        infinity while fewer than 8 losses are known; float32, shape ().
    """

    factor: float = checked(_positive, default=6.0)
    least: float = checked(_positive, default=1.0)
    window: int = checked(validation.int_between, least=16, most=2**20, default=64)
    max_skips: int = checked(validation.int_between, least=0, most=2**20, default=16)
    norm_limit: jax.Array = state_field(float("inf"))
    value_limit: jax.Array = state_field(float("inf"))
    # log2 of norms and of losses, newest first; float32, shape (2, window)
    _last: jax.Array = state_field()

    def __post_init__(self):
        super().__post_init__()
        empty = np.full((2, self.window), _UNKNOWN, np.float32)
        self._set(_last=empty)

    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        if value is None:
            value = jnp.float32(0)  # not a spike, as only positive numbers can be
        numbers = jnp.stack([norm, value])
        is_positive = numbers > 0
        positive = jnp.maximum(numbers, validation.SMALLEST_NORMAL)
        logs = jnp.log2(positive)
        limits = self._limits()
        is_above = logs > limits
        is_spike = jnp.any(is_above & is_positive)

        # If the debt after skipping this step would be too large, spikes are too
        # frequent to be accidents, and the step is applied.
        max_debt = APPLIED_PER_SKIP * self.max_skips
        debt_if_skipped = self.skip_debt + APPLIED_PER_SKIP
        exceeds_max_debt = debt_if_skipped > max_debt
        is_accepted = is_spike & exceeds_max_debt
        should_apply = ~is_spike | is_accepted

        # The positive norms and losses of applied steps enter the window.
        is_remembered = is_positive & should_apply
        with_logs = with_newest(self._last, logs)
        norm_limit, value_limit = jnp.exp2(limits)
        new = self.replace(
            _last=jnp.where(is_remembered[:, None], with_logs, self._last),
            norm_limit=norm_limit,
            value_limit=value_limit,
            skip_debt=jnp.where(is_accepted, max_debt, self.skip_debt),
        )
        return new, should_apply

    def _limits(self) -> jax.Array:
        """Returns log2 of the limits of norm and loss; float32, shape (2,).

        A limit is infinite if too few norms, or losses, are known.
        """
        seen = jnp.sum(self._last < _UNKNOWN, axis=1)
        count = jnp.maximum(seen, _MIN_HISTORY)
        common_count = jnp.maximum(_MIN_COMMON, count // _COMMON_SHARE)
        ranks = [count // 2, 3 * count // 4, count - common_count]
        indices = jnp.stack(ranks, axis=1)
        ordered = jnp.sort(self._last)
        ranked = jnp.take_along_axis(ordered, indices, axis=1)
        median, quartile, often_reached = ranked.T

        deviation = _DEVIATION * (quartile - median)
        shortage = _ENOUGH_HISTORY / count.astype(jnp.float32)
        floor = self.least * jnp.maximum(1, shortage)
        allowed = jnp.maximum(self.factor * deviation, floor)
        limits = jnp.maximum(median + allowed, often_reached + allowed / 2)
        return jnp.where(seen < _MIN_HISTORY, jnp.inf, limits)
