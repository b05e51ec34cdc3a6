"""A test for training steps: nothing but the loss scale may depend on the loss scale."""

import re
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.validation import at_hand
from optax_lossscale._step.gradient import refuse_shared_names
from optax_lossscale.testing import _dependence as dependence
from optax_lossscale.testing._dependence import Series
from optax_lossscale.testing._runs import Run, Runs, make_runs, same, the_loss_scale

_FEW = 100  # numbers of an output that may be loss scales
_SHOWN = 8


def assert_scale_invariant(
    step: Callable[..., Any], *args: Any, ignore: str | Collection[str] = (), **kwargs: Any
) -> None:
    """Raises if anything that a training step computes depends on the loss scale.

    A correct step multiplies the loss by the loss scale and divides the gradients by it, so the
    outputs are the same at any loss scale, except for underflow. In a wrong step the two do not
    cancel, and nothing else may show it, as Adam trains on with gradients of any size. Put this
    into your tests, with the step that you train with, its first state and a small batch.

    It runs the step some thirty times on copies of its arguments. At falling loss scales, powers
    of two, it looks for outputs that are proportional to a power of the scale, or change in a way
    that underflow does not explain; at an infinite one, for a step that is not skipped; and where
    the loss scale grows, for gradients unscaled by the new one. Outputs are all that the step
    returns or changes, but for the loss scale and `metrics`.

    Args:
      step: the training step, compiled, or else this takes ten times as long. It returns its
        new state or changes it in place, and may donate its arguments.
      *args: its arguments, which stay as they are. Somewhere among them is one loss scale: in an
        optimizer state, a train state, an `nnx.Optimizer`.
      ignore: the outputs that are meant to depend on the loss scale, one or several, by their
        names in the error: `"result[2]['scaled_norm']"`, or `"result[2]"` for everything in it.
      **kwargs: its keyword arguments, likewise; bind one named `ignore` with `functools.partial`.

    Raises:
      AssertionError: if outputs depend on the loss scale, or an overflow is not skipped, and why.
      ValueError: if there is no loss scale among the arguments, or several; if it is a
        `FixedLossScale`, which compiled steps hold as a constant; if the step is skipped at every
        loss scale; if two runs of it differ; or if a name to ignore is not that of an output.

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
    refuse_shared_names(step, ["ignore"], args)
    arguments = (args, kwargs)
    at_hand("assert_scale_invariant", arguments)
    loss_scale = the_loss_scale(arguments)
    if isinstance(loss_scale, FixedLossScale):
        raise ValueError(
            "a FixedLossScale cannot be varied, as compiled steps hold it as a constant. Test the "
            "step with a loss scale that adapts, such as DynamicLossScale(): the rest is the same"
        )
    runs = make_runs(step, arguments, loss_scale)
    names = _compared(runs, [ignore] if isinstance(ignore, str) else list(ignore))
    if accused := _accusation(runs, {name: _series(name, runs) for name in names}):
        raise AssertionError(f"the step depends on the loss scale. {accused}")


def _compared(runs: Runs, ignored: list[str]) -> list[str]:
    """The names of the outputs to compare."""
    names = list(runs.falling[0].outputs)
    is_in = lambda name, place: name == place or name.startswith((f"{place}[", f"{place}."))
    for place in ignored:
        if not any(is_in(name, place) for name in names):
            shown = "\n".join(f"  {name}" for name in names)
            raise ValueError(f"ignore={place!r} names no output. There are\n{shown}")
    names = [name for name in names if not any(is_in(name, place) for place in ignored)]
    is_everywhere = lambda name: all(name in run.outputs for run in runs.compared)
    return [name for name in names if is_everywhere(name) and not _is_loss_scale(name, runs)]


def _is_loss_scale(name: str, runs: Runs) -> bool:
    """Whether an output is the loss scale or one of its numbers, by its name or its values."""
    if re.search(r"loss_scale\w*\W*(\[\d+\])*$", name):
        return True
    values = np.stack([run.outputs[name] for run in runs.compared])
    varying = values[:, (values != values[0]).any(0)]
    own = np.stack([_numbers(run) for run in runs.compared])
    is_one = lambda x: np.isclose(own, x[:, None], rtol=1e-5, atol=0, equal_nan=True).all(0).any()
    return "norm" not in name and 0 < varying.shape[1] <= _FEW and all(map(is_one, varying.T))


def _numbers(run: Run) -> np.ndarray:
    """What a loss scale may be logged as: before and after the step, its state and logarithms."""
    leaves = [np.ravel(x) for x in jax.tree.leaves((run.before, run.after))]
    scales = np.concatenate([np.ravel(x.loss_scale) for x in (run.before, *run.after)])
    logarithms = [np.log2(scales), np.log(scales), np.log10(scales)]
    numbers = [*leaves, *logarithms, 1 / scales, scales / scales[0]]
    return np.concatenate(numbers).astype(np.float64)


def _series(name: str, runs: Runs) -> Series:
    """An output at the falling loss scales, with what two runs at the highest differ by."""
    values = np.stack([run.outputs[name] for run in runs.falling])
    noise = dependence.norm_of_difference(values[0], runs.again.outputs[name])
    if noise > 0.01 * dependence.norm_of_difference(values[0], np.zeros_like(values[0])):
        raise ValueError(
            f"two runs at the same loss scale differ, in {name}. Pass the step all that it "
            "depends on as arguments that can be copied: batches and PRNG keys as arrays, not "
            "iterators or generators"
        )
    without = runs.lowest.outputs.get(name) if runs.lowest else None
    return Series(runs.exponents, values, without, noise)


def _accusation(runs: Runs, series: dict[str, Series]) -> str:
    """What depends on the loss scale, how, and what to do; empty if there is nothing."""
    powers = {name: p for name, x in series.items() if (p := dependence.power(x))}
    # The negative ones first: of Adam's they leave parameters that follow the inverse.
    of_power = [f"2**{powers[n]}: {n}" for n in sorted(powers, key=lambda n: powers[n] > 0)]
    said = _listed(_BY_A_POWER, of_power)
    if min(powers.values(), default=0) < 0:  # from which all else may follow
        return "\n".join([*said, _DIVIDED])
    changes = _changes(series, runs.reach)
    said += _listed(_BY_A_CHANGE, [text for name, text in changes.items() if name not in powers])
    if stays := _changed_at_infinity(runs, series):
        return "\n".join([*said, *_listed(_AT_INFINITY, stays), _DIVIDED])
    if said:
        return "\n".join([*said, _MULTIPLIED])
    if broken := _broken_at_infinity(runs, series):
        return "\n".join([*_listed(_NOT_FINITE, broken), _NOT_SKIPPED])
    moved = _listed(_AT_GROWTH, _changed_at_growth(runs, series))
    return "\n".join([*moved, _ADAPTED]) if moved else ""


def _changes(series: dict[str, Series], reach: float) -> dict[str, str]:
    """Where outputs change other than by underflow, in words."""
    emerging = {name: dependence.emerging(x).any(1) for name, x in series.items()}
    how_many = sum(emerging.values())
    changes = {}
    for name, x in series.items():
        # Where numbers emerge elsewhere, what is computed of many may change by underflow.
        looked_at = (x.exponents[1:] >= reach) & (how_many == emerging[name])
        row = dependence.change(x, looked_at)
        if row is None:
            continue
        (high, low), (above, below) = x.exponents[row : row + 2], x.values[row : row + 2]
        changes[name] = f"{name}, between 2**{low} and 2**{high}"
        if x.values.shape[1] == 1:
            changes[name] = f"{name} is {below[0]:.4g} at 2**{low} and {above[0]:.4g} at 2**{high}"
    return changes


def _changed_at_infinity(runs: Runs, series: dict[str, Series]) -> list[str]:
    """What an infinite loss scale changes, and leaves finite, where it should skip the step."""
    infinite = runs.infinite
    if infinite is None or not infinite.was_applied:
        return []
    if all(same(after, infinite.before) for after in infinite.after):  # it was not even seen
        return []
    differs = lambda x, y: dependence.norm_of_difference(x, y) > 0
    given = {name: x.values[0] for name, x in series.items() if name in infinite.outputs}
    return [name for name, usual in given.items() if differs(infinite.outputs[name], usual)]


def _broken_at_infinity(runs: Runs, series: dict[str, Series]) -> list[str]:
    """The state that is not finite after an infinite loss scale, at which the step is skipped."""
    made = runs.infinite.outputs if runs.infinite else {}
    usual = {name: x.values[-1] for name, x in series.items() if name in made}
    distance, olds = dependence.norm_of_difference, [x for x in runs.given if x.size > 1]
    is_near = lambda new, old: distance(new, old) < distance(old, np.zeros_like(old)) / 2
    became = lambda new: any(x.shape == new.shape and is_near(new, x) for x in olds)
    is_state = lambda name: re.search(r"_state|\.(mu|nu|trace)\b", name) or became(usual[name])
    broken = [n for n, x in usual.items() if np.isfinite(x).all() > np.isfinite(made[n]).all()]
    return [name for name in broken if is_state(name)]


def _changed_at_growth(runs: Runs, series: dict[str, Series]) -> list[str]:
    """What comes out different at a step at which the loss scale grows."""
    growing = runs.growing
    if growing is None or not growing.was_applied:
        return []
    usual, grown = runs.steady.outputs, growing.outputs
    # Not of flags and counts, which may be of the growth itself.
    floats = {name: x.noise for name, x in series.items() if x.values.dtype == np.float64}
    difference = lambda name: dependence.norm_of_difference(usual[name], grown[name])
    is_more = lambda name, noise: difference(name) > dependence.negligible(usual[name], noise)
    return [name for name, noise in floats.items() if is_more(name, noise)]


def _listed(title: str, names: list[str]) -> list[str]:
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return [title, *(f"  {line}" for line in [*names[:_SHOWN], *more])] if names else []


_BY_A_POWER = "With twice the loss scale, these outputs, or their changes, are multiplied by"
_BY_A_CHANGE = "These outputs change as the loss scale rises, and underflow does not explain it:"
_AT_INFINITY = """\
An infinite loss scale should make the gradients infinite or NaN, and the step should be skipped.
It was applied, which changed"""
_NOT_FINITE = "An infinite loss scale, at which the step should be skipped, leaves not finite:"
_AT_GROWTH = """\
At a step at which the loss scale grows, these come out different than at the same loss scale
without growth:"""

_DIVIDED = """\
So gradients are divided by a loss scale that they are not, or no longer, multiplied by. Compute
them with value_and_scaled_grad(loss_fn, state), or from scale_gradient(loss, state), inside the
step, with the state that it is given and not an older one; leave the unscaling to the optimizer;
and put anything that looks at the size of gradients, such as a clip, inside:
with_loss_scale(optax.chain(clip, …))."""
_MULTIPLIED = """\
So they come from gradients that are still scaled. To log a norm, unscale them first:
get_loss_scale(state).unscale(scaled_grads). And anything before the wrapper in an optax.chain
sees scaled gradients: put it inside, with_loss_scale(optax.chain(…)). Name outputs that are
meant to depend on the loss scale in ignore=."""
_NOT_SKIPPED = """\
So an overflow would end the training. Let tx.apply_gradients take the step, or keep the old
parameters and the optimizer's old state where should_apply is False."""
_ADAPTED = """\
So they are unscaled by the new loss scale. Unscale by the one that the loss was multiplied by,
from the state that the step is given, and adapt it afterwards."""
