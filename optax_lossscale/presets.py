"""The loss scalers of other systems, with their original argument names.

Use a preset to resume a run that was started in another system, or to port its training
script::

    scaler = torch.amp.GradScaler(init_scale=1024.0)          # there
    loss_scale = presets.pytorch(init_scale=1024.0)           # here
    tx = with_loss_scale(optax.adamw(1e-3), loss_scale)

Each function is named after a system. It accepts the arguments of the original that
concern the loss scale, with the original defaults, and returns a loss scale whose value
after every step is that of the original, with these exceptions:

- A scale that would leave float32's normal range, 1.18e-38 to 3.4e38, stays as it is.
- A `FixedLossScale` is at most 2**126.
- DeepSpeed and fairseq do not round their scale to float32, so unless the factor is a
  power of two, the last digits of the preset's scale soon differ.
- The docstrings name any others.

The tests in the repository replay recorded runs of the originals; in those of DeepSpeed
and fairseq, the factors are powers of two. After every step of these runs, the scale
equals the original's, rounded to float32; that of LogMax is within 1% of it. The
originals of `tensorflow_contrib_fixed` and `apex` could not be run, so the tests
compare these two presets with the published rules.

An invalid argument raises a `ValueError`, unless the original ignores it.

Unless its docstring says otherwise, a preset backs off on each non-finite step. A step
whose gradients are all zero counts as finite, but LogMax treats it as if its largest
gradient were 2**-126. If gradients are all zero on most steps, use `HeadroomLossScale`
instead.

The originals do not check the loss, and most of those with a fixed scale check nothing.
To do the same here, pass `skip=None` to `with_loss_scale`. It then does not check the
loss, and with a fixed scale, it checks nothing.
"""

from functools import partial
from typing import Any, Literal

import numpy as np

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.messages import refuse, user_names
from optax_lossscale._arrays.names import make_public
from optax_lossscale._scales.dynamic import DynamicLossScale
from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.logmax import LogMaxLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._scales.tolerance import ToleranceLossScale

__all__ = [
    "LogMaxLossScale",
    "ToleranceLossScale",
    "apex",
    "deepspeed",
    "fairseq",
    "flax",
    "jmp",
    "keras",
    "megatron",
    "mpx",
    "openseq2seq_logmax",
    "pytorch",
    "tensorflow_contrib_exponential",
    "tensorflow_contrib_fixed",
    "tensorflow_dynamic",
    "tensorflow_fixed",
    "tf_keras",
]

make_public(__name__, LogMaxLossScale, ToleranceLossScale)


def _in_float32(check: validation.Check, name: str, factor: float) -> float:
    """Checks a factor and rounds it to float32, as its original does."""
    return float(np.float32(check(name, factor)))


def _symmetric_factor(name: str, factor: float) -> float:
    """Checks a factor by which the scale grows and by which it is divided.

    Its reciprocal, the back-off factor, must be a normal float32 number, too.
    """
    return validation.number_between(name, factor, least=1, most=2.0**126)


_growth_factor = partial(_in_float32, validation.growth_factor, "growth_factor")
_backoff_factor = partial(_in_float32, validation.backoff_factor, "backoff_factor")


