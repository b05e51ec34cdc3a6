"""A training step, run on copies of its arguments with other numbers in some places.

What a number is, its place says, and the type of what it is in. The loss scale is what
a `LossScale` holds: not what has its name or its value, nor another place of the same
array.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from optax_lossscale._arrays.contexts import BLANK_METRICS, OVERFLOWS
from optax_lossscale._arrays.precision import is_array, is_inexact
from optax_lossscale._arrays.validation import at_hand
from optax_lossscale._arrays.variables import is_variable, map_leaves, plain
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step.get import get_loss_scale, loss_scales_in
from optax_lossscale._step.state import LossScaleState

Path = tuple[Any, ...]  # of keys
Numbers = dict[Path, Any]  # arrays, by their places

_OVERFLOWING = 2.0**126  # a finite loss scale at which gradients overflow
_LEFT_OUT = (LossScale, SkipRule)  # they record overflows
_SAMPLE = 2**16  # numbers of an array, at most


class Run(NamedTuple):
    """What a step made of its arguments."""

    outputs: Numbers  # what it returned or changed in place, flat
    before: LossScale
    loss_scales: list[LossScale]  # that it made
    states: list[LossScaleState]  # that it made
    skips: int  # more than before, by the state that counts most

    @property
    def exponent(self) -> float:
        """That of the loss scale, as a power of two."""
        return float(np.log2(np.max(self.before.loss_scale)))

    @property
    def flags(self) -> np.ndarray:
        """Whether it was applied: by each state on each replica, and by the loss scales."""
        backed_off, other = outcomes(self.before)
        by_scales = []
        for x in self.loss_scales:
            by_scales.append(same(x, other) or not same(x, backed_off))
        if not self.states:
            return np.array(by_scales, bool)
        by_states = [np.ravel(state.should_apply) for state in self.states]
        return np.concatenate(by_states) & all(by_scales)

    @property
    def was_applied(self) -> bool:
        """Whether it was applied, as far as can be seen; if it is several steps, all of them."""
        return bool(np.all(self.flags)) and self.skips <= 0


class Trial:
    """A step and its arguments, to be run with other numbers among them."""

    def __init__(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any):
        at_hand(name, (args, kwargs))
        self.step = step
        self.arguments = {"args": args, "kwargs": kwargs}
        loss_scales = loss_scales_in(self.arguments)
        varying = [x for x in loss_scales if jax.tree.leaves(x)]
        self.has_fixed = len(varying) < len(loss_scales)
        # One that is fixed, or None, has no number to be varied, and does not count.
        counted = varying or loss_scales[:1]
        self.loss_scale = jax.device_get(get_loss_scale(counted))
        states = list(_parts(LossScaleState, self.arguments).values())
        self.skipped_before = _skipped_steps(jax.device_get(states))
        self.floats = {}
        for path, x in _numbers(self.arguments).items():
            if is_inexact(x):
                self.floats[path] = np.asarray(jax.device_get(x))
        self.at = functools.cache(self._at)

    def _at(self, scale: float) -> Run:
        """The step at this loss scale."""
        scales = np.full_like(self.loss_scale.loss_scale, scale)
        loss_scale = self.loss_scale.replace(loss_scale=scales)
        return self.run(jax.device_get(loss_scale))

    def overflowing(self) -> list[Run]:
        """Runs whose gradients overflow: of the last one, all do."""
        with OVERFLOWS(self.has_fixed):
            if not jax.tree.leaves(self.loss_scale):
                return [self.run(self.loss_scale)]
            runs = [self.at(_OVERFLOWING)]
            # Such as that of `raise_if_stuck`, or of a logger that turns the scale into
            # an integer
            with contextlib.suppress(Exception):
                runs.append(self.at(np.inf))
            return runs

    def run(self, loss_scale: LossScale, numbers: Numbers | None = None) -> Run:
        """The step with this loss scale, and with other numbers in some places."""
        arguments = self._with_numbers(loss_scale, numbers or {})
        # They are kept alive, so that no other array has their ids.
        alive = jax.tree.leaves(plain(arguments))
        ids = {id(x) for x in alive}
        with jax.debug_nans(False), jax.debug_infs(False), BLANK_METRICS(True):
            result = self.step(*arguments["args"], **arguments["kwargs"])

        def made(parts):
            """Without arguments that it did not change in place, which may be gone."""
            made = {}
            for path, x in parts.items():
                is_new = any(id(leaf) not in ids for leaf in jax.tree.leaves(x))
                if is_new or path[0] == DictKey("result"):
                    made[path] = jax.device_get(x)
            return made

        after = {"result": result, **arguments}
        outputs = made(_numbers(after))
        loss_scales = list(made(_parts(LossScale, after)).values())
        states = list(made(_parts(LossScaleState, after)).values())
        return Run(
            outputs={path: flat(x) for path, x in outputs.items()},
            before=loss_scale,
            loss_scales=loss_scales,
            states=states,
            skips=_skipped_steps(states) - self.skipped_before,
        )

    def _with_numbers(self, loss_scale, numbers):
        """A copy of the arguments with this loss scale, and other numbers in some places."""
        others = _leaves(self.arguments, LossScale)
        places = [path for path in _leaves(self.arguments) if path not in others]
        of_loss_scale = itertools.cycle(jax.tree.leaves(loss_scale))
        changed = {**numbers, **dict(zip(places, of_loss_scale, strict=False))}
        return map_leaves(lambda path, x: _copy(x, changed.get(path)), self.arguments)


def _leaves(tree, whole=()):
    """The leaves by place, and parts of some types as a whole.

    A variable that is in several places is in the first, as `map_leaves` has it.
    """

    def is_leaf(x):
        return isinstance(x, whole) or is_variable(x)

    leaves = {}
    seen = set()
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_leaf):
        if id(x) not in seen:
            leaves[path] = x
        if is_variable(x):
            seen.add(id(x))
    return leaves


def _parts(kind, tree):
    """The parts of a tree that are of a type, by place, made of arrays."""
    parts = _leaves(tree, kind)
    return {path: plain(x) for path, x in parts.items() if isinstance(x, kind)}


def _numbers(tree):
    """The numbers of a tree, by place, without those of loss scales and rules."""
    numbers = {}
    for path, x in _leaves(tree, _LEFT_OUT).items():
        array = plain(x)
        is_key = jnp.issubdtype(getattr(array, "dtype", bool), jax.dtypes.extended)
        if is_array(array) and not is_key:
            numbers[path] = array
    return numbers


def flat(x: Any) -> np.ndarray:
    """The numbers of an array, as float64 or int64; of a large one, a sample."""
    numbers = np.ravel(np.asarray(x))
    numbers = numbers[:: 1 + numbers.size // _SAMPLE]
    if np.iscomplexobj(numbers):
        numbers = numbers.view(numbers.real.dtype)
    return numbers.astype(np.float64 if is_inexact(numbers) else np.int64)


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether all numbers are the same; NaN is one of them."""
    return np.array_equal(x, y, equal_nan=True)


def same(x: LossScale, y: LossScale) -> bool:
    """Whether two loss scales have the same state."""
    return all(map(np.array_equal, jax.tree.leaves(x), jax.tree.leaves(y)))


def outcomes(loss_scale: LossScale) -> tuple[LossScale, LossScale]:
    """The loss scale after an overflow, and after a step without one."""
    return jax.device_get(_outcomes(jax.device_put(loss_scale)))


@jax.jit
def _outcomes(loss_scale):
    return loss_scale.adjust(False), loss_scale.adjust(True)


def _copy(x, number):
    """A copy of a leaf, or its like with another number."""
    if isinstance(x, jax.Array):
        if number is None:
            return x.copy()
        sharding = x.sharding if x.committed else None
        return jax.device_put(np.asarray(number, x.dtype), sharding)
    if isinstance(x, (np.ndarray, np.generic)):
        return np.array(x if number is None else number, x.dtype)
    return x if number is None else float(number)


def _skipped_steps(states):
    """How many steps are skipped, by the state that counts most."""
    counts = [np.sum(state.skipped_steps) for state in states]
    return max(counts, default=0)
