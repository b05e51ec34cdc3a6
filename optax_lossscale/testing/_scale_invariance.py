"""A test for training steps: nothing but the loss scale may depend on the loss scale."""

import re
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale.testing import _dependence as dependence
from optax_lossscale.testing._dependence import Series
from optax_lossscale.testing._run import Run, run, same, the_loss_scale

# The exponents of the loss scales to try, falling. Their distances alternate, as the rounding of
# 1/3, of which every second bit is set, could follow the scale at equal ones.
_EXPONENTS = [5 * i + j for i in range(25, -13, -1) for j in (0, -2)]
_COARSE, _BETWEEN = 6, 15  # so many of them at once on the way down to one at which it is applied
# A step that is applied even here computes in float32 or bfloat16, where nothing underflows at the
# loss scales that matter, which are those from _START down.
_WIDE, _START = 95, 30
_SPAN = 30  # exponents to look at, below the first
_LOW = -12  # the last, if that is less
_MOST = 42  # exponents
_ENOUGH = 8  # loss scales
_LOWEST = -125  # all gradients underflow, or nearly
# In float16 there are 40 exponents from overflow to zero. So far below the highest loss scale, few
# gradients underflow, and those are small.
_REACH = 20
_LONGEST_INTERVAL = 100_000  # steps
_FEW = 100  # numbers of an output that may be loss scales
_SHOWN = 8


def assert_scale_invariant(
    step: Callable[..., Any], *args: Any, ignore: str | Collection[str] = (), **kwargs: Any
) -> None:
    """Raises if anything that a training step computes depends on the loss scale.

    A right step multiplies the loss by the loss scale and divides the gradients by it, so
    what comes out is the same at any loss scale, but for what underflows. In a wrong step the
    two do not cancel, and nothing else may tell: Adam trains on with gradients of any size.
    Put this into your tests, with the step that you train with, its first state and a
    small batch.

    It runs the step some thirty times on copies of its arguments:

    - at falling powers of two. Of the loss scales at which the step is applied it looks for
      outputs that follow them by a power, or change between two of them as underflow would
      not change them: among the parameters, the optimizer's inner state, what is logged, and
      the modules of `nnx` that the step changes in place;
    - at an infinite one, which makes gradients infinite or NaN, so that a right step is skipped;
    - with counters such that the loss scale grows at this step.

    It leaves out the loss scale, with what it counts and what `metrics` says about it, and each
    `Summary`, which is of scaled numbers. The sums of scaled gradients that `optax.MultiSteps`
    keeps around a wrapper are compared unscaled.

    Args:
      step: the training step, compiled or not. It returns its new state or changes it in
        place, and may donate its arguments.
      *args: its arguments, which stay as they are. Somewhere among them is one loss scale:
        in an optimizer state, a train state, an `nnx.Optimizer`.
      ignore: the outputs that are meant to depend on the loss scale, by the names that the
        error has for them: `"result[2]['scaled_norm']"`, or `"result[2]"` for all that is in
        there; one or several.
      **kwargs: its keyword arguments, as args. One that is named `ignore` is bound to the step
        with `functools.partial`.

    Raises:
      AssertionError: if outputs depend on the loss scale. It names them by path, says how, and
        what that usually means.
      ValueError: if there is no loss scale among the arguments; if there are several, of
        which all but one can be bound to the step with `functools.partial`; if it is a
        `FixedLossScale`, which compiled steps hold as a constant; if the step is skipped at
        every loss scale; if it does not do the same twice; or if a name to ignore is none.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = ols.with_loss_scale(optax.adam(1e-3))
      >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
      >>> @jax.jit
      ... def right(params, state, x):
      ...     loss, grads = ols.value_and_grad(loss_fn, state)(params, x)
      ...     return *tx.apply_gradients(grads, state, params), loss
      >>> @jax.jit
      ... def wrong(params, state, x):
      ...     loss, grads = jax.value_and_grad(loss_fn)(params, x)
      ...     return *tx.apply_gradients(grads, state, params), loss
      >>> params, x = jnp.ones(3), jnp.ones((2, 3))
      >>> ols.testing.assert_scale_invariant(right, params, tx.init(params), x)
      >>> ols.testing.assert_scale_invariant(wrong, params, tx.init(params), x)
      Traceback (most recent call last):
          ...
      AssertionError: the step depends on the loss scale. With twice the loss scale...
    """
    arguments = (args, kwargs)
    loss_scale = the_loss_scale(arguments)
    if isinstance(loss_scale, FixedLossScale):
        raise ValueError(
            "a FixedLossScale cannot be varied, as compiled steps hold it as a constant. Test the "
            "step with an optimizer whose loss scale adapts, such as DynamicLossScale(): the rest "
            "of the step is the same"
        )
    runs = _make_runs(partial(run, step, arguments), loss_scale)
    _refuse_chance(runs)
    names = _compared(runs, [ignore] if isinstance(ignore, str) else list(ignore))
    if accused := _accusation(runs, names):
        raise AssertionError(f"the step depends on the loss scale. {accused}")