@user_names(
    initial_loss_scale="initial_scale",
    increment_period="growth_interval",
)
def tensorflow_dynamic(
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> DynamicLossScale:
    """Returns the scale of TensorFlow's `tf.train.experimental.DynamicLossScale`.

    Args:
      initial_loss_scale: the initial scale, at least 1, which is the floor.
      increment_period: the scale grows after this many finite steps in a row.
      multiplier: the scale grows by this factor and is divided by it to back off.

    Example:
      >>> from optax_lossscale import presets
      >>> presets.tensorflow_dynamic().backoff_factor
      0.5
    """
    factor = _in_float32(_symmetric_factor, "multiplier", multiplier)
    return DynamicLossScale(
        initial_scale=initial_loss_scale,
        growth_interval=increment_period,
        growth_factor=factor,
        backoff_factor=1 / factor,
    )


@user_names(loss_scale_value="scale")
def tensorflow_fixed(loss_scale_value: float) -> FixedLossScale:
    """Returns the scale of TensorFlow's `FixedLossScale`.

    Args:
      loss_scale_value: the scale.

    Example:
      >>> from optax_lossscale import presets
      >>> presets.tensorflow_fixed(128)
      FixedLossScale(128.0)
    """
    return FixedLossScale(loss_scale_value)


@user_names(loss_scale="initial_scale")
def tensorflow_contrib_fixed(loss_scale: float) -> DynamicLossScale:
    """Returns the scale of tf.contrib's `FixedLossScaleManager`.

    The scale is fixed, but non-finite steps are skipped.

    Args:
      loss_scale: the scale, at least 1.

    Example:
      >>> from optax_lossscale import presets
      >>> ls = presets.tensorflow_contrib_fixed(128.0)
      >>> ls, should_apply = ls.update(float("inf"))
      >>> print(ls(), should_apply)
      128.0 False
    """
    # Factors of 1 keep the scale fixed. This is not a `FixedLossScale`, because the
    # `update` of that would check nothing.
    return DynamicLossScale(
        initial_scale=loss_scale,
        growth_factor=1.0,
        backoff_factor=1.0,
        can_be_exhausted=False,
    )


@user_names(
    init_loss_scale="initial_scale",
    incr_every_n_steps="growth_interval",
    decr_every_n_nan_or_inf="hysteresis",
    incr_ratio="growth_factor",
    decr_ratio="backoff_factor",
)
def tensorflow_contrib_exponential(
    init_loss_scale: float,
    incr_every_n_steps: int,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
) -> DynamicLossScale:
    """Returns the scale of tf.contrib's `ExponentialUpdateLossScaleManager`.

    Finite steps do not reset the count of non-finite steps, but any growth or back-off
    does.

    Args:
      init_loss_scale: the initial scale, at least 1, which is the floor.
      incr_every_n_steps: the scale grows after this many finite steps in a row.
      decr_every_n_nan_or_inf: how many non-finite steps it takes to back off.
      incr_ratio: the factor by which the scale grows.
      decr_ratio: the factor by which the scale backs off.

    Example:
      >>> from optax_lossscale import presets
      >>> presets.tensorflow_contrib_exponential(2.0**15, 1000).hysteresis
      2
    """
    return DynamicLossScale(
        initial_scale=init_loss_scale,
        growth_interval=incr_every_n_steps,
        growth_factor=_growth_factor(incr_ratio),
        backoff_factor=_backoff_factor(decr_ratio),
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_refill="rescale",
    )


@user_names(initial_scale="scale", dynamic_growth_steps="growth_interval")
def tf_keras(
    dynamic: bool = True,
    initial_scale: float | None = None,
    dynamic_growth_steps: int | None = None,
) -> LossScale:
    """Returns the scale of `tf.keras.mixed_precision.LossScaleOptimizer`.

    The scale doubles and halves, with a floor of 1.

    Args:
      dynamic: whether the scale adapts; if not, the result is a `FixedLossScale`.
      initial_scale: the initial scale, by default 2**15; required if not `dynamic`.
      dynamic_growth_steps: the scale grows after this many finite steps in a row, by
        default 2000; not allowed unless `dynamic`.

    Example:
      >>> from optax_lossscale import presets
      >>> presets.tf_keras(dynamic=False, initial_scale=1024)
      FixedLossScale(1024.0)
    """
    if validation.flag("dynamic", dynamic):
        scale = 2.0**15 if initial_scale is None else initial_scale
        interval = 2000 if dynamic_growth_steps is None else dynamic_growth_steps
        return DynamicLossScale(initial_scale=scale, growth_interval=interval)
    if initial_scale is None or dynamic_growth_steps is not None:
        raise ValueError(
            "with dynamic=False, pass initial_scale, but not dynamic_growth_steps"
        )
    return FixedLossScale(initial_scale)


@user_names(dynamic_growth_steps="growth_interval")
def keras(
    initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> DynamicLossScale:
    """Returns the scale of Keras 3's `LossScaleOptimizer`.

    The scale doubles and halves, without floor or cap.

    Args:
      initial_scale: the initial scale.
      dynamic_growth_steps: the scale grows after this many finite steps in a row.

    Example:
      >>> from optax_lossscale import presets
      >>> float(presets.keras(initial_scale=1.0).adjust(False)())
      0.5
    """
    return DynamicLossScale(
        initial_scale=initial_scale,
        growth_interval=dynamic_growth_steps,
        min_scale=None,
    )


@user_names(init_scale="initial_scale")
def pytorch(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> LossScale:
    """Returns the scale of PyTorch's `torch.amp.GradScaler`.

    The factors are in double precision, and there is no floor.

    Args:
      init_scale: the initial scale.
      growth_factor: the factor by which the scale grows.
      backoff_factor: the factor by which the scale backs off.
      growth_interval: the scale grows after this many finite steps in a row.
      enabled: whether to scale the loss at all; if not, the result is
        `FixedLossScale(1)`.

    Example:
      >>> from optax_lossscale import presets
      >>> float(presets.pytorch()())
      65536.0
    """
    if not validation.flag("enabled", enabled):
        return FixedLossScale(1)
    return DynamicLossScale(
        initial_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=None,
    )


@user_names(
    fin_steps="initial_growth_counter",
    scale="initial_scale",
    minimum_scale="min_scale",
)
def flax(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    fin_steps: int = 0,
    scale: float = 65536.0,
    minimum_scale: float | None = validation.SMALLEST_NORMAL,
) -> DynamicLossScale:
    """Returns the scale of Flax's `flax.training.dynamic_scale.DynamicScale`.

    The scale grows up to the largest float32 number.

    Args:
      growth_factor: the factor by which the scale grows.
      backoff_factor: the factor by which the scale backs off.
      growth_interval: the scale grows after one more than this many finite steps in a
        row.
      fin_steps: the initial count of finite steps in a row, at most `growth_interval`.
      scale: the initial scale.
      minimum_scale: the floor, or None.

    Example:
      >>> from optax_lossscale import presets
      >>> presets.flax().growth_interval
      2001
    """
    finite_steps = validation.int_between(
        "growth_interval",
        growth_interval,
        least=0,
        most=validation.LARGEST_INT - 1,
    )
    return DynamicLossScale(
        initial_scale=scale,
        growth_factor=_growth_factor(growth_factor),
        backoff_factor=_backoff_factor(backoff_factor),
        growth_interval=finite_steps + 1,
        initial_growth_counter=fin_steps,
        min_scale=minimum_scale,
        max_scale=validation.LARGEST_FLOAT32,
    )


@user_names(
    loss_scale="initial_scale",
    counter="initial_growth_counter",
    period="growth_interval",
    min_loss_scale="min_scale",
)
def jmp(
    loss_scale: float,
    counter: int = 0,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
) -> DynamicLossScale:
    """Returns the scale of JMP's `jmp.DynamicLossScale`.

    When the original passes through `jit`, its floor falls back to 1, whereas this
    preset keeps `min_loss_scale`.

    Args:
      loss_scale: the initial scale.
      counter: the initial count of finite steps in a row, less than `period`.
      period: the scale grows after this many finite steps in a row.
      factor: the scale grows by this factor and is divided by it to back off.
      min_loss_scale: the floor.

    Example:
      >>> from optax_lossscale import presets
      >>> float(presets.jmp(2.0**15, period=1).adjust(True)())
      65536.0
    """
    return _symmetric(
        factor,
        initial_scale=loss_scale,
        growth_interval=period,
        min_scale=min_loss_scale,
        initial_growth_counter=counter,
    )


@user_names(
    loss_scaling="initial_scale",
    counter="initial_growth_counter",
    period="growth_interval",
    min_loss_scaling="min_scale",
)
def mpx(
    loss_scaling: float,
    min_loss_scaling: float = 1.0,
    factor: float = 2,
    period: int = 2000,
    counter: int = 0,
) -> DynamicLossScale:
    """Returns the scale of MPX's `mpx.DynamicLossScaling`.

    Growth ends at 65504, float16's largest number. MPX divides the gradients by the
    next scale, but here they are divided by the scale that multiplied the loss.

    Args:
      loss_scaling: the initial scale, at most 65504.
      min_loss_scaling: the floor.
      factor: the scale grows by this factor and is divided by it to back off.
      period: the scale grows after this many finite steps in a row.
      counter: the initial count of finite steps in a row, less than `period`.

    Example:
      >>> from optax_lossscale import presets
      >>> float(presets.mpx(2.0**15, period=1).adjust(True)())
      65504.0
    """
    return _symmetric(
        factor,
        initial_scale=loss_scaling,
        growth_interval=period,
        min_scale=min_loss_scaling,
        max_scale=65504.0,
        initial_growth_counter=counter,
    )


def _symmetric(factor: float, **configuration: Any) -> DynamicLossScale:
    """Builds the loss scale of JMP and MPX, which grow and back off by the same factor.

    To back off, JMP and MPX divide by the factor. XLA compiles this division to a
    multiplication by the reciprocal in float32 (read from a program that was compiled
    for CPU with jax 0.10).
    """
    growth_factor = _in_float32(_symmetric_factor, "factor", factor)
    reciprocal = np.float32(1 / growth_factor)
    return DynamicLossScale(
        growth_factor=growth_factor,
        backoff_factor=float(reciprocal),
        **configuration,
    )


def megatron(
    initial_scale: float,
    min_scale: float,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> DynamicLossScale:
    """Returns the scale of Megatron-LM's `DynamicGradScaler`.

    Once the scale has backed off, it backs off on every overflow until it is due to
    grow.

    Args:
      initial_scale: the initial scale.
      min_scale: the floor.
      growth_factor: the factor by which the scale grows.
      backoff_factor: the factor by which the scale backs off.
      growth_interval: the scale grows after this many finite steps in a row.
      hysteresis: how many non-finite steps it takes to back off. The count starts over
        when the scale is due to grow.

    Example:
      >>> from optax_lossscale import presets
      >>> ls = presets.megatron(2.0**32, 1.0, 2.0, 0.5, 1000, hysteresis=2)
      >>> float(ls.adjust(False)()), float(ls.adjust(False).adjust(False)())
      (4294967296.0, 2147483648.0)
    """
    return DynamicLossScale(
        initial_scale=initial_scale,
        min_scale=min_scale,
        growth_factor=_growth_factor(growth_factor),
        backoff_factor=_backoff_factor(backoff_factor),
        growth_interval=growth_interval,
        hysteresis=hysteresis,
    )


@user_names(
    init_scale="initial_scale",
    scale_window="growth_interval",
    delayed_shift="hysteresis",
    raise_error_at_min_scale="can_be_exhausted",
)
def deepspeed(
    init_scale: float = 2.0**32,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    min_scale: float = 1,
    delayed_shift: int = 1,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
) -> DynamicLossScale:
    """Returns the scale of DeepSpeed's `DynamicLossScaler`.

    Args:
      init_scale: the initial scale.
      scale_factor: the scale grows by this factor and is divided by it to back off.
      scale_window: the scale grows after this many finite steps in a row.
      min_scale: the floor.
      delayed_shift: how many non-finite steps it takes to back off.
      consecutive_hysteresis: whether these steps must be consecutive. If not, a scale
        that has backed off does so again on every overflow until it is due to grow.
      raise_error_at_min_scale: whether `raise_if_stuck` raises an error after an
        overflow at the floor.

    Example:
      >>> from optax_lossscale import presets
      >>> bool(presets.deepspeed(init_scale=1.0).adjust(False).exhausted())
      True
    """
    consecutive = validation.flag("consecutive_hysteresis", consecutive_hysteresis)
    factor = _symmetric_factor("scale_factor", scale_factor)
    return DynamicLossScale(
        initial_scale=init_scale,
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=scale_window,
        min_scale=min_scale,
        hysteresis=delayed_shift,
        hysteresis_refill="finite" if consecutive else "growth",
        can_be_exhausted=raise_error_at_min_scale,
    )


@user_names(
    init_scale="initial_scale",
    scale_window="growth_interval",
    scale_factor="factor",
    min_loss_scale="min_scale",
)
def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> ToleranceLossScale:
    """Returns the scale of fairseq's `DynamicLossScaler`.

    `ToleranceLossScale` documents the rule.

    Args:
      init_scale: the initial scale.
      scale_factor: the scale grows by this factor and is divided by it to back off.
      scale_window: the scale grows after this many finite steps in a row.
      tolerance: the scale backs off if the overflows since the last back-off make up at
        least this share of the steps since the scale last changed.
      threshold: the lowest scale to back off to, or None. With a threshold above
        `min_loss_scale`, there is no error. A scale below the threshold rises to it
        when it backs off.
      min_loss_scale: a scale that would fall to this bound or below stays as it is, and
        `raise_if_stuck` raises an error.

    Example:
      >>> from optax_lossscale import presets
      >>> float(presets.fairseq().adjust(False)())
      16384.0
    """
    return ToleranceLossScale(
        initial_scale=init_scale,
        growth_interval=scale_window,
        factor=scale_factor,
        tolerance=tolerance,
        threshold=threshold,
        min_scale=min_loss_scale,
    )


@user_names(scale_min="min_scale", scale_max="max_scale")
def openseq2seq_logmax(
    scale_min: float = 1.0,
    scale_max: float = 2.0**24,
    log_max: float = 16.0,
    beta1: float = 0.99,
    beta2: float = 0.999,
    overflow_std_dev: float = 3.09,
) -> LogMaxLossScale:
    """Returns the scale of OpenSeq2Seq's `LogMaxScaler`.

    It starts at 1, clipped to the bounds. `LogMaxLossScale` documents the rule.

    Args:
      scale_min: the floor.
      scale_max: the cap.
      log_max: an overflow is averaged as if log2 of the largest gradient were
        `2**log_max`, as in the original; at most 60.
      beta1: the decay of the mean, in [0, 1).
      beta2: the decay of the averages for the standard deviation, in [0, 1).
      overflow_std_dev: how many standard deviations above the mean a gradient's log2
        may be before it overflows, from 0 to 1e6.

    Example:
      >>> from optax_lossscale import presets
      >>> float(presets.openseq2seq_logmax()())
      1.0
    """
    most = validation.scale("scale_max", scale_max)
    least = validation.number_between(
        "scale_min", scale_min, least=validation.SMALLEST_NORMAL, most=most
    )
    return LogMaxLossScale(
        initial_scale=min(max(1.0, least), most),
        min_scale=least,
        max_scale=most,
        log_max=log_max,
        beta1=beta1,
        beta2=beta2,
        overflow_std_dev=overflow_std_dev,
    )


@user_names(
    loss_scale="scale",
    init_scale="initial_scale",
    scale_window="growth_interval",
    min_loss_scale="min_scale",
    max_loss_scale="max_scale",
)
def apex(
    loss_scale: float | Literal["dynamic"] = "dynamic",
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> LossScale:
    """Returns the scale of NVIDIA Apex's `LossScaler`.

    Args:
      loss_scale: "dynamic", or a number for a `FixedLossScale`; Apex has no default.
      init_scale: the initial scale; Apex starts no higher than `max_loss_scale`.
      scale_factor: accepted but not used, as in Apex; the factor is always 2.
      scale_window: the scale grows after this many finite steps in a row.
      min_loss_scale: the floor, or None.
      max_loss_scale: the cap, at which growth ends.

    Example:
      >>> from optax_lossscale import presets
      >>> float(presets.apex(init_scale=2.0**24, scale_window=1).adjust(True)())
      16777216.0
    """
    if not isinstance(loss_scale, str):
        return FixedLossScale(loss_scale)
    if loss_scale != "dynamic":
        refuse("loss_scale", loss_scale, "a number or 'dynamic'")
    most = validation.scale("max_loss_scale", max_loss_scale)
    scale = min(validation.scale("init_scale", init_scale), most)
    return DynamicLossScale(
        initial_scale=scale,
        growth_interval=scale_window,
        min_scale=min_loss_scale,
        max_scale=most,
    )
