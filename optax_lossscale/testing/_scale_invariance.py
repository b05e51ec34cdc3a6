"""The assertion that nothing but the loss scale depends on the loss scale.

There are three kinds of evidence. At falling loss scales, from the highest at which the
step is applied, each output is a series, which should not depend on the loss scale. At
loss scales at which gradients overflow, the step should be skipped. And where the loss
scale is about to grow, the outputs should be those of any other step.

`_fault` asks for one fault after the other, in an order in which the first that is
found may be the cause of all later ones. It returns that one alone.
"""

import bisect
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import GetAttrKey

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._step.gradient import check_keywords
from optax_lossscale.testing._carry import find_carry, nudges, within
from optax_lossscale.testing._contents import equal, is_finite
from optax_lossscale.testing._experiment import Experiment
from optax_lossscale.testing._output_names import listed, name_of, not_ignored
from optax_lossscale.testing._series import Series, powers, unexplained_changes
from optax_lossscale.testing._skipping import (
    APPLIED_REMEDY,
    applied_at_infinity,
    left_behind,
    stuck,
)

# How far the exponents of the loss scales are below the highest one. The distances
# between neighbours alternate: at equal ones, the rounding error of a number such as
# 1/3, of which every second bit is set, could follow the scale.
_BELOW = [5 * i // 2 for i in range(13)]
_ENOUGH = 8  # at how many loss scales the step must be applied
_LOWEST = -125  # the exponent of a loss scale at which nearly all gradients underflow
# A step that is applied even at _WIDE computes in float32 or bfloat16, where nothing
# underflows at the loss scales that matter, which are those from _START down.
_WIDE = 90
_START = 30
_LONGEST_INTERVAL = 100_000  # steps
_WEIGHTS = GetAttrKey("master_weights")


def assert_scale_invariant(
    step: Callable[..., Any],
    *args: Any,
    ignore: str | Collection[str] = (),
    **kwargs: Any,
) -> None:
    """Raises if anything that a training step computes depends on the loss scale.

    A correct step multiplies the loss by the loss scale and divides the gradients by
    it, so its outputs are the same at any loss scale, except for underflow. In a wrong
    step the two do not cancel, and nothing else may show it, as Adam trains on with
    gradients of any size. Put this into your tests, with the step that you train with,
    its first state and a small batch.

    It runs the step some thirty times on copies of its arguments. At falling loss
    scales, powers of two, it looks for outputs that follow a power of the scale, or
    change in a way that underflow does not explain; at an infinite loss scale, for a
    step that is not skipped; and where the loss scale grows, for gradients that are
    unscaled by the new one. The outputs are everything that the step returns or changes
    in place, except for the loss scale and `metrics`.

    Args:
      step: the training step; compile it, as this takes ten times as long otherwise. It
        returns its new state or changes it in place, and may donate its arguments.
      *args: its arguments, which stay as they are. Somewhere among them is one loss
        scale: in an optimizer state, a train state, an `nnx.Optimizer`.
      ignore: the outputs that are meant to depend on the loss scale, one or several, by
        their names in the error: `"result[2]['scaled_norm']"`, or `"result[2]"` for
        everything in it.
      **kwargs: its keyword arguments, likewise; bind one named `ignore` with
        `functools.partial`.

    Raises:
      AssertionError: if outputs depend on the loss scale, or an overflow is not
        skipped. It names the outputs, and says why and what to do.
      ValueError: if there is no loss scale among the arguments, or several; if it is a
        `FixedLossScale`, which compiled steps hold as a constant; if the step is
        skipped at nearly every loss scale and returns numbers that are not finite; if
        two runs of it differ; if nothing that it is given comes back from it; or if a
        name to ignore is not that of an output.
      TypeError: if the arguments are traced, or an argument `ignore` of the step's own
        gets no value.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.adam(1e-3))
      >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
      >>> @jax.jit
      ... def wrong(params, state, x):
      ...     loss, scaled_grads = jax.value_and_grad(loss_fn)(params, x)
      ...     return *tx.apply_gradients(scaled_grads, state, params), loss
      >>> params, x = jnp.ones(3), jnp.ones((2, 3))
      >>> ols.testing.assert_scale_invariant(wrong, params, tx.init(params), x)
      Traceback (most recent call last):
          ...
      AssertionError: the step depends on the loss scale. With twice the loss scale...
    """
    check_keywords(step, ["ignore"], args)
    experiment = Experiment("assert_scale_invariant", step, args, kwargs)
    if isinstance(experiment.loss_scale, FixedLossScale):
        raise ValueError(
            "a FixedLossScale cannot be varied, which a number and None stand for, as "
            "compiled steps hold it as a constant. Test the step with a loss scale "
            "that adapts, such as DynamicLossScale(): the rest is the same"
        )
    fault = _fault(experiment, ignore)
    if fault:
        raise AssertionError(f"the step depends on the loss scale. {fault}")


def _fault(experiment, ignore):
    """The first fault of a step that depends on the loss scale; empty if there is none.

    The text names the outputs, says how they depend on it, and what to do.
    """
    overflowing = experiment.overflowing()
    falling = _falling(experiment)
    fault = stuck(overflowing) or _never_applied(experiment, falling)
    if fault:
        return fault
    usual = falling[0]
    infinite = overflowing[-1]
    judged = not_ignored(ignore, usual.outputs)
    all_series = _all_series(experiment, falling, judged)
    by_powers = powers(all_series)
    differing = _differing(all_series, falling, infinite)
    return (
        _divided(by_powers)
        or _says_applied(infinite, differing)
        or _multiplied(by_powers, all_series, usual)
        or _in_carry(experiment, overflowing, falling, all_series, differing)
        or _at_growth(experiment, falling, all_series)
    )


def _falling(experiment):
    """Trials at falling loss scales, without those in which the step is skipped.

    The highest loss scale at which it is applied is found by bisection.
    """

    def is_skipped(exponent):
        return not experiment.at(exponent).was_applied

    exponents = range(_LOWEST, _WIDE + 1)
    how_many_fit = bisect.bisect_left(exponents, True, key=is_skipped)
    highest = _LOWEST - 1 + how_many_fit
    start = _START if highest == _WIDE else highest
    tried = [start - below for below in _BELOW]
    trials = [experiment.at(x) for x in tried if x >= _LOWEST]
    return [trial for trial in trials if trial.was_applied]


def _never_applied(experiment, falling):
    """The fault of a step that is applied at too few loss scales to compare.

    If its outputs are not finite, it raises a `ValueError`, as no loss scale helps.
    """
    if len(falling) >= _ENOUGH:
        return ""
    trial = falling[0] if falling else experiment.at(_LOWEST)
    outputs = trial.outputs.values()
    if not all(map(is_finite, outputs)):
        raise ValueError(
            f"the step is skipped at all but {len(falling)} loss scales: look for NaN "
            "or inf in the arguments, the loss and the model; diagnose(loss_fn, "
            "params, batch) says where"
        )
    return _NEVER.format(times=len(falling))


def _all_series(experiment, falling, judged):
    """The series of each output in `judged` at the falling loss scales, by path."""
    exponents = np.array([trial.exponent for trial in falling])
    again = experiment.trial(falling[0].loss_scale).outputs
    without = _without_gradients(experiment)
    all_series = {}
    for path in judged:
        if any(path not in trial.outputs for trial in falling):
            continue
        values = np.stack([trial.outputs[path] for trial in falling])
        series = Series(exponents, values, again[path], without.get(path))
        if series.is_noisy:
            raise ValueError(
                f"two runs at the same loss scale differ, in {name_of(path)}. Pass the "
                "step all that it depends on as arguments that can be copied: batches "
                "and PRNG keys as arrays, not iterators or generators"
            )
        all_series[path] = series
    return all_series


def _without_gradients(experiment):
    """The outputs at a loss scale at which all gradients underflow, by path.

    Empty if there is none: at the lowest one they underflow in a step that computes in
    float16, which is the one that overflows at _WIDE.
    """
    lowest = experiment.at(_LOWEST)
    is_narrow = not experiment.at(_WIDE).was_applied
    return lowest.outputs if is_narrow and lowest.was_applied else {}


def _differing(all_series, falling, infinite):
    """The outputs that are not the same at the infinite and all falling loss scales.

    An output that is the same at all of them, such as the mean of a batch, does not
    depend on gradients.
    """

    def is_the_same(path):
        numbers = infinite.outputs[path]
        return all(equal(numbers, trial.outputs[path]) for trial in falling)

    judged = [path for path in all_series if path in infinite.outputs]
    return [path for path in judged if not is_the_same(path)]


def _divided(by_powers):
    """The fault that gradients are divided once too often.

    All other faults may follow from that one.
    """
    negative = {path: power for path, power in by_powers.items() if power < 0}
    return listed(_BY_A_POWER, _named(negative), _DIVIDED)


def _says_applied(infinite, differing):
    """The fault that a step says it was applied at an infinite loss scale."""
    says_applied = infinite.was_applied and not infinite.is_silent
    if says_applied and infinite.is_infinite:
        return applied_at_infinity(differing)
    return ""


def _multiplied(by_powers, all_series, usual):
    """The fault that outputs depend on gradients that are still scaled."""
    # In a silent step, a change may be that of a step that was skipped.
    changing = {} if usual.is_silent else unexplained_changes(all_series)
    other_changes = [
        f"{name_of(path)}, between 2**{low:g} and 2**{high:g}"
        for path, (high, low) in changing.items()
        if path not in by_powers
    ]
    if not by_powers and not other_changes:
        return ""
    by_a_power = listed(_BY_A_POWER, _named(by_powers))
    return by_a_power + listed(_BY_A_CHANGE, other_changes) + _MULTIPLIED


def _named(by_powers):
    """The outputs that follow a power of the loss scale, as text."""
    return [f"2**{power}: {name_of(path)}" for path, power in by_powers.items()]


def _in_carry(experiment, overflowing, falling, all_series, differing):
    """The fault of outputs that come back to the step as they should not."""
    usual = falling[0]
    nudged = nudges(experiment, [usual, overflowing[-1]])
    carry = within(find_carry(experiment, usual, nudged), all_series)
    to_be_skipped = overflowing + [nudge.repeated for nudge in nudged]
    return (
        listed(_NOT_FINITE, _not_finite(falling, carry), APPLIED_REMEDY)
        or left_behind(to_be_skipped, within(carry, differing))
        or listed(_LOST, _lost_weights(experiment, usual, carry), _LAST)
    )


def _not_finite(falling, carry):
    """The outputs that come back, and are not finite although their arguments are."""

    def becomes_infinite(trial, path, place):
        was_finite = is_finite(trial.before.numbers[place])
        return was_finite and not is_finite(trial.outputs[path])

    return [
        path
        for path, place in carry.items()
        if any(becomes_infinite(trial, path, place) for trial in falling)
    ]


def _lost_weights(experiment, usual, carry):
    """The master weights whose rounding to float16 is no parameter's value."""
    outputs = usual.outputs
    halves = [
        outputs[path]
        for path, place in carry.items()
        if experiment.floats[place].dtype == np.float16
    ]

    def is_lost(copy):
        with np.errstate(over="ignore"):
            rounded = copy.astype(np.float16)
        alike = [half for half in halves if half.size == copy.size]
        are_kept = [equal(half, rounded) for half in alike]
        return bool(alike) and not any(are_kept)

    return [path for path in carry if _WEIGHTS in path and is_lost(outputs[path])]


def _at_growth(experiment, falling, all_series):
    """The fault that outputs differ at a step at which the loss scale grows.

    None is found if that step is skipped.
    """
    scale = np.max(experiment.loss_scale.loss_scale)
    exponent = np.log2(scale)
    steady = min(falling, key=lambda trial: abs(trial.exponent - exponent))
    about_to_grow = _about_to_grow(jax.device_put(steady.loss_scale))
    growing = experiment.trial(about_to_grow)
    if not growing.was_applied:
        return ""

    def is_changed(path):
        steady_numbers = steady.outputs[path]
        numbers = growing.outputs.get(path, steady_numbers)
        # Integers and bools may be counts and flags of the growth.
        is_float = numbers.dtype == np.float64
        return is_float and all_series[path].differs(steady_numbers, numbers)

    changing = [path for path in all_series if is_changed(path)]
    return listed(_AT_GROWTH, changing, _ADAPTED)


@jax.jit
def _about_to_grow(loss_scale):
    """The loss scale after finite steps, up to the one before the scale changes.

    After 100,000 steps at the latest.
    """

    def goes_on(steps_and_scale):
        steps, now = steps_and_scale
        is_steady = jnp.all(now() == now.adjust(True)())
        return is_steady & (steps < _LONGEST_INTERVAL)

    def next_step(steps_and_scale):
        steps, now = steps_and_scale
        return steps + 1, now.adjust(True)

    _, last = lax.while_loop(goes_on, next_step, (0, loss_scale))
    return last


_BY_A_POWER = (
    "With twice the loss scale, these outputs, or their changes, are multiplied by"
)
_BY_A_CHANGE = (
    "These outputs change as the loss scale rises, and underflow does not explain it:"
)
_AT_GROWTH = """\
At a step at which the loss scale grows, these come out different than at the same loss scale
without growth:"""
_NOT_FINITE = (
    "Some gradients overflow, but the step is applied, and these become infinite:"
)
_LOST = (
    "These float32 copies of with_master_weights are no longer those of the parameters:"
)

_DIVIDED = """\
So gradients are divided by a loss scale that they are not, or no longer, multiplied by. Compute
them with value_and_scaled_grad(loss_fn, state), or from scale_gradient(loss, state), inside the
step, with the state that it is given and not an older one or a scale kept beside it; leave the
unscaling to the optimizer; and put anything that looks at the size of gradients, such as a clip,
inside: with_loss_scale(optax.chain(clip, …))."""
_MULTIPLIED = """\
So they come from gradients that are still multiplied by the loss scale. To log a norm, unscale
them first: get_loss_scale(state).unscale(scaled_grads). And anything before the wrapper in an
optax.chain sees scaled gradients: put it inside, with_loss_scale(optax.chain(…)). To log the loss
scale, return ols.metrics(state). Name other outputs that are meant to depend on it in ignore=."""
_ADAPTED = """\
So they are unscaled by the new loss scale. Unscale by the one that the loss was multiplied by,
from the state that the step is given, and adapt it afterwards."""
_NEVER = """\
It is skipped at all but {times} loss scales, although what it returns is finite. So gradients are
multiplied by another scale than that of the state that the step is given, such as that of another
optimizer or an older state: use value_and_scaled_grad(loss_fn, state) inside the step."""
_LAST = """\
So something changes the updates of with_master_weights, and what the parameters cannot hold is
lost at every step. Let nothing come after it, a transformation of your own neither:
with_loss_scale(with_master_weights(…)) of the whole optimizer, and optax.apply_updates."""
