"""Rules that skip a step whose gradients or loss are finite, but far too large.

A single such step can undo what a model has learned. Pass a rule to `with_loss_scale`::

    with_loss_scale(optax.adamw(1e-3), skip=skips.spikes())     # float16
    skip_nonfinite(optax.adamw(1e-3), skip=skips.spikes())      # bfloat16, float32

`spikes` follows the usual norm and loss; `threshold` is a fixed norm. To write a rule
of your own, subclass `SkipRule`. Steps that are not finite are skipped whatever the
rule, and their norm and loss do not enter its statistics.
"""

import abc
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.stateful import Stateful, state_field

__all__ = ["SkipRule", "spikes", "threshold"]

APPLIED_PER_SKIP = 20
"""How many applied steps make up for a skipped one.

A heuristic: a rule that keeps skipping more than about 1 step in 20 is taken to err.
"""

# A debt above this stops growing, so that its int32 never wraps around.
_MAX_DEBT = 2**30


class SkipRule(Stateful):
    """Decides from a step's gradient norm and loss whether to apply the step.

    Pass it to `with_loss_scale` as `skip=rule`. The rule judges steps whose gradients,
    norm and loss are finite. All other steps are skipped anyway: `decide` is called for
    them as well, but its results are dropped.

    To write a rule of your own, subclass this class and define `decide`. Subclassing
    alone makes your class a frozen dataclass and a pytree. As in a `LossScale`, declare
    state with `state_field` and change it with `replace`. All other fields are
    configuration, which `get_config` saves.

    If a rule skipped nearly all steps, training would silently stop. `skip_debt` rises
    with each step that the rule skips and falls with applied ones, and
    `raise_if_stuck` raises an error if it becomes too large.

    Attributes:
      needs_value: whether the rule needs the step's loss; a bool, which a subclass
        sets.
      skipped_by_rule: how many finite steps the rule has skipped so far; int32, shape
        ().
      skip_debt: how many steps must be applied to make up for the skipped ones. Each
        step that the rule skips adds 20, and each applied step whose norm is not 0
        subtracts 1, down to 0. `decide` may set it, as `spikes` does when it applies a
        spike; int32, shape ().

    Example:
      A rule that skips a step if its loss is at least twice the smallest loss so far:

      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> class Doubled(ols.skips.SkipRule):
      ...     needs_value = True
      ...     smallest: jax.Array = ols.state_field(jnp.inf)
      ...
      ...     def decide(self, norm, value):
      ...         smallest = jnp.minimum(self.smallest, value)
      ...         return self.replace(smallest=smallest), value < 2 * smallest
      >>> rule = Doubled()
      >>> for loss in (3.0, 2.0, 5.0):
      ...     rule, should_apply = rule.update(1.0, loss)
      >>> print(should_apply, rule.skipped_by_rule)
      False 1
    """

    _kind = "skip rule"
    needs_value: ClassVar[bool] = False
    skipped_by_rule: jax.Array = state_field(0)
    skip_debt: jax.Array = state_field(0)

    @abc.abstractmethod
    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        """Decides whether to apply one step, assuming that it is finite.

        In a compiled step, both arguments are traced, so select with `jnp.where`
        instead of `if`.

        Args:
          norm: the global L2 norm of the unscaled gradients; float32, shape ().
          value: the unscaled loss; float32, shape (). Unless the rule sets
            `needs_value`, it may be None.

        Returns:
          The new rule, with the same structure, shapes and dtypes as this one, and a
          bool of shape (), True to apply the step.
        """

    def update(
        self, norm: ArrayLike, value: ArrayLike | None = None
    ) -> tuple[Self, jax.Array]:
        """Decides whether to apply one step, assuming it is finite; updates the counts.

        Args:
          norm: the global L2 norm of the unscaled gradients; shape ().
          value: the unscaled loss, shape (), or None.

        Returns:
          The new rule, and `should_apply`, a bool of shape ().

        Raises:
          ValueError: if the rule needs the loss, but `value` is None.
          TypeError: if `decide` does not return a rule of the same type and
            configuration, with state of the same shapes, and a flag of shape ().
        """
        if value is None and self.needs_value:
            raise ValueError(
                f"the rule {type(self).__name__} needs the loss, but the step received "
                "none. Call apply_gradients(grads, state, params, value=loss), or pass "
                "value=loss to update"
            )
        if value is not None:
            value = jnp.asarray(value, jnp.float32)
        norm = jnp.asarray(norm, jnp.float32)
        decided = self.decide(norm, value)
        if not (isinstance(decided, tuple) and len(decided) == 2):
            raise TypeError(
                f"decide of {type(self).__name__} must return (rule, should_apply), "
                f"such as (self, norm < 10.0), got {checks.shown(decided)}"
            )
        rule, should_apply = decided
        checks.check_successor(rule, self, "decide")
        should_apply = checks.as_flag(should_apply, self, "decide")
        # A norm of 0 does not show that steps with other norms are applied.
        paid_off = jnp.where(
            norm > 0, jnp.maximum(rule.skip_debt - 1, 0), rule.skip_debt
        )
        deeper = jnp.minimum(rule.skip_debt, _MAX_DEBT) + APPLIED_PER_SKIP
        one_more = optax.safe_increment(self.skipped_by_rule)
        counted = rule.replace(
            skipped_by_rule=jnp.where(should_apply, self.skipped_by_rule, one_more),
            skip_debt=jnp.where(should_apply, paid_off, deeper),
        )
        return counted, should_apply


