"""Rules that skip a step whose gradients or loss are finite, but far too large.

Pass a rule to `with_loss_scale`. `spikes` is the recommended one::

    with_loss_scale(optax.adamw(1e-3), skip=skips.spikes())          # float16
    with_loss_scale(optax.adamw(1e-3), None, skip=skips.spikes())    # bfloat16, float32

The other functions are named after other systems and return their rules, with the
original argument names. Only the two functions `drop_norm_by_…` return thresholds, for
`axlearn`. The rules judge finite steps as the originals do, unless a docstring says
otherwise. Steps that are not finite are skipped whatever the
rule, and their norm and loss do not enter its statistics, unlike in most originals.

To write a rule of your own, subclass `SkipRule`. An invalid argument raises a
`ValueError`.
"""

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.messages import refuse, user_names
from optax_lossscale._arrays.names import make_public
from optax_lossscale._skips.rolling import RollingSkipRule
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._skips.spikes import SpikeSkipRule
from optax_lossscale._skips.threshold import (
    DropNorm,
    MovingAverageSkipRule,
    ThresholdSkipRule,
)

__all__ = [
    "SkipRule",
    "axlearn",
    "drop_norm_by_grad_norm_ema",
    "drop_norm_by_grad_norm_stddev",
    "levanter",
    "maxtext",
    "megatron",
    "olmo_core",
    "spikes",
]

make_public(
    __name__,
    SkipRule,
    RollingSkipRule,
    SpikeSkipRule,
    ThresholdSkipRule,
    MovingAverageSkipRule,
    DropNorm,
)