class _Runs(NamedTuple):
    """The runs of a step on the same arguments.

    Attributes:
      falling: those applied, from the highest loss scale down.
      reach: the least exponent at which little underflows, or more than there are if it is unknown
        which steps were applied.
      again: the first of them once more.
      lowest: the run at which all gradients underflow, if there is one and it was applied.
      infinite: the run at an infinite loss scale, or None if the step stopped there by itself.
      growing: the run at which the loss scale grows, if it ever does.
      steady: the run at the same loss scale at which it does not grow.
    """

    falling: list[Run]
    reach: int
    again: Run
    lowest: Run | None
    infinite: Run | None
    growing: Run | None
    steady: Run


def _make_runs(run_with: Callable[[LossScale], Run], loss_scale: LossScale) -> _Runs:
    at = cache(lambda exponent: run_with(_at(loss_scale, 2.0**exponent)))
    highest = next((k for k in _EXPONENTS[::_COARSE] if at(k).was_applied), _EXPONENTS[-1])
    is_wide = highest >= _WIDE
    start = _START if is_wide else highest + _BETWEEN
    falling: list[Run] = []
    for exponent in (k for k in _EXPONENTS if k <= start):
        first = falling[0].exponent if falling else exponent
        last = max(min(_LOW, first - _SPAN), first - _MOST)
        if exponent < last and len(falling) >= _ENOUGH:
            break
        if at(exponent).was_applied:
            falling.append(at(exponent))
    if len(falling) < _ENOUGH:
        raise ValueError(
            f"the step is skipped at all but {len(falling)} loss scales from "
            f"2**{_EXPONENTS[0]} to 2**{_EXPONENTS[-1]}: look for NaN or inf in the arguments, "
            "the loss and the model; explain(nonfinite_leaves(grads)) says where"
        )
    usual = np.log2(np.max(loss_scale.loss_scale))
    steady = min(falling, key=lambda run: abs(run.exponent - usual))
    about_to_grow = _about_to_grow(_at(loss_scale, 2.0**steady.exponent))
    lowest = None if is_wide or not at(_LOWEST).was_applied else at(_LOWEST)
    reach = _EXPONENTS[-1] if is_wide else falling[0].exponent - _REACH
    return _Runs(
        falling,
        reach=reach if falling[0].flags else _EXPONENTS[0],
        again=run_with(_at(loss_scale, 2.0 ** falling[0].exponent)),
        lowest=lowest,
        infinite=_unless_it_stops(run_with, _at(loss_scale, np.inf)),
        growing=run_with(about_to_grow) if about_to_grow else None,
        steady=steady,
    )


def _at(loss_scale: LossScale, scale: float) -> LossScale:
    return loss_scale.replace(loss_scale=jnp.full_like(loss_scale.loss_scale, scale))


def _about_to_grow(loss_scale: LossScale) -> LossScale | None:
    """The loss scale with such counters that the next finite step changes it, if ever one does."""
    steps, advanced = _advanced(jax.tree.map(jnp.asarray, loss_scale))
    return advanced if steps < _LONGEST_INTERVAL else None


