"""A training step, run on copies of its arguments with other numbers in some places.

What a number is, its place says, and the type of what it is in. The loss scale is what a
`LossScale` holds: not what has its name or its value, nor another place of the same array.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey

from optax_lossscale._arrays.contexts import BLANK_METRICS, OVERFLOWS
from optax_lossscale._arrays.precision import dtype_of, is_array, is_inexact
from optax_lossscale._arrays.validation import at_hand
from optax_lossscale._arrays.variables import is_variable, plain
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step.get import get_loss_scale, loss_scales_in
from optax_lossscale._step.master_weights import MasterWeightsState
from optax_lossscale._step.state import LossScaleState, wrapper_states

Path = tuple[Any, ...]  # of keys
Numbers = dict[Path, Any]  # arrays, by their places

LARGEST = 2.0**126
_LEFT_OUT = (LossScale, SkipRule)  # they record overflows
_WEIGHTS = GetAttrKey("master_weights")
_SAMPLE = 2**16  # numbers of an array, at most


class Run(NamedTuple):
    """What a step made of its arguments."""

    outputs: Numbers  # what it returned or changed in place, flat
    dtypes: dict[Path, Any]  # in which it did
    master_weights: list[Path]  # where there are some
    before: LossScale
    loss_scales: list[LossScale]  # that it made
    states: list[LossScaleState]  # that it made
    skipped_before: int  # steps, by the state that it was given

    @property
    def flags(self) -> np.ndarray:
        """Whether it was applied: by each state on each replica, and by the loss scales."""
        backed_off, other = outcomes(self.before)
        own = [same(x, other) or not same(x, backed_off) for x in self.loss_scales]
        flags = [np.ravel(state.should_apply) for state in self.states]
        return np.concatenate(flags) & all(own) if flags else np.array(own, bool)

    @property
    def counts_a_skip(self) -> bool:
        """Whether more steps are skipped than before."""
        return _skipped(self.states) > self.skipped_before

    @property
    def was_applied(self) -> bool:
        """Whether it was applied, as far as can be seen; if it is several steps, all of them."""
        return bool(np.all(self.flags)) and not self.counts_a_skip

    @property
    def was_skipped(self) -> bool:
        """Whether it was skipped, as can be seen, on all replicas."""
        return self.flags.size > 0 and not np.any(self.flags)


class Trial:
    """A step and its arguments, to be run with other numbers among them."""

    def __init__(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any):
        at_hand(name, (args, kwargs))
        self.step = step
        self.arguments = {"args": args, "kwargs": kwargs}
        loss_scales = loss_scales_in(self.arguments)
        if not loss_scales:
            raise ValueError(
                "expected exactly one loss scale among the arguments of the step, found none: "
                "pass it the optimizer's state as an argument. If a function makes its state "
                "itself, or takes several steps, call the assertion inside it, at the first step"
            )
        varying = [x for x in loss_scales if jax.tree.leaves(x)]
        self.has_fixed = len(varying) < len(loss_scales)
        # One that is fixed, or None, has no number to be varied, and does not count.
        others = varying or loss_scales[:1]
        counted = others if self.has_fixed else self.arguments
        self.loss_scale = jax.device_get(get_loss_scale(counted))
        self.skipped = _skipped(jax.device_get(wrapper_states(self.arguments)))
        numbers = numbers_in(self.arguments)
        floats = {path: x for path, x in numbers.items() if is_inexact(x)}
        self.floats = {path: np.asarray(jax.device_get(x)) for path, x in floats.items()}
        self.at = functools.cache(lambda scale: self.run(self.scaled(scale)))

    def scaled(self, scale: float) -> LossScale:
        """The loss scale, with another number."""

        def number(path, x):
            return np.full_like(x, scale) if path[-1] == GetAttrKey("loss_scale") else x

        return jax.tree.map_with_path(number, self.loss_scale)

    def overflowing(self) -> list[Run]:
        """Runs whose gradients overflow: of the last one, all do."""
        with OVERFLOWS(self.has_fixed):
            if not jax.tree.leaves(self.loss_scale):
                return [self.run(self.loss_scale)]
            try:
                return [self.at(LARGEST), self.at(np.inf)]
            except Exception:  # `raise_if_stuck`'s, or of a logger without an integer for infinity
                return [self.at(LARGEST)]

    def run(self, loss_scale: LossScale, numbers: Numbers | None = None) -> Run:
        """The step with this loss scale, and with other numbers in some places."""
        places = _leaves(self.arguments).keys() - _leaves(self.arguments, LossScale).keys()
        own = [path for path in _leaves(self.arguments) if path in places]
        scales = zip(own, itertools.cycle(jax.tree.leaves(loss_scale)), strict=False)
        given = _copied(self.arguments, {**(numbers or {}), **dict(scales)})
        kept = jax.tree.leaves(plain(given))  # alive, so that no other array has their ids
        was_given = set(map(id, kept))
        with jax.debug_nans(False), jax.debug_infs(False), BLANK_METRICS(True):
            result = self.step(*given["args"], **given["kwargs"])

        # Arguments that it did not change in place are not its outputs, and may be gone.
        def is_new(x):
            return any(id(leaf) not in was_given for leaf in jax.tree.leaves(x))

        def made(parts):
            return jax.device_get([*parts(result), *filter(is_new, parts(given))])

        after = {"result": result, **given}
        arrays = numbers_in(after).items()
        outputs = {path: x for path, x in arrays if path[0] == DictKey("result") or is_new(x)}
        masters = _leaves(after, MasterWeightsState).items()
        return Run(
            {path: flat(jax.device_get(x)) for path, x in outputs.items()},
            {path: dtype_of(x) for path, x in outputs.items()},
            [(*path, _WEIGHTS) for path, x in masters if isinstance(x, MasterWeightsState)],
            before=loss_scale,
            loss_scales=made(lambda tree: plain(loss_scales_in(tree))),
            states=made(wrapper_states),
            skipped_before=self.skipped,
        )


def numbers_in(tree: Any) -> Numbers:
    """The numbers of a tree, by place; a variable that is in several places is in the first."""
    numbers, seen = {}, set()
    for path, x in _leaves(tree, _LEFT_OUT).items():
        if not isinstance(x, _LEFT_OUT) and id(x) not in seen and is_array(plain(x)):
            numbers[path] = plain(x)
            seen.update([id(x)] if is_variable(x) else [])
    return {path: x for path, x in numbers.items() if _is_number(dtype_of(x))}


def flat(x: Any) -> np.ndarray:
    """The numbers of an array, as float64 or int64; of a large one, a sample."""
    numbers = np.ravel(np.asarray(x))
    numbers = numbers[:: -(-numbers.size // _SAMPLE) or 1]
    if np.iscomplexobj(numbers):
        numbers = np.concatenate([numbers.real, numbers.imag])
    return numbers.astype(np.float64 if is_inexact(numbers) else np.int64)


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether all numbers are the same; NaN is one of them."""
    return np.array_equal(x, y, equal_nan=True)