def spikes(
    factor: float = 6.0, *, least: float = 1.0, window: int = 64, max_skips: int = 16
) -> SpikeSkipRule:
    """Returns a rule that skips steps whose norm or loss is far above the usual one.

    The rule compares a step's norm with the norms of the last applied steps, on a
    logarithmic scale. The usual norm is their median. Their spread is an estimate of
    the standard deviation from the distance between the median and the upper quartile,
    which a spike hardly moves. Norms that at least 3 of these steps reached, or 1 in 20
    of them if that is more, also count as usual. A positive loss that is passed to the
    step as `value` is compared in the same way. Only ratios matter: multiplying all
    norms, or all losses, by a constant changes nothing.

    In any sequence of steps, the rule skips at most `max_skips` finite steps, plus 1
    for every 20 that it applies, so if norms or losses rise for good, it skips about
    `max_skips` steps. It skips nothing while they rise by less than a factor of
    `2**least` within a window, and nothing before 8 steps have been applied.

    Args:
      factor: a norm or loss more than this many spreads above the median is a spike;
        above 0, at most 1e6.
      least: the least distance of a spike above the median, in bits, where 1 bit is a
        factor of 2; above 0, at most 1e6. While fewer than 24 norms are known, the
        least distance is larger. Raise it if the rule skips good batches.
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
    return SpikeSkipRule(factor=factor, least=least, window=window, max_skips=max_skips)


@user_names(rolling_interval_length="length")
def olmo_core(
    rolling_interval_length: int = 128, sigma_factor: float = 6
) -> RollingSkipRule:
    """Returns the rule of OLMo-core's `SkipStepOptimizer`.

    Once a window of steps is half full, the rule skips a step whose loss or norm is
    more than `sigma_factor` unbiased standard deviations above the window's mean.
    Skipped steps enter the window, too. The rule needs the step's loss: `minimize`
    passes it on, and other calls need `value=loss`.

    The original differs in two ways. It skips every step while its window contains a
    NaN. With a length below 6, it always skips the second step, because the unbiased
    standard deviation of a single number is NaN. Here it is 0, so the second step is
    skipped only if its norm or loss is larger than that of the first.

    Args:
      rolling_interval_length: how many steps the window contains, at least 2.
      sigma_factor: a norm or loss more than this many standard deviations above the
        mean is skipped.

    Example:
      >>> from optax_lossscale import skips
      >>> rule, should_apply = skips.olmo_core().update(norm=1.0, value=2.5)
      >>> print(should_apply)
      True
    """
    # The original's window already contains the step that it judges.
    least_history = _half(rolling_interval_length) - 1
    return RollingSkipRule(rolling_interval_length, sigma_factor, least_history)


@user_names(interval="rolling_interval_length", scaling_factor="sigma_factor")
def maxtext(interval: int = 128, scaling_factor: float = 6.0) -> RollingSkipRule:
    """Returns the rule of MaxText's `skip_step_on_spikes`, with its config's defaults.

    This is the rule of `olmo_core`. It needs the step's loss and differs from the
    original in the same ways. In addition, MaxText's trainer passes the norm of clipped
    gradients to the rule. Here, the norm is computed before clipping, because the clip
    is inside the wrapper.

    Args:
      interval: how many steps the window contains, at least 2.
      scaling_factor: a norm or loss more than this many standard deviations above the
        mean is skipped.

    Example:
      >>> from optax_lossscale import skips
      >>> skips.maxtext(interval=64).least_history
      31
    """
    return olmo_core(interval, scaling_factor)


@user_names(rolling_interval_length="length")
def levanter(
    rolling_interval_length: int = 128, sigma_factor: float = 6.0
) -> RollingSkipRule:
    """Returns the rule of Levanter's `SkipStepConfig`.

    This is the rule of `olmo_core`, which needs the step's loss, with two changes. The
    standard deviation is the biased one and at least 1e-6. One more step is applied
    before any is skipped.

    The original multiplies non-finite updates by 0, which leaves NaNs in the
    parameters. Here, non-finite steps are skipped.

    Args:
      rolling_interval_length: how many steps the window contains, at least 2.
      sigma_factor: a norm or loss more than this many standard deviations above the
        mean is skipped.

    Example:
      >>> from optax_lossscale import skips
      >>> skips.levanter(rolling_interval_length=64).least_history
      32
    """
    return RollingSkipRule(
        rolling_interval_length,
        sigma_factor,
        least_history=_half(rolling_interval_length),
        ddof=0,
        least_deviation=1e-6,
    )


@user_names(drop_norm="threshold")
def axlearn(
    drop_norm: float | DropNorm, grad_norm_ema_decay: float | None = None
) -> ThresholdSkipRule | MovingAverageSkipRule:
    """Returns the rule of AXLearn's `skip_and_clip_by_global_norm`, without the clip.

    The clip, with its `max_norm`, belongs inside the wrapper:
    `with_loss_scale(optax.chain(optax.clip_by_global_norm(max_norm), inner), …)`.

    Skipped steps do not change a threshold that follows the norms, so if norms stay
    above it, every step is skipped, and `raise_if_stuck` raises an error. The rule
    `spikes` accepts such norms after `max_skips` steps.

    Args:
      drop_norm: the threshold; a step with this norm or a larger one is skipped. For a
        threshold that follows the norms, pass the result of
        `drop_norm_by_grad_norm_ema` or `drop_norm_by_grad_norm_stddev`.
      grad_norm_ema_decay: the decay of the moving averages, in (0, 1), required if the
        threshold follows the norms; ignored if `drop_norm` is a number.

    Example:
      >>> from optax_lossscale import skips
      >>> drop_norm = skips.drop_norm_by_grad_norm_ema()
      >>> rule = skips.axlearn(drop_norm, grad_norm_ema_decay=0.99)
      >>> rule, should_apply = rule.update(1.0)
      >>> rule, should_apply = rule.update(25.0)
      >>> print(should_apply)
      False
    """
    if not isinstance(drop_norm, DropNorm):
        return ThresholdSkipRule(drop_norm, strict=True)
    if grad_norm_ema_decay is None:
        refuse(
            "grad_norm_ema_decay",
            grad_norm_ema_decay,
            "a number such as 0.99 if drop_norm follows the norms",
        )
    return MovingAverageSkipRule(
        **drop_norm._asdict(), grad_norm_ema_decay=grad_norm_ema_decay
    )


def drop_norm_by_grad_norm_ema(
    multipliers: tuple[float, ...] = (20, 40, 100),
) -> DropNorm:
    """Returns a threshold for `axlearn`: a multiple of the mean norm.

    The mean begins at 1, so if the first norms reach the smallest multiplier, every
    step is skipped. In that case, use `drop_norm_by_grad_norm_stddev`, whose threshold
    is 1e10 at first.

    Args:
      multipliers: only the smallest matters, as its threshold is the lowest.

    Source: AXLearn's function of this name.

    Example:
      >>> from optax_lossscale import skips
      >>> skips.drop_norm_by_grad_norm_ema((5, 10)).mean_factor
      5.0
    """
    return DropNorm(mean_factor=_smallest(multipliers), stddev_factor=0.0, min_count=0)


def drop_norm_by_grad_norm_stddev(
    *, min_count: int = 500, multipliers: tuple[float, ...] = (20, 40, 100)
) -> DropNorm:
    """Returns a threshold for `axlearn`: the mean norm plus some standard deviations.

    Args:
      min_count: how many steps must be applied before the threshold follows the norms.
        Until then, it is 1e10.
      multipliers: only the smallest matters, as its threshold is the lowest.

    Source: AXLearn's function of this name.

    Example:
      >>> from optax_lossscale import skips
      >>> skips.axlearn(skips.drop_norm_by_grad_norm_stddev(), 0.99).min_count
      500
    """
    count = validation.count("min_count", min_count)
    return DropNorm(1.0, stddev_factor=_smallest(multipliers), min_count=count)


@user_names(grad_norm_skip_threshold="threshold")
def megatron(grad_norm_skip_threshold: float) -> ThresholdSkipRule:
    """Returns the rule of Megatron-LM's `grad_norm_skip_threshold`, a fixed threshold.

    If norms stay above it, every step is skipped, and `raise_if_stuck` raises an error.

    Args:
      grad_norm_skip_threshold: steps with a larger norm are skipped; positive, finite.

    Example:
      >>> from optax_lossscale import skips
      >>> rule, should_apply = skips.megatron(10.0).update(10.5)
      >>> print(should_apply)
      False
    """
    return ThresholdSkipRule(grad_norm_skip_threshold)


def _half(length: int) -> int:
    """Returns how many steps fill half of a window of this length; at least 2."""
    length = validation.int_between("length", length, least=2, most=2**20)
    return max(2, length // 2)


def _smallest(multipliers: tuple[float, ...]) -> float:
    """Checks multipliers; returns the smallest, whose threshold is the lowest."""
    allowed = "a tuple of positive numbers"
    if not isinstance(multipliers, (tuple, list)) or not multipliers:
        refuse("multipliers", multipliers, allowed)
    return min(
        validation.positive("multipliers", x, allowed=allowed) for x in multipliers
    )
