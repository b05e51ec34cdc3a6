"""A test for training steps: nothing but the loss scale may depend on the loss scale."""

import bisect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._step.gradient import refuse_shared_names
from optax_lossscale.testing._dependence import changes, power, share_that_vanished
from optax_lossscale.testing._names import listed, name_of, not_ignored
from optax_lossscale.testing._overflow import (
    APPLIED,
    APPLIED_REMEDY,
    STUCK,
    is_stuck,
    left_behind,
    regimes,
)
from optax_lossscale.testing._places import what_comes_back
from optax_lossscale.testing._runs import Numbers, Run, Trial, equal, flat

_LOWEST = -125  # the exponent of a loss scale at which all gradients underflow, or nearly
_WIDE = 90  # one at which only steps in float32 or bfloat16 are applied, where nothing underflows
# Of the three loss scales that are compared, the exponent of the highest, and the gap between two.
_FAR_APART = (20, 20)  # where nothing underflows
_CAREFUL = (10, 5)  # where it cannot be seen whether the step is applied: most are, at these
# Elsewhere the highest is that at which the step is still applied, and the gap is as wide as it
# can be before numbers vanish: float16 has 40 exponents from overflow to zero.
_GAPS = (10, 5, 2)
_NEAR = 2  # the gap between those by which a power is named
_VANISHED = 0.01  # of the numbers of an array
_FEW = 16  # numbers, which may seem to follow a power of the loss scale
_LONGEST_INTERVAL = 100_000  # steps


def assert_scale_invariant(
    step: Callable[..., Any], *args: Any, ignore: str | Collection[str] = (), **kwargs: Any
) -> None:
    """Raises if anything that a training step computes depends on the loss scale.

    A correct step multiplies the loss by the loss scale and divides the gradients by it, so the
    outputs are the same at any loss scale, except for underflow. In a wrong step the two do not
    cancel, and nothing else may show it, as Adam trains on with gradients of any size. Put this
    into your tests, with the step that you train with, its first state and a small batch.

    It runs the step some twenty times on copies of its arguments. It compares three loss scales,
    powers of two: in float16 the highest at which the step is applied, and two so far below it
    that almost nothing underflows. Numbers may change by a tenth of what the step changes them by,
    and a quarter of them by more; where nothing underflows, not at all. Where much of an array
    underflows, only changes are accused that follow a power of the loss scale. At an infinite one
    the step is to be skipped, and where the loss scale grows nothing else may change. Outputs are
    all that the step returns or changes, but for the loss scale and `metrics`.

    Args:
      step: the training step, compiled, or else this takes ten times as long. It returns its
        new state or changes it in place, and may donate its arguments.
      *args: its arguments, which stay as they are. Somewhere among them is one loss scale that
        adapts, in an optimizer state, a train state or an `nnx.Optimizer`; fixed ones, and None,
        do not count beside it.
      ignore: the outputs that are meant to depend on the loss scale, one or several, by their
        names in the error: `"result[2]['scaled_norm']"`, or `"result[2]"` for everything in it.
      **kwargs: its keyword arguments, likewise; bind one named `ignore` with `functools.partial`.

    Raises:
      AssertionError: if outputs depend on the loss scale, or an overflow is not skipped, and why.
      ValueError: if there is no loss scale among the arguments, or several that adapt; if all are
        `FixedLossScale`s, which compiled steps hold as constants; if the step is skipped at
        every loss scale; if two runs of it differ; or if a name to ignore is not that of an
        output.

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
      AssertionError: the step depends on the loss scale. These outputs change with the...
    """
    refuse_shared_names(step, ["ignore"], args)
    trial = Trial("assert_scale_invariant", step, args, kwargs)
    if isinstance(trial.loss_scale, FixedLossScale):
        raise ValueError(
            "a FixedLossScale cannot be varied, as compiled steps hold it as a constant. Test the "
            "step with a loss scale that adapts, such as DynamicLossScale(): the rest is the same"
        )
    if said := _accusation(trial, ignore):
        raise AssertionError(f"the step depends on the loss scale. {said}")


class _Comparison(NamedTuple):
    """Runs at three loss scales, and what they are evidence of."""

    runs: list[Run]  # from the highest loss scale to the lowest
    gap: int  # between two of them, in bits
    near: list[Run]  # at the highest and just below it, where Adam and clips follow a power, too
    vanished: float  # the largest share of an array; if too much, only powers of the scale count
    starts: Numbers  # what comes out without gradients, where some underflow