def threshold(norm: float) -> SkipRule:
    """Returns a rule that skips steps whose gradients have a norm above a fixed one.

    If norms stay above it, every step is skipped, and `raise_if_stuck` raises an error.

    Args:
      norm: the largest norm at which a step is applied; positive.

    Source: Megatron-LM's `grad_norm_skip_threshold`.

    Example:
      >>> import optax_lossscale as ols
      >>> rule, should_apply = ols.skips.threshold(10.0).update(10.5)
      >>> print(should_apply)
      False
    """
    return ThresholdSkipRule(norm)


class ThresholdSkipRule(SkipRule):
    """The rule of `threshold`."""

    norm: float

    def __post_init__(self):
        super().__post_init__()
        self._check("norm", checks.number, 2.0**-126, 2.0**64)

    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        return self, norm <= self.norm


def spikes(
    factor: float = 6.0, *, least: float = 1.0, window: int = 64, max_skips: int = 16
) -> SkipRule:
    """Returns a rule that skips steps whose norm or loss is far above the usual one.

    The limits come from the median, the upper quartile and the largest common value of
    the last applied steps, which a spike hardly moves, on a logarithmic scale, so only
    ratios matter. The rule, with the `skip_debt` of `SkipRule`, which begins at 0::

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

    In any sequence of steps, the rule skips at most `max_skips` finite steps, plus 1
    for every 20 that it applies, so if norms or losses rise for good, it skips about
    `max_skips` steps. The constants are heuristics, chosen by trial.

    Args:
      factor: a norm or loss more than this many spreads above the median is a spike;
        above 0, at most 1e6.
      least: the least distance of a spike above the median, in bits, where 1 bit is a
        factor of 2; above 0, at most 1e6. Raise it if the rule skips good batches.
      window: how many norms and losses the rule keeps, from 16 to 2**20.
      max_skips: how many steps the rule may skip before applied steps make up for
        them, from 0 to 2**20. Raise it if bad steps come in longer runs.

    Example:
      >>> import optax_lossscale as ols
      >>> rule = ols.skips.spikes()
      >>> for norm in [1.0, 1.1, 0.9, 1.2, 1.0, 0.8, 1.0, 1.1, 100.0]:
      ...     rule, should_apply = rule.update(norm)
      >>> print(should_apply, rule.skipped_by_rule)
      False 1
    """
    return SpikeSkipRule(factor, least, window, max_skips)