@jax.jit
def _advanced(loss_scale: LossScale) -> tuple[jax.Array, LossScale]:
    """The finite steps that change nothing but counters, and the loss scale after them."""

    def goes_on(carry):
        steps, now, after = carry
        return (steps < _LONGEST_INTERVAL) & jnp.all(now() == after())

    def next_step(carry):
        steps, _, after = carry
        return steps + 1, after, after.adjust(True)

    steps, now, _ = lax.while_loop(goes_on, next_step, (0, loss_scale, loss_scale.adjust(True)))
    return steps, now


def _unless_it_stops(run_with: Callable[[LossScale], Run], loss_scale: LossScale) -> Run | None:
    try:
        return run_with(loss_scale)
    except Exception:  # of `raise_if_stuck`, or of a logger that has no integer for infinity
        return None


def _refuse_chance(runs: _Runs) -> None:
    for name, first in runs.falling[0].outputs.items():
        second = runs.again.outputs.get(name, first)
        size = np.linalg.norm(first[np.isfinite(first) & np.isfinite(second)])
        if dependence.norm_of_difference(first, second) > 0.01 * size:
            raise ValueError(
                f"two runs at the same loss scale differ, in {name}. Give the step all that it "
                "depends on as arguments that can be copied: batches and PRNG keys as arrays, no "
                "iterators or generators"
            )


def _compared(runs: _Runs, ignored: list[str]) -> list[str]:
    """The names of the outputs to compare."""
    names = list(runs.falling[0].outputs)
    is_in = lambda name, place: name == place or name.startswith((f"{place}[", f"{place}."))
    for place in ignored:
        if not any(is_in(name, place) for name in names):
            shown = "\n".join(f"  {name}" for name in names)
            raise ValueError(f"ignore={place!r} names no output. There are\n{shown}")
    names = [name for name in names if not any(is_in(name, place) for place in ignored)]
    is_everywhere = lambda name: all(name in run.outputs for run in runs.falling)
    return [name for name in names if is_everywhere(name) and not _is_loss_scale(name, runs)]


def _is_loss_scale(name: str, runs: _Runs) -> bool:
    """Whether an output is the loss scale or one of its numbers, by its name or its values."""
    if re.search(r"loss_scale\w*\W*(\[\d+\])*$", name):
        return True
    compared = [*runs.falling, *filter(None, [runs.growing])]
    values = np.stack([run.outputs[name] for run in compared])
    varying = values[:, (values != values[0]).any(0)]
    own = np.stack([_numbers(run) for run in compared])
    is_one = lambda x: np.isclose(own, x[:, None], rtol=1e-5, atol=0, equal_nan=True).all(0).any()
    return "norm" not in name and 0 < varying.shape[1] <= _FEW and all(map(is_one, varying.T))


def _numbers(run: Run) -> np.ndarray:
    """What a loss scale may be logged as: before and after the step, its state and logarithms."""
    leaves = [np.ravel(x) for x in jax.tree.leaves((run.before, run.after))]
    scales = np.concatenate([np.ravel(x.loss_scale) for x in (run.before, *run.after)])
    grown = scales / scales[0]
    logarithms = [np.log2(scales), np.log(scales), np.log10(scales)]
    return np.concatenate([*leaves, *logarithms, 1 / scales, grown]).astype(np.float64)


def _accusation(runs: _Runs, names: list[str]) -> str:
    """What depends on the loss scale, how, and what to do; empty if there is nothing."""
    series = {name: _series(name, runs) for name in names}
    powers = {name: p for name, x in series.items() if (p := dependence.power(x))}
    rows = _changes(series, runs.reach)
    changed = {n: i for n, i in rows.items() if i is not None and n not in powers}
    moved = _moved_by_growth(runs, names)

    # The negative ones first: of Adam's they leave parameters that follow the inverse.
    of_power = [f"2**{powers[n]}: {n}" for n in sorted(powers, key=lambda n: powers[n] > 0)]
    of_change = [_described(series[name], name, row) for name, row in changed.items()]
    said = _listed(_BY_A_POWER, of_power)
    if min(powers.values(), default=0) < 0:  # from which all else may follow
        return "\n".join([*said, _DIVIDED])
    said += _listed(_BY_A_CHANGE, of_change)
    if stays := _applied_at_infinity(runs, names):
        return "\n".join([*said, *_listed(_AT_INFINITY, stays), _DIVIDED])
    if said:
        return "\n".join([*said, _MULTIPLIED])
    return "\n".join([*_listed(_AT_GROWTH, moved), _ADAPTED]) if moved else ""