def _accusation(trial, ignore):
    """What depends on the loss scale, how, and what to do; empty if there is nothing."""
    overflowing = trial.overflowing()
    if any(map(is_stuck, overflowing)):
        return STUCK
    top = _highest(trial)
    usual = trial.at(1.0 if top == _WIDE else 2.0 ** max(top, _LOWEST))
    beyond = overflowing[-1]
    back = what_comes_back(trial, regimes(trial, usual, overflowing))
    judged = not_ignored(ignore, usual)
    noise = _noise(trial, usual, judged)
    # What does not depend on gradients may change as it does at any other loss scale.
    differing = [path for path in judged if _differs(path, usual, beyond)]
    comparison = _comparison(trial, top, back)
    changing = _changing(comparison, back, judged, noise)
    state = [text for path, text in changing.items() if path in back]
    if any(text.startswith("2**-") for text in state):  # from which all else may follow
        return listed(_CHANGING, state, _DIVIDED)
    is_applied = np.isinf(beyond.exponent) and beyond.flags.size > 0 and beyond.was_applied
    if is_applied and differing:
        return listed(APPLIED, differing, APPLIED_REMEDY)
    if not all(run.was_applied for run in comparison.runs):
        return _not_applied(usual, back)
    return (
        listed(_CHANGING, state, _DIVIDED)
        or listed(_CHANGING, list(changing.values()), _MULTIPLIED)
        or left_behind(trial, overflowing, {p: back[p] for p in differing if p in back})
        or listed(_LOST, _lost_weights(usual, judged), _LAST)
        or listed(_AT_GROWTH, _changed_at_growth(trial, usual, judged, noise), _ADAPTED)
    )


def _highest(trial):
    """The highest exponent at which the step is applied, or `_WIDE`; below `_LOWEST` if none."""
    exponents = range(_LOWEST, _WIDE + 1)

    def is_skipped(exponent):
        return not trial.at(2.0**exponent).was_applied

    return _LOWEST - 1 + bisect.bisect_left(exponents, True, key=is_skipped)


def _noise(trial, run, judged):
    """How far apart each output is in two runs that should be the same."""
    again = trial.run(run.before)
    noise = {}
    for path in judged:
        x = run.outputs[path]
        is_finite = np.isfinite(x) & np.isfinite(again.outputs[path])
        noise[path] = np.linalg.norm(x[is_finite] - again.outputs[path][is_finite])
        if noise[path] > 0.01 * np.linalg.norm(x[is_finite]):
            raise ValueError(
                f"two runs at the same loss scale differ, in {name_of(path)}. Pass the step all "
                "that it depends on as arguments that can be copied: batches and PRNG keys as "
                "arrays, not iterators or generators"
            )
    return noise


def _differs(path, run, other):
    return path in other.outputs and not equal(run.outputs[path], other.outputs[path])


def _comparison(trial, top, back):
    """The runs to compare."""

    def three(top, gap):
        return [trial.at(2.0 ** (top - i * gap)) for i in range(3)]

    if not trial.at(1.0).flags.size:
        top, gap = _CAREFUL
        return _Comparison(three(top, gap), gap, three(top, _NEAR), 1.0, {})
    if top == _WIDE:
        top, gap = _FAR_APART
        return _Comparison(three(top, gap), gap, three(top, _NEAR), 0.0, {})
    without = trial.at(2.0**_LOWEST).outputs
    starts = without | {path: flat(trial.floats[place]) for path, place in back.items()}
    for gap in _GAPS:
        runs = three(top, gap)
        high = runs[0].outputs
        low = runs[-1].outputs
        arrays = [path for path in back if path in high and path in low and path in without]
        shares = [share_that_vanished(high[p], low[p], without[p]) for p in arrays]
        vanished = max(shares, default=0.0)
        if vanished <= _VANISHED:
            break
    return _Comparison(runs, gap, three(top, _NEAR), vanished, starts)


def _not_applied(run, back):
    """What to say of a step that is skipped at loss scales at which it should be applied."""
    made = [x for path, x in run.outputs.items() if path not in back]
    if not all(np.isfinite(x).all() for x in made):
        raise ValueError(
            "the step is skipped at all loss scales: look for NaN or inf in the arguments, the "
            "loss and the model; diagnose(loss_fn, params, batch) says where"
        )
    return _NOT_APPLIED


