"""A training step, run on copies of its arguments at many loss scales."""

import bisect
import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr

from optax_lossscale._arrays.variables import is_variable, map_leaves, plain
from optax_lossscale._scales.get import get_loss_scale, loss_scales_in
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._scales.validation import is_numeric
from optax_lossscale._step.state import wrapper_states

_SAMPLE = 2**16  # numbers of an output, at most
# How far below the highest loss scale the others are, by exponents. Their distances alternate: at
# equal ones, the rounding of 1/3, of which every second bit is set, could follow the scale.
_BELOW = [5 * i // 2 for i in range(13)]
_ENOUGH = 8  # loss scales at which the step is applied
_HIGHEST, _NEAR = 126, 15  # to search, and where to begin
_LOWEST = -125  # all gradients underflow, or nearly
# A step that is applied even here computes in float32 or bfloat16, where nothing underflows at the
# loss scales that matter, which are those from _START down.
_WIDE, _START = 90, 30
# In float16 there are 40 exponents from overflow to zero. This far below the highest loss scale,
# few gradients underflow, and those are small.
_REACH = 20
_LONGEST_INTERVAL = 100_000  # steps


class Run(NamedTuple):
    """What a step made of its arguments at one loss scale."""

    before: LossScale  # the one it was given, as host arrays
    after: list[LossScale]  # those it returned or wrote in place
    flags: list[bool]  # which say whether the step was applied
    outputs: dict[str, np.ndarray]  # all else, flat: float64, and int64 for integers and bools

    @property
    def was_applied(self) -> bool:
        """Whether the step was applied, as far as can be seen."""
        return all(self.flags)


class Runs(NamedTuple):
    """The runs of a step on the same arguments."""

    exponents: np.ndarray  # of the loss scales at which it was applied, falling
    falling: list[Run]  # at these
    reach: float  # the least exponent at which little underflows; infinite if it is unknown
    again: Run  # the first of them once more
    lowest: Run | None  # where all gradients underflow, if it was applied there
    infinite: Run | None  # at an infinite loss scale, unless the step stopped there by itself
    growing: Run | None  # at which the loss scale grows, if it ever does
    steady: Run  # at the same loss scale without growth
    given: list[np.ndarray]  # the arguments, flat as outputs are

    @property
    def compared(self) -> list[Run]:
        """Those in which an output is looked at, or recognized as a loss scale."""
        return [*self.falling, *([self.growing] if self.growing else [])]


def the_loss_scale(arguments: Any) -> LossScale:
    """The one loss scale among the arguments."""
    if not loss_scales_in(arguments):
        raise ValueError(
            "expected exactly one loss scale among the arguments of the step, found none: pass it "
            "the optimizer's state as an argument. If a function makes its state itself, or takes "
            "several steps, call the assertion inside it, at the first step"
        )
    return get_loss_scale(arguments)


def make_runs(step: Callable[..., Any], arguments: Any, loss_scale: LossScale) -> Runs:
    """The runs of a step at falling loss scales and at some others."""
    scaled = lambda to: loss_scale.replace(loss_scale=jnp.full_like(loss_scale.loss_scale, to))
    run = lambda loss_scale: _run(step, arguments, loss_scale)
    at = cache(lambda exponent: run(scaled(2.0**exponent)))
    top = _highest(lambda exponent: at(exponent).was_applied)
    is_wide = top >= _WIDE
    start = _START if is_wide else top
    tried = [start - below for below in _BELOW if start - below >= _LOWEST]
    exponents = np.array([exponent for exponent in tried if at(exponent).was_applied])
    if len(exponents) < _ENOUGH:
        raise ValueError(
            f"the step is skipped at all but {len(exponents)} loss scales: look for NaN or inf in "
            "the arguments, the loss and the model; diagnose(loss_fn, params, batch) says where"
        )
    usual = np.log2(np.max(loss_scale.loss_scale))
    steady = int(min(exponents, key=lambda exponent: abs(exponent - usual)))
    steps, about_to_grow = _about_to_grow(scaled(2.0**steady))
    try:
        infinite = run(scaled(np.inf))
    except Exception:  # from `raise_if_stuck`, or a logger that has no integer for infinity
        infinite = None
    falling = [at(int(exponent)) for exponent in exponents]
    reach = -np.inf if is_wide else exponents[0] - _REACH
    return Runs(
        exponents,
        falling,
        reach=reach if falling[0].flags else np.inf,
        again=run(scaled(2.0 ** exponents[0])),
        lowest=None if is_wide or not at(_LOWEST).was_applied else at(_LOWEST),
        infinite=infinite,
        growing=run(about_to_grow) if steps < _LONGEST_INTERVAL else None,
        steady=at(steady),
        given=[x for _, x in _outputs({"given": arguments}, set()) if x.dtype == np.float64],
    )


def _highest(is_applied: Callable[[int], bool]) -> int:
    """The highest exponent of a loss scale at which a step is applied; `_LOWEST` if none is."""
    # If not near 15, then anywhere, at ever smaller distances.
    grids = (range(_HIGHEST, _LOWEST, -distance) for distance in (64, 32, 16, 8, 4, 2, 1))
    good = next(filter(is_applied, itertools.chain([_NEAR], *grids)), None)
    if good is None:
        return _LOWEST
    above = range(good + 1, (_NEAR if good < _NEAR else _HIGHEST) + 1)
    return good + bisect.bisect_left(above, True, key=lambda exponent: not is_applied(exponent))


def same(x: LossScale, y: LossScale) -> bool:
    """Whether two loss scales of one kind have the same state."""
    equal = lambda a, b: np.array_equal(a, b, equal_nan=True)
    return all(map(equal, jax.tree.leaves(x), jax.tree.leaves(y)))


@jax.jit
def _about_to_grow(loss_scale: LossScale) -> tuple[jax.Array, LossScale]:
    """How many finite steps change nothing but counters, and the loss scale after them."""

    def goes_on(carry):
        steps, now = carry
        return (steps < _LONGEST_INTERVAL) & jnp.all(now() == now.adjust(True)())

    next_step = lambda carry: (carry[0] + 1, carry[1].adjust(True))
    return lax.while_loop(goes_on, next_step, (0, loss_scale))


def _run(step: Callable[..., Any], arguments: Any, loss_scale: LossScale) -> Run:
    """The step on a copy of its arguments, `(args, kwargs)`, with this loss scale among them."""
    args, kwargs = _with_loss_scale(arguments, loss_scale)
    given = jax.tree.leaves((args, kwargs))  # kept alive, so that no other array has their ids
    was_given = {id(x) for x in given}
    skipped = [np.asarray(s.skipped_steps) for s in wrapper_states((args, kwargs))]
    with jax.debug_nans(False), jax.debug_infs(False):  # overflows are expected here
        result = step(*args, **kwargs)

    # Arguments may have been changed in place; those that were not are not outputs.
    after = {"result": result, "args": args, "kwargs": kwargs}
    states = [s for s in wrapper_states(after) if id(s.should_apply) not in was_given]
    new = [plain(x) for x in loss_scales_in(after)]
    new = [jax.tree.map(np.asarray, x) for x in new if id(x.loss_scale) not in was_given]
    if states:
        flags = [bool(np.all(s.should_apply)) for s in states]
        if len(states) == len(skipped) == 1:  # a step may be several, the last of which applied
            flags += [np.array_equal(states[0].skipped_steps, skipped[0])]
    else:  # whether it has adapted as it does to finite gradients
        overflowed, not_overflowed = loss_scale.adjust(False), loss_scale.adjust(True)
        flags = [not same(x, overflowed) or same(x, not_overflowed) for x in new]
    before = jax.tree.map(np.asarray, loss_scale)
    return Run(before, new, flags, dict(_outputs(after, was_given)))


def _with_loss_scale(arguments: Any, loss_scale: LossScale) -> Any:
    """A copy with another loss scale, in which variables that are shared stay shared."""
    given, new = jax.tree.leaves(get_loss_scale(arguments)), jax.tree.leaves(loss_scale)
    replacements = {id(x): y for x, y in zip(given, new, strict=True)}

    def copied(x):
        if id(x) in replacements:
            return jnp.asarray(x).at[...].set(replacements[id(x)])
        return x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x

    return map_leaves(copied, arguments)


def _outputs(after: Any, was_given: set[int]) -> Iterator[tuple[str, np.ndarray]]:
    """What there is to compare, by name; for large arrays, a sample."""
    is_leaf = lambda x: isinstance(x, LossScale) or is_variable(x)
    seen = set(was_given)
    for path, leaf in jax.tree.leaves_with_path(after, is_leaf=is_leaf):
        x = plain(leaf)
        is_number = is_numeric(x) or jnp.issubdtype(getattr(x, "dtype", type(x)), np.bool_)
        if isinstance(leaf, LossScale) or id(x) in seen or not is_number:
            continue
        if is_variable(leaf):  # which may be in several places
            seen.add(id(x))
        numbers = np.ravel(np.asarray(x))
        numbers = numbers[:: -(-numbers.size // _SAMPLE) or 1]
        parts = (numbers.real, numbers.imag) if np.iscomplexobj(numbers) else (numbers,)
        kind = np.float64 if jnp.issubdtype(numbers.dtype, jnp.inexact) else np.int64
        numbers = np.concatenate([part.astype(kind) for part in parts])
        yield f"{path[0].key}{keystr(path[1:])}", numbers