def _changes(series: dict[str, Series], reach: int) -> dict[str, int | None]:
    """Where each output changes otherwise than by underflow."""
    emerging = {name: dependence.emerging(x) for name, x in series.items()}
    how_many = sum(emerging.values())
    within = lambda x: x.exponents[1:] >= reach
    # Where numbers emerge elsewhere, what is computed of many may change by underflow.
    return {
        name: dependence.change(x, within(x) & (how_many - emerging[name] == 0))
        for name, x in series.items()
    }


def _series(name: str, runs: _Runs) -> Series:
    again = runs.again.outputs.get(name, runs.falling[0].outputs[name])
    return Series(
        exponents=np.array([run.exponent for run in runs.falling]),
        values=np.stack([run.outputs[name] for run in runs.falling]),
        without=runs.lowest.outputs.get(name) if runs.lowest else None,
        noise=dependence.norm_of_difference(runs.falling[0].outputs[name], again),
    )


def _applied_at_infinity(runs: _Runs, names: list[str]) -> list[str]:
    """What an infinite loss scale changes, and leaves finite, where it should skip the step."""
    infinite, finite = runs.infinite, runs.falling[0]
    if infinite is None or not infinite.was_applied:
        return []
    was_seen = any(not same(after, infinite.before) for after in infinite.after)
    differs = lambda x, y: np.any((x != y) & np.isfinite(x) & np.isfinite(y))
    found = [n for n in names if n in infinite.outputs]
    found = [n for n in found if differs(infinite.outputs[n], finite.outputs[n])]
    return found if was_seen else []


def _moved_by_growth(runs: _Runs, names: list[str]) -> list[str]:
    """What comes out otherwise at a step at which the loss scale grows."""
    if runs.growing is None or not runs.growing.was_applied:
        return []
    found = []
    for name in names:
        usual = runs.steady.outputs[name]
        grown = runs.growing.outputs.get(name, usual)
        # Not of flags and counts, which may be of the growth itself.
        rounding = dependence.negligible(usual, _series(name, runs).noise)
        if usual.dtype == np.float64 and dependence.norm_of_difference(usual, grown) > rounding:
            found.append(name)
    return found


def _described(series: Series, name: str, row: int) -> str:
    """How an output changes between two loss scales."""
    high, low = series.exponents[row : row + 2]
    if series.values.shape[1] > 1:
        return f"{name}, between 2**{low} and 2**{high}"
    (above,), (below,) = series.values[row : row + 2]
    return f"{name} is {below:.4g} at 2**{low} and {above:.4g} at 2**{high}"


def _listed(title: str, names: list[str]) -> list[str]:
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return [title, *(f"  {line}" for line in [*names[:_SHOWN], *more])] if names else []


_BY_A_POWER = """\
With twice the loss scale, these outputs, or what changes in them, are times"""

_BY_A_CHANGE = """\
These outputs change as the loss scale rises, as they would not by underflow:"""

_AT_INFINITY = """\
An infinite loss scale should make the gradients infinite or NaN, and the step skipped. It was
applied, which changed"""

_AT_GROWTH = """\
At a step at which the loss scale grows, these come out otherwise than at the same loss scale
without growth:"""

_DIVIDED = """\
So gradients are divided by a loss scale that they are not, or no longer, multiplied by. Take them
with value_and_grad(loss_fn, state), or of scale_gradient(loss, state), inside the step, with the
state that it is given and not an older one; leave the unscaling to the optimizer; and put what
looks at the size of gradients, such as a clip, inside: with_loss_scale(optax.chain(clip, …))."""

_MULTIPLIED = """\
So they are made of gradients that are still scaled. To log a norm, unscale them first:
get_loss_scale(state).unscale(grads). And what stands before the wrapper in an optax.chain sees
scaled gradients: put it inside, with_loss_scale(optax.chain(…)). Name in ignore= what is meant to
depend on the loss scale."""

_ADAPTED = """\
So they are unscaled by the new loss scale. Unscale by the one that the loss was multiplied by, of
the state that the step is given, and adapt it afterwards."""