def _changing(comparison, back, judged, noise):
    """Which outputs change with the loss scale, and how, in words."""
    said = {}
    for path in judged:
        if not all(path in run.outputs for run in comparison.runs + comparison.near):
            continue
        values = [run.outputs[path] for run in comparison.runs]
        high = values[0]
        low = values[-1]
        start = comparison.starts.get(path, high)
        followed = power(values, comparison.gap)
        if followed is not None and high.size > _FEW:
            start = high  # By chance, no array follows a power.
        if not changes(high, low, start, noise[path]):
            continue
        # One number that vanishes may change what is computed of many, such as their least.
        is_clear = comparison.vanished <= (_VANISHED if path in back else 0)
        if followed is None and is_clear:
            followed = power([run.outputs[path] for run in comparison.near], _NEAR)
        if followed is not None:
            said[path] = f"2**{followed}: {name_of(path)}"
        elif is_clear:
            said[path] = _in_numbers(path, comparison.runs)
    return said


def _in_numbers(path, runs):
    """The name of an output, and of a single number what it is."""
    if runs[0].outputs[path].size > 1:
        return name_of(path)

    def number(run):
        return f"{run.outputs[path].item():.4g} at 2**{run.exponent:.0f}"

    return f"{name_of(path)} is {number(runs[-1])} and {number(runs[0])}"


def _changed_at_growth(trial, usual, judged, noise):
    """What comes out different at a step at which the loss scale grows."""
    given = trial.run(trial.loss_scale)
    steady = given if given.was_applied else usual
    steps, about_to_grow = jax.device_get(_about_to_grow(jax.device_put(steady.before)))
    growing = trial.run(about_to_grow)
    if steps >= _LONGEST_INTERVAL or not growing.was_applied:
        return []

    def moves(path):
        # Not of flags and counts, which may be of the growth itself.
        x = steady.outputs[path]
        return x.dtype == np.float64 and changes(x, growing.outputs[path], x, noise[path])

    return [path for path in judged if path in growing.outputs and moves(path)]


@jax.jit
def _about_to_grow(loss_scale):
    """How many finite steps change nothing but counters, and the loss scale after them."""

    def goes_on(carry):
        steps, now = carry
        return (steps < _LONGEST_INTERVAL) & jnp.all(now() == now.adjust(True)())

    def next_step(carry):
        steps, now = carry
        return steps + 1, now.adjust(True)

    return lax.while_loop(goes_on, next_step, (0, loss_scale))


def _lost_weights(run, judged):
    """The float32 copies of which no float16 output is the rounding."""
    halves = [run.outputs[path] for path in judged if run.dtypes[path] == np.float16]

    def is_lost(path):
        with np.errstate(over="ignore"):
            rounded = run.outputs[path].astype(np.float16)
        alike = [x for x in halves if x.size == rounded.size]
        return bool(alike) and not any(equal(x, rounded) for x in alike)

    copies = [path for path in judged if any(path[: len(m)] == m for m in run.master_weights)]
    return [path for path in copies if run.dtypes[path] == np.float32 and is_lost(path)]


_CHANGING = """\
These outputs change with the loss scale, and underflow does not explain it. Where 2**1 stands
before a name, twice the loss scale doubles the output, or its change; where 2**-1, halves it:"""
_AT_GROWTH = """\
At a step at which the loss scale grows, these come out different than at the same loss scale
without growth:"""
_LOST = "These float32 copies of with_master_weights are no longer those of the parameters:"

_DIVIDED = """\
So gradients are divided by another loss scale than they are multiplied by, or something looks at
their size while they are scaled. Compute them with value_and_scaled_grad(loss_fn, state), or from
scale_gradient(loss, state), inside the step, with the state that it is given and not an older one
or a scale kept beside it; leave the unscaling to the optimizer; and put anything that looks at
the size of gradients, such as a clip, inside: with_loss_scale(optax.chain(clip, …))."""
_MULTIPLIED = """\
So they come from gradients that are still scaled. To log a norm, unscale them first:
get_loss_scale(state).unscale(scaled_grads). To log the loss scale, return ols.metrics(state).
Name other outputs that are meant to depend on it in ignore=."""
_ADAPTED = """\
So they are unscaled by the new loss scale. Unscale by the one that the loss was multiplied by,
from the state that the step is given, and adapt it afterwards."""
_NOT_APPLIED = """\
It is skipped at loss scales at which it should be applied, although what it returns is finite. So
gradients are multiplied by another scale than that of the state that the step is given, such as
that of another optimizer or an older state: use value_and_scaled_grad(loss_fn, state) inside the
step."""
_LAST = """\
So something changes the updates of with_master_weights, and what the parameters cannot hold is
lost at every step. Let nothing come after it, a transformation of your own neither:
with_loss_scale(with_master_weights(…)) of the whole optimizer, and optax.apply_updates."""
