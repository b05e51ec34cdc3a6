"""A test for training steps: nothing but the loss scale may depend on the loss scale.

The step runs at falling loss scales, from the highest at which it is applied, and at
those at which gradients overflow. `_dependence` says what the first are evidence of. At
the others, nothing is to change.
"""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._step.gradient import check_keywords
from optax_lossscale.testing import _dependence as dependence
from optax_lossscale.testing._dependence import Series
from optax_lossscale.testing._names import listed, name_of, not_ignored
from optax_lossscale.testing._overflow import (
    APPLIED,
    APPLIED_REMEDY,
    STUCK,
    after_overflow,
    is_stuck,
)
from optax_lossscale.testing._places import what_comes_back
from optax_lossscale.testing._runs import Trial, equal

# Loss scales are powers of two, given by their exponents. A step in float32 or bfloat16
# is applied at far higher ones than _START, but those do not matter.
_START = 30
_LOWEST = -125  # all gradients underflow, or nearly
# A step that is applied at this one has nothing that underflows from _START on down.
_WIDE = 90
# How far below the highest loss scale the others are. Their distances alternate: at equal
# ones, the rounding of 1/3, of which every second bit is set, could follow the scale.
_BELOW = [5 * i // 2 for i in range(13)]
_ENOUGH = 8  # loss scales at which the step is applied


def assert_scale_invariant(
    step: Callable[..., Any],
    *args: Any,
    ignore: str | Collection[str] = (),
    **kwargs: Any,
) -> None:
    """Raises if anything that a training step computes depends on the loss scale.

    A correct step multiplies the loss by the loss scale and divides the gradients by
    it, so the outputs are the same at any loss scale, except for underflow. In a wrong
    step the two do not cancel, and nothing else may show it, as Adam trains on with
    gradients of any size. Put this into your tests, with the step that you train with,
    its first state and a small batch.

    It runs the step some thirty times on copies of its arguments. At falling loss
    scales, powers of two, it looks for outputs that are proportional to a power of the
    scale, or change in a way that underflow does not explain; and at an infinite one,
    for a step that is not skipped. Outputs are all that the step returns or changes,
    but for the loss scale and `metrics`.

    Args:
      step: the training step, compiled, or else this takes ten times as long. It
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
        skipped, and why.
      ValueError: if there is no loss scale among the arguments, or several; if it is a
        `FixedLossScale`, which compiled steps hold as a constant; if the step is
        skipped at every loss scale; if two runs of it differ; or if a name to ignore is
        not that of an output.

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
    fault = _accusation(trial, ignore)
    if fault:
        raise AssertionError(f"the step depends on the loss scale. {fault}")


def _accusation(trial, ignore):
    """What depends on the loss scale, how, and what to do; empty if there is nothing."""
    falling = _falling(trial)
    if len(falling) < _ENOUGH:
        return _never_applied(trial.at(2.0**_LOWEST), len(falling))
    usual = falling[0]
    series = _series(trial, falling, not_ignored(ignore, usual))
    powers = {}
    for path, x in series.items():
        powers[path] = dependence.power(x)
    divided = [path for path in series if powers[path] < 0]
    if divided:  # all else may follow from these
        return _by_a_power(powers, divided, _DIVIDED)

    overflowing = trial.overflowing()
    beyond = overflowing[-1]
    if any(is_stuck(run) for run in overflowing):
        return STUCK
    # What does not depend on gradients may change as it does at any other loss scale.
    differing = [path for path in series if _differ(beyond, falling, path)]
    can_be_skipped = usual.flags.size > 0
    is_applied = np.isinf(beyond.exponent) and beyond.was_applied
    if can_be_skipped and is_applied and differing:
        return listed(APPLIED, differing, APPLIED_REMEDY)
    multiplied = [path for path in series if powers[path] > 0]
    if multiplied:
        return _by_a_power(powers, multiplied, _MULTIPLIED)
    back = what_comes_back(trial, [usual, beyond])
    to_stay = {path: back[path] for path in differing if path in back}
    fault = after_overflow(trial, overflowing, to_stay)
    if fault or not can_be_skipped:
        return fault
    return listed(_BY_A_CHANGE, _changes(series), _MULTIPLIED)


def _by_a_power(powers, paths, remedy):
    """Outputs with the powers of the loss scale that they follow, and what to do."""
    followed = [f"2**{powers[path]}: {name_of(path)}" for path in paths]
    return listed(_BY_A_POWER, followed, remedy)


def _falling(trial):
    """Runs at falling loss scales, from the highest at which the step is applied."""
    highest = _START
    while highest > _LOWEST and not trial.at(2.0**highest).was_applied:
        highest -= 1
    falling = []
    for below in _BELOW:
        run = trial.at(2.0 ** (highest - below))
        if run.was_applied:
            falling.append(run)
    return falling


def _never_applied(run, times):
    """What to say of a step that is skipped at nearly all loss scales."""
    are_finite = [np.isfinite(x).all() for x in run.outputs.values()]
    if not all(are_finite):
        raise ValueError(
            f"the step is skipped at all but {times} loss scales: look for NaN or inf "
            "in the arguments, the loss and the model; diagnose(loss_fn, params, "
            "batch) says where"
        )
    return _NEVER.format(times=times)


def _series(trial, falling, judged):
    """Outputs at the falling loss scales, by place."""
    exponents = np.array([run.exponent for run in falling])
    again = trial.run(falling[0].before)
    lowest = trial.at(2.0**_LOWEST)
    underflows = lowest.was_applied and not trial.at(2.0**_WIDE).was_applied
    series = {}
    for path in judged:
        values = np.stack([run.outputs[path] for run in falling])
        noise = dependence.distance(values[0], again.outputs[path])
        if noise > 0.01 * dependence.distance(values[0], 0):
            raise ValueError(
                f"two runs at the same loss scale differ, in {name_of(path)}. Pass the "
                "step all that it depends on as arguments that can be copied: batches "
                "and PRNG keys as arrays, not iterators or generators"
            )
        without = lowest.outputs.get(path) if underflows else None
        series[path] = Series(exponents, values, without, noise)
    return series


def _changes(series):
    """The outputs that change other than by underflow, in words."""
    emerging = {}
    for path, x in series.items():
        emerging[path] = dependence.emerging(x).any(axis=1)
    how_many = sum(emerging.values())
    changes = []
    for path, x in series.items():
        # Where numbers emerge elsewhere, what is computed of many may change by
        # underflow.
        none_elsewhere = np.equal(how_many, emerging[path])
        row = dependence.change(x, none_elsewhere)
        if row is not None:
            high, low = x.exponents[row : row + 2]
            changes.append(f"{name_of(path)}, between 2**{low:g} and 2**{high:g}")
    return changes


def _differ(beyond, falling, path):
    """Whether an output, if it is there, is another beyond than at a falling loss scale."""
    if path not in beyond.outputs:
        return False
    numbers = beyond.outputs[path]
    return any(not equal(numbers, run.outputs[path]) for run in falling)


_BY_A_POWER = (
    "With twice the loss scale, these outputs, or their changes, are multiplied by"
)
_BY_A_CHANGE = (
    "These outputs change as the loss scale rises, and underflow does not explain it:"
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
_NEVER = """\
It is skipped at all but {times} loss scales, although what it returns is finite. So gradients are
multiplied by another scale than that of the state that the step is given, such as that of another
optimizer or an older state: use value_and_scaled_grad(loss_fn, state) inside the step."""
