"""A test for training steps: nothing but the loss scale may depend on the loss scale."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import GetAttrKey, keystr

from optax_lossscale._arrays.variables import is_variable, plain
from optax_lossscale._diagnosis.summary import Summary
from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.get import get_loss_scale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.state import wrapper_states

# The exponents of the loss scales to try. At high ones a gradient that is multiplied once too
# often stands out, at low ones one that is divided: smaller changes are lost in the rounding of a
# parameter. Their distances alternate, as the rounding of 1/3, of which every second bit is set,
# could follow the scale at equal ones. Those below _LOW are for steps skipped at the others.
_EXPONENTS = [5 * i + j for i in range(6, -13, -1) for j in (0, -2)]
_LOW = -12
_ENOUGH = 8  # loss scales
_IN_A_ROW = 3  # differences between neighbours that must follow the same power of the loss scale
_TOLERANCE = 0.02  # of their ratios; rounding in float16 gives any ratios
_SAMPLE = 2**16  # numbers of an output
_SHOWN = 8


def assert_scale_invariant(step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raises if anything that a training step computes depends on the loss scale.

    A right step multiplies the loss by the loss scale and divides the gradients by it, so
    what comes out is the same at any loss scale, but for rounding. In a wrong step the two
    do not cancel, and nothing else may tell: Adam trains on with gradients of any size.
    Put this into your tests, with the step that you train with, its first state and a
    small batch.

    It runs the step some twenty times on copies of its arguments, at powers of two from
    2**30 down. Of the loss scales at which the step is applied it looks for outputs that
    follow them by a power: among the parameters, the optimizer's inner state, what is
    logged, and the modules of `nnx` that the step changes in place. It leaves out the loss
    scale, with what it counts and what `metrics` says about it, and each `Summary`, which
    is of scaled numbers. The sums of scaled gradients that `optax.MultiSteps` keeps around
    a wrapper are compared unscaled.

    Args:
      step: the training step, compiled or not. It returns its new state or changes it in
        place, and may donate its arguments.
      *args: its arguments, which stay as they are. Somewhere among them is one loss scale:
        in an optimizer state, a train state, an `nnx.Optimizer`.
      **kwargs: its keyword arguments, likewise.

    Raises:
      AssertionError: if outputs follow the loss scale. It names them by path, says by which
        power, and what that usually means.
      ValueError: if there is no loss scale among the arguments; if there are several, of
        which all but one can be bound to the step with `functools.partial`; if it is a
        `FixedLossScale`, which compiled steps hold as a constant; if the step is skipped at
        every loss scale; or if it does not do the same twice.

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
    if isinstance(get_loss_scale((args, kwargs)), FixedLossScale):
        raise ValueError(
            "a FixedLossScale cannot be varied, as compiled steps hold it as a constant. Test the "
            "step with an optimizer whose loss scale adapts, such as DynamicLossScale(): the rest "
            "of the step is the same"
        )
    runs = _applied_runs(step, (args, kwargs))
    names = [name for name in runs[0].outputs if all(name in run.outputs for run in runs)]
    powers = {name: _power(name, runs) for name in names}
    accused = {name: p for name, p in powers.items() if p and not _is_loss_scale(name, runs)}
    if accused:
        raise AssertionError(_accusation(accused))


class _Run(NamedTuple):
    """What a step made of its arguments at one loss scale."""

    exponent: int  # of the loss scale
    was_applied: bool
    outputs: dict[str, np.ndarray]
    loss_scales: list[np.ndarray]  # before and after


def _applied_runs(step: Callable[..., Any], arguments: Any) -> list[_Run]:
    """Runs at falling loss scales, without those that were skipped."""
    runs: list[_Run] = []
    for exponent in _EXPONENTS:
        if exponent < _LOW and len(runs) >= _ENOUGH:
            break
        run = _run(step, arguments, exponent)
        if run.was_applied:
            runs.append(run)
    if len(runs) < _ENOUGH:
        raise ValueError(
            f"the step is skipped at all but {len(runs)} loss scales from 2**{_EXPONENTS[0]} to "
            f"2**{_EXPONENTS[-1]}: look for NaN or inf in the arguments, the loss and the model; "
            "explain(nonfinite_leaves(grads)) says where"
        )
    _refuse_chance(runs[0], _run(step, arguments, runs[0].exponent))
    return runs


def _run(step: Callable[..., Any], arguments: Any, exponent: int) -> _Run:
    """The step on a copy of its arguments, with another loss scale."""
    scale = 2.0**exponent
    args, kwargs = _at_scale(arguments, scale)
    loss_scales = [np.asarray(get_loss_scale((args, kwargs))())]
    given = jax.tree.leaves((args, kwargs))  # kept alive, so that no other array has their ids
    was_given = {id(x) for x in given}
    with jax.debug_nans(False), jax.debug_infs(False):  # overflows are expected here
        result = step(*args, **kwargs)

    # Arguments may have been changed in place; those that were not are no outputs.
    after = {"result": result, "args": args, "kwargs": kwargs}
    states = [s for s in wrapper_states(after) if id(s.should_apply) not in was_given]
    for loss_scale in map(plain, _nodes(LossScale, after).values()):
        if id(loss_scale.loss_scale) not in was_given:
            loss_scales.append(np.asarray(loss_scale()))
    return _Run(
        exponent,
        was_applied=all(bool(np.all(s.should_apply)) for s in states),
        outputs=dict(_outputs(after, was_given, scale)),
        loss_scales=loss_scales,
    )


def _at_scale(arguments: Any, scale: float) -> Any:
    """A copy of the arguments with another loss scale, and sums of scaled gradients to match."""
    loss_scales = {(*path, GetAttrKey("loss_scale")) for path in _nodes(LossScale, arguments)}
    sums = _scaled_sums(arguments)
    factor = scale / float(np.max(get_loss_scale(arguments)()))
    copies: dict[int, Any] = {}

    def changed(path, x):
        if _is_within(path, loss_scales):
            return jax.lax.full_like(x, scale)
        if _is_within(path, sums):
            return x * factor
        return x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x

    def copied(path, leaf):
        if not is_variable(leaf):
            return changed(path, leaf)
        if id(leaf) not in copies:  # what is shared stays shared
            copies[id(leaf)] = jax.tree.map(lambda x: changed(path, x), leaf)
        return copies[id(leaf)]

    return jax.tree.map_with_path(copied, arguments, is_leaf=is_variable)


def _outputs(after: Any, was_given: set[int], scale: float) -> Iterator[tuple[str, np.ndarray]]:
    """What there is to compare, by name, as float64 of one dimension; of large arrays a sample."""
    left_out = (LossScale, Summary)
    sums = _scaled_sums(after)
    is_leaf = lambda x: isinstance(x, left_out) or is_variable(x)
    for path, leaf in jax.tree.leaves_with_path(after, is_leaf=is_leaf):
        x = plain(leaf)
        is_number = not isinstance(leaf, left_out) and jnp.issubdtype(
            getattr(x, "dtype", type(x)), np.number
        )
        if not is_number or id(x) in was_given:
            continue
        numbers = np.ravel(np.asarray(x))
        numbers = numbers[:: -(-numbers.size // _SAMPLE) or 1]
        parts = (numbers.real, numbers.imag) if np.iscomplexobj(numbers) else (numbers,)
        numbers = np.concatenate([part.astype(np.float64) for part in parts])
        name = f"{path[0].key}{keystr(path[1:])}"
        yield name, numbers / scale if _is_within(path, sums) else numbers


def _nodes(kind: Any, tree: Any) -> dict[tuple, Any]:
    """All of a kind in a tree, by path."""
    is_kind = lambda x: isinstance(x, kind)
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_kind)
    return {path: x for path, x in leaves if is_kind(x)}


def _scaled_sums(tree: Any) -> set[tuple]:
    """The paths at which `optax.MultiSteps` around a wrapper keeps its scaled gradients."""
    found = _nodes(optax.MultiStepsState, tree).items()
    around = [path for path, state in found if _nodes(LossScale, state.inner_opt_state)]
    return {(*path, GetAttrKey("acc_grads")) for path in around}


def _is_within(path: tuple, places: set[tuple]) -> bool:
    return any(path[: len(place)] == place for place in places)


def _is_loss_scale(name: str, runs: list[_Run]) -> bool:
    """Whether an output is the loss scale, by its name or its values."""
    if re.search(r"loss_scale\W*$", name):
        return True
    is_same = lambda x, y: x.size in (1, y.size) and np.allclose(x, y, rtol=1e-5, atol=0)
    return "norm" not in name and any(
        all(is_same(x, run.outputs[name]) for x, run in zip(series, runs, strict=True))
        for series in zip(*(run.loss_scales for run in runs), strict=False)
    )


def _power(name: str, runs: list[_Run]) -> int | None:
    """The power of the loss scale that an output follows somewhere, up to a constant."""
    outputs = np.stack([run.outputs[name] for run in runs])
    exponents = np.array([run.exponent for run in runs])
    for first in range(len(runs) - _IN_A_ROW):
        window = slice(first, first + _IN_A_ROW + 1)
        values = outputs[window][:, np.isfinite(outputs[window]).all(0)]
        for power in (-1, 1, -2, 2):
            slopes = np.diff(values, axis=0).T / np.diff(2.0 ** (power * exponents[window]))
            sizes = np.linalg.norm(slopes, axis=0)
            differences = np.linalg.norm(np.diff(slopes), axis=0)
            if sizes.min() > 0 and differences.max() <= _TOLERANCE * sizes.min():
                return power
    return None


def _refuse_chance(run: _Run, again: _Run) -> None:
    for name, first in run.outputs.items():
        second = again.outputs.get(name, first)
        same = np.isfinite(first) & np.isfinite(second)
        if np.linalg.norm(first[same] - second[same]) > 0.01 * np.linalg.norm(first[same]):
            raise ValueError(
                f"two runs at the same loss scale differ, in {name}. Give the step all that it "
                "depends on as arguments that can be copied: batches and PRNG keys as arrays, no "
                "iterators or generators"
            )


def _accusation(powers: dict[str, int]) -> str:
    # The negative ones first: of Adam's they leave parameters that follow the inverse.
    names = sorted(powers, key=lambda name: powers[name] > 0)
    shown = [f"  2**{powers[name]}: {name}" for name in names[:_SHOWN]]
    more = [f"  and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return "\n".join(
        [
            "the step depends on the loss scale. With twice the loss scale, these outputs, or "
            "what changes in them, are times",
            *shown,
            *more,
            _DIVIDED if min(powers.values()) < 0 else _MULTIPLIED,
        ]
    )


_DIVIDED = """\
So gradients are divided by a loss scale that they are not, or no longer, multiplied by. Take them
with value_and_grad(loss_fn, state), or of scale_gradient(loss, state), inside the step, with the
state that it is given and not an older one; leave the unscaling to the optimizer; and put what
looks at the size of gradients, such as a clip, inside: with_loss_scale(optax.chain(clip, …))."""

_MULTIPLIED = """\
So they are made of gradients that are still scaled. To log a norm, unscale them first:
get_loss_scale(state).unscale(grads). And what stands before the wrapper in an optax.chain sees
scaled gradients: put it inside, with_loss_scale(optax.chain(…))."""
