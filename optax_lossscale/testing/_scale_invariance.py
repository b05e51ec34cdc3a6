"""The assertion that nothing but the loss scale depends on the loss scale.

The step runs at falling loss scales, from the highest at which it is applied. Each
output is then a series, and `_dependence.py` says whether it depends on the loss scale.
The step also runs at an infinite loss scale, where it should be skipped, and at one
that is about to grow, where its outputs should be those of any other step.

`_fault` asks these questions in such an order that the first fault may be the
cause of all others. It returns that fault as text, with what to do.
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
from optax_lossscale.testing import _dependence as dependence
from optax_lossscale.testing._dependence import Series
from optax_lossscale.testing._names import listed, name_of, not_ignored
from optax_lossscale.testing._overflow import (
    APPLIED,
    APPLIED_REMEDY,
    STUCK,
    is_stuck,
    left_behind,
)
from optax_lossscale.testing._places import what_comes_back
from optax_lossscale.testing._runs import Trial, equal

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
      TypeError: if the arguments are traced.

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
    trial = Trial("assert_scale_invariant", step, args, kwargs)
    if isinstance(trial.loss_scale, FixedLossScale):
        raise ValueError(
            "a FixedLossScale cannot be varied, which a number and None stand for, as "
            "compiled steps hold it as a constant. Test the step with a loss scale "
            "that adapts, such as DynamicLossScale(): the rest is the same"
        )
    fault = _fault(trial, ignore)
    if fault:
        raise AssertionError(f"the step depends on the loss scale. {fault}")


def _fault(trial, ignore):
    """The first fault of a step that depends on the loss scale; empty if there is none.

    The text names the outputs, says how they depend on it, and what to do.
    """
    overflowing = trial.overflowing()
    falling = _falling(trial)
    fault = _stuck_or_never_applied(trial, overflowing, falling)
    if fault:
        return fault
    usual = falling[0]
    infinite = overflowing[-1]
    series = _series(trial, falling, not_ignored(ignore, usual))
    powers = _powers(series)
    # An output that is the same at all loss scales, such as the mean of a batch, does
    # not depend on gradients.
    differing = [path for path in series if _differs(infinite, falling, path)]
    fault = (
        _divided(powers)
        or _overflow_applied(infinite, differing)
        or _multiplied(series, powers, usual)
    )
    if fault:
        return fault
    all_back, nudged = what_comes_back(trial, [usual, infinite])
    back = {path: all_back[path] for path in series if path in all_back}
    to_stay = {path: back[path] for path in differing if path in back}
    return (
        listed(_NOT_FINITE, _not_finite(falling, back), APPLIED_REMEDY)
        or left_behind(overflowing + nudged, to_stay)
        or listed(_LOST, _lost_weights(trial, usual, back), _LAST)
        or listed(_AT_GROWTH, _changed_at_growth(trial, falling, series), _ADAPTED)
    )


def _stuck_or_never_applied(trial, overflowing, falling):
    """The fault of a step that is applied at too few loss scales to compare.

    If its outputs are not finite, it raises a `ValueError`, as no loss scale helps.
    """
    if is_stuck(overflowing):
        return STUCK
    if len(falling) >= _ENOUGH:
        return ""
    run = falling[0] if falling else trial.at(2.0**_LOWEST)
    if not all(np.isfinite(x).all() for x in run.outputs.values()):
        raise ValueError(
            f"the step is skipped at all but {len(falling)} loss scales: look for NaN "
            "or inf in the arguments, the loss and the model; diagnose(loss_fn, "
            "params, batch) says where"
        )
    return _NEVER.format(times=len(falling))


def _divided(powers):
    """The fault that gradients are divided once too often.

    All other faults may follow from that one.
    """
    negative = {path: power for path, power in powers.items() if power < 0}
    return listed(_BY_A_POWER, _named(negative), _DIVIDED)


def _overflow_applied(infinite, differing):
    """The fault that a step is applied at an infinite loss scale."""
    is_told = infinite.flags.size > 0
    if is_told and np.isinf(infinite.exponent) and infinite.was_applied:
        return listed(APPLIED, differing, APPLIED_REMEDY)
    return ""


def _not_finite(falling, back):
    """The paths of outputs that come back to the step, and are not finite."""
    return [
        path
        for path, place in back.items()
        if any(
            np.isfinite(run.given[place]).all()
            and not np.isfinite(run.outputs[path]).all()
            for run in falling
        )
    ]


def _multiplied(series, powers, usual):
    """The fault that outputs depend on gradients that are still scaled."""
    # Without flags, a change may be that of a step that was skipped.
    changes = _changes(series, powers) if usual.flags.size else []
    if not powers and not changes:
        return ""
    by_a_power = listed(_BY_A_POWER, _named(powers))
    return by_a_power + listed(_BY_A_CHANGE, changes) + _MULTIPLIED


def _named(powers):
    """The outputs that follow a power of the loss scale, as text."""
    return [f"2**{power}: {name_of(path)}" for path, power in powers.items()]


def _falling(trial):
    """Runs at falling loss scales, without those in which the step is skipped.

    The highest loss scale at which it is applied is found by bisection.
    """

    def is_skipped(exponent):
        return not trial.at(2.0**exponent).was_applied

    exponents = range(_LOWEST, _WIDE + 1)
    how_many_fit = bisect.bisect_left(exponents, True, key=is_skipped)
    highest = _LOWEST - 1 + how_many_fit
    start = _START if highest == _WIDE else highest
    tried = [start - below for below in _BELOW]
    runs = [trial.at(2.0**exponent) for exponent in tried if exponent >= _LOWEST]
    return [run for run in runs if run.was_applied]


def _series(trial, falling, judged):
    """The series of each output in `judged` at the falling loss scales, by path."""
    exponents = np.array([run.exponent for run in falling])
    again = trial.run(falling[0].loss_scale)
    lowest = trial.at(2.0**_LOWEST)
    underflows = lowest.was_applied and not trial.at(2.0**_WIDE).was_applied
    series = {}
    for path in judged:
        if any(path not in run.outputs for run in falling):
            continue
        values = np.stack([run.outputs[path] for run in falling])
        noise = dependence.distance(values[0], again.outputs[path])
        if noise > 0.01 * dependence.norm(values[0]):
            raise ValueError(
                f"two runs at the same loss scale differ, in {name_of(path)}. Pass the "
                "step all that it depends on as arguments that can be copied: batches "
                "and PRNG keys as arrays, not iterators or generators"
            )
        without = lowest.outputs.get(path) if underflows else None
        series[path] = Series(exponents, values, without, noise)
    return series


def _powers(series):
    """The power of the loss scale that each output follows, by path, if it does."""
    powers = {}
    for path, x in series.items():
        power = dependence.power(x)
        if power is not None:
            powers[path] = power
    return powers


def _changes(series, powers):
    """The outputs that change in a way that underflow does not explain, as text.

    Outputs that follow a power of the loss scale are not repeated.
    """
    emerging = {path: dependence.emerging(x).any(axis=1) for path, x in series.items()}
    how_many = sum(emerging.values())
    changes = []
    for path, x in series.items():
        # Where numbers of another output emerge from underflow, an output that is
        # computed from many numbers may change for that reason.
        none_elsewhere = np.equal(how_many, emerging[path])
        row = dependence.change(x, none_elsewhere)
        if row is not None and path not in powers:
            high, low = x.exponents[row : row + 2]
            changes.append(f"{name_of(path)}, between 2**{low:g} and 2**{high:g}")
    return changes


def _differs(infinite, falling, path):
    """Whether an output at the infinite loss scale differs from one at a falling one.

    False if there is no such output at the infinite loss scale.
    """
    if path not in infinite.outputs:
        return False
    numbers = infinite.outputs[path]
    return any(not equal(numbers, run.outputs[path]) for run in falling)


def _changed_at_growth(trial, falling, series):
    """The outputs that differ from the usual ones at a step at which the scale grows.

    Empty if that step is skipped.
    """
    exponent = np.log2(np.max(trial.loss_scale.loss_scale))
    steady = min(falling, key=lambda run: abs(run.exponent - exponent))
    about_to_grow = _about_to_grow(jax.device_put(steady.loss_scale))
    growing = trial.run(jax.device_get(about_to_grow))
    if not growing.was_applied:
        return []

    changed = []
    for path, x in series.items():
        usual = steady.outputs[path]
        change = dependence.distance(usual, growing.outputs.get(path, usual))
        # Integers and bools may be counts and flags of the growth.
        is_float = usual.dtype == np.float64
        if is_float and change > dependence.negligible(usual, x.noise):
            changed.append(path)
    return changed


@jax.jit
def _about_to_grow(loss_scale):
    """The loss scale after finite steps, up to the one before the scale changes.

    After 100,000 steps at the latest.
    """

    def goes_on(carry):
        steps, now = carry
        return (steps < _LONGEST_INTERVAL) & jnp.all(now() == now.adjust(True)())

    def next_step(carry):
        steps, now = carry
        return steps + 1, now.adjust(True)

    _, last = lax.while_loop(goes_on, next_step, (0, loss_scale))
    return last


def _lost_weights(trial, run, back):
    """The paths of master weights whose rounding to float16 is no parameter's value."""
    halves = [
        run.outputs[path]
        for path, place in back.items()
        if trial.floats[place].dtype == np.float16
    ]
    lost = []
    for path in back:
        copy = run.outputs[path]
        alike = [half for half in halves if half.size == copy.size]
        with np.errstate(over="ignore"):
            rounded = copy.astype(np.float16)
        is_lost = alike and not any(equal(half, rounded) for half in alike)
        if _WEIGHTS in path and is_lost:
            lost.append(path)
    return lost


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