# The standard deviation of a normal distribution is this many times the distance from
# its median to a quartile.
_DEVIATION = 1.4826
# With fewer steps in the window, nothing is a spike.
_MIN_HISTORY = 8
# With fewer, `least` is multiplied by this number / steps.
_ENOUGH_HISTORY = 24.0
# Marks an empty place of the window. It exceeds log2 of any float32, so it sorts last.
_UNKNOWN = 1e3
# An infinity would stop a program that runs with `jax_debug_infs`.
_NO_LIMIT = 2.0**127


class SpikeSkipRule(SkipRule):
    """The rule of `spikes`, which documents the arguments.

    Attributes:
      norm_limit: the norm above which the last step would have been a spike, or 2**127
        while fewer than 8 norms are known; float32, shape ().
      value_limit: the same for the loss.
    """

    factor: float
    least: float
    window: int
    max_skips: int
    norm_limit: jax.Array = state_field(_NO_LIMIT)
    value_limit: jax.Array = state_field(_NO_LIMIT)
    # log2 of norms and of losses, newest first; float32, shape (2, window)
    _last: jax.Array = state_field()

    def __post_init__(self):
        super().__post_init__()
        self._check("factor", checks.number, 2.0**-126, 1e6)
        self._check("least", checks.number, 2.0**-126, 1e6)
        self._check("window", checks.integer, 16, 2**20)
        self._check("max_skips", checks.integer, 0, 2**20)
        self._set(_last=np.full((2, self.window), _UNKNOWN, np.float32))

    def decide(
        self, norm: jax.Array, value: jax.Array | None
    ) -> tuple[Self, jax.Array]:
        # A loss of 0 is no spike, as only positive numbers can be.
        numbers = jnp.stack([norm, jnp.float32(0) if value is None else value])
        is_positive = numbers > 0
        logs = jnp.log2(jnp.where(is_positive, numbers, 1))
        limits = self._limits()
        is_spike = jnp.any((logs > limits) & is_positive)

        # If the debt would be too large, spikes are too common to be accidents.
        most = APPLIED_PER_SKIP * self.max_skips
        is_accepted = is_spike & (self.skip_debt + APPLIED_PER_SKIP > most)
        should_apply = ~is_spike | is_accepted

        with_logs = jnp.concatenate([logs[:, None], self._last[:, :-1]], axis=1)
        is_remembered = (is_positive & should_apply)[:, None]
        norm_limit, value_limit = jnp.exp2(jnp.minimum(limits, np.log2(_NO_LIMIT)))
        new = self.replace(
            _last=jnp.where(is_remembered, with_logs, self._last),
            norm_limit=norm_limit,
            value_limit=value_limit,
            skip_debt=jnp.where(is_accepted, most, self.skip_debt),
        )
        return new, should_apply

    def _limits(self) -> jax.Array:
        """Returns log2 of the limits of norm and loss; float32, shape (2,)."""
        seen = jnp.sum(self._last < _UNKNOWN, axis=1)
        count = jnp.maximum(seen, _MIN_HISTORY)
        common_rank = count - jnp.maximum(3, count // 20)
        ranks = jnp.stack([count // 2, 3 * count // 4, common_rank], axis=1)
        ordered = jnp.sort(self._last)
        median, quartile, common = jnp.take_along_axis(ordered, ranks, axis=1).T

        deviation = _DEVIATION * (quartile - median)
        floor = self.least * jnp.maximum(1, _ENOUGH_HISTORY / count.astype(jnp.float32))
        allowed = jnp.maximum(self.factor * deviation, floor)
        limits = jnp.maximum(median + allowed, common + allowed / 2)
        return jnp.where(seen < _MIN_HISTORY, _UNKNOWN, limits)