def same(x: LossScale, y: LossScale) -> bool:
    """Whether two loss scales have the same state."""
    return all(map(equal, map(flat, jax.tree.leaves(x)), map(flat, jax.tree.leaves(y))))


def outcomes(loss_scale: LossScale) -> tuple[LossScale, LossScale]:
    """The loss scale after an overflow, and after a step without one."""
    return jax.device_get(_outcomes(jax.device_put(loss_scale)))


@jax.jit
def _outcomes(loss_scale):
    return loss_scale.adjust(False), loss_scale.adjust(True)


def _leaves(tree, whole=()):
    """The leaves by place, and parts of some types as a whole."""
    is_leaf = lambda x: isinstance(x, whole) or is_variable(x)
    return dict(jax.tree.leaves_with_path(tree, is_leaf=is_leaf))


def _copied(arguments, numbers):
    """A copy with other numbers, in which variables that are shared stay shared."""
    copies = {}

    def copied(path, x):
        if not is_variable(x):
            return _copy(x, numbers.get(path))
        if id(x) not in copies:
            copies[id(x)] = jax.tree.map(lambda leaf: _copy(leaf, numbers.get(path)), x)
        return copies[id(x)]

    return jax.tree.map_with_path(copied, arguments, is_leaf=is_variable)


def _copy(x, number):
    """A copy of a leaf, or its like with another number."""
    if isinstance(x, jax.Array):
        if number is None:
            return x.copy()
        return jax.device_put(np.asarray(number, x.dtype), x.sharding if x.committed else None)
    if isinstance(x, (np.ndarray, np.generic)):
        return np.array(x if number is None else number, x.dtype)
    return x if number is None else float(number)


def _is_number(dtype):
    return jnp.issubdtype(dtype, np.number) or dtype == np.bool_


def _skipped(states):
    return max((np.sum(state.skipped_steps) for state in states), default=0)
