"""A training step, run on copies of its arguments with other numbers in some places.

A `Trial` has the step and its arguments, and finds the loss scale among them. Each
`run` copies the arguments, puts a loss scale and perhaps other numbers in, calls the
step, and returns a `Run`, which has all outputs as flat NumPy arrays by their paths.

Only types and paths tell what a number is. The loss scale is what is inside a
`LossScale`, and no other number that has its name or its value, or shares its array.
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
from optax_lossscale._arrays.precision import dtype_of, is_array_leaf, is_inexact_leaf
from optax_lossscale._arrays.validation import check_concrete
from optax_lossscale._arrays.variables import is_variable, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step.get import get_loss_scale, loss_scales_in, name_in_optax
from optax_lossscale._step.state import LossScaleState

Path = tuple[Any, ...]  # of JAX's keys
Numbers = dict[Path, Any]  # arrays by their paths

# Finite loss scales at which gradients overflow
_OVERFLOWING = (2.0**126, 2.0**124)
_LEFT_OUT = (LossScale, SkipRule)  # no outputs, as they are meant to record overflows
_SAMPLE = 2**16  # how many numbers of an array are compared at most


class Run(NamedTuple):
    """The outputs of one run of the step."""

    outputs: Numbers  # arrays that it returned or changed in place, flat
    drifted: list[Path]  # outputs and loss scales of which devices' copies differ
    given: Numbers  # the floats that it was given, by their paths
    loss_scale: LossScale  # the one that it was given
    overflows: bool  # whether fixed loss scales were infinite
    loss_scales: list[LossScale]  # among the outputs
    states: list[LossScaleState]  # among the outputs
    counts: list[np.ndarray]  # the integers in optimizers' states among the outputs
    more_skipped: int  # further steps skipped, by the state with the highest count

    @property
    def exponent(self) -> float:
        """The log2 of the loss scale that the step was given."""
        return float(np.log2(np.max(self.loss_scale.loss_scale)))

    @property
    def flags(self) -> np.ndarray:
        """Whether the step was applied, according to each state on each replica.

        A loss scale that has adapted as after an overflow says that it was not. Without
        states, the flags are those of the loss scales; bools, shape (flags,).
        """
        backed_off, grown = outcomes(self.loss_scale)
        by_scales = [
            same(after, grown) or not same(after, backed_off)
            for after in self.loss_scales
        ]
        if not self.states:
            return np.array(by_scales, bool)
        by_states = [np.ravel(state.should_apply) for state in self.states]
        return np.concatenate(by_states) & all(by_scales)

    @property
    def was_applied(self) -> bool:
        """Whether no output says that the step, or a part of it, was skipped."""
        return bool(np.all(self.flags)) and self.more_skipped <= 0

    @property
    def was_skipped(self) -> bool:
        """Whether there are flags, and all of them say that the step was skipped."""
        return self.flags.size > 0 and not np.any(self.flags)


class Trial:
    """A step and its arguments, which are never changed, to run with other numbers.

    Attributes:
      loss_scale: the one loss scale among the arguments.
      has_fixed: whether a fixed loss scale is among the arguments.
      states: the states of loss scaling among the arguments, on the host.
      counts: the integers in optimizers' states among the arguments.
      floats: the floating-point and complex arrays among the arguments, by their paths.
      at: `_at`, which remembers its results.
    """

    def __init__(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any):
        check_concrete(name, (args, kwargs))
        self.step = step
        self.arguments = {"args": args, "kwargs": kwargs}
        loss_scales = loss_scales_in(self.arguments)
        varying = [x for x in loss_scales if jax.tree.leaves(x)]
        self.has_fixed = len(varying) < len(loss_scales)
        # A fixed loss scale has no number to vary, and counts only if all are fixed.
        counted = varying or loss_scales[:1]
        self.loss_scale = jax.device_get(get_loss_scale(counted))
        self.states = jax.device_get([*_parts(LossScaleState, self.arguments).values()])
        self.counts = _counts(_optimizers(self.arguments))
        self.floats = {
            path: np.asarray(jax.device_get(x))
            for path, x in numbers_in(self.arguments).items()
            if is_inexact_leaf(x)
        }
        self.at = functools.cache(self._at)

    def _at(self, scale: float, overflows: bool = False) -> Run:
        """The run at a loss scale of this value, with the counters that were given."""
        scales = np.full_like(self.loss_scale.loss_scale, scale)
        loss_scale = jax.device_get(self.loss_scale.replace(loss_scale=scales))
        return self.run(loss_scale, overflows=overflows)

    def overflowing(self) -> list[Run]:
        """Runs at loss scales at which gradients overflow.

        The last one is at an infinite loss scale, where all gradients do, unless the
        step raises an error there.
        """
        if not jax.tree.leaves(self.loss_scale):
            return [self.run(self.loss_scale, overflows=True)]
        runs = [self.at(scale, self.has_fixed) for scale in _OVERFLOWING]
        # The step may raise an error there, such as that of `raise_if_stuck`, or of a
        # logger that converts the scale to an integer.
        with contextlib.suppress(Exception):
            runs.append(self.at(np.inf, self.has_fixed))
        return runs

    def run(
        self,
        loss_scale: LossScale,
        numbers: Numbers | None = None,
        overflows: bool = False,
    ) -> Run:
        """Runs the step with this loss scale, and with other numbers at some paths.

        With `overflows`, every fixed loss scale is infinite.
        """
        changed = {**(numbers or {}), **self._places(loss_scale)}
        arguments = _copied(self.arguments, changed)
        # These arrays are kept alive, so that no output gets the id of one of them.
        alive = jax.tree.leaves(without_variables(arguments))
        ids = {id(x) for x in alive}
        with (
            jax.debug_nans(False),
            jax.debug_infs(False),
            BLANK_METRICS(True),
            OVERFLOWS(overflows),
        ):
            result = self.step(*arguments["args"], **arguments["kwargs"])

        after = {"result": result, **arguments}
        states_after = _outputs(_parts(LossScaleState, after), ids)
        states = jax.device_get([*states_after.values()])
        outputs = _outputs(numbers_in(after), ids)
        loss_scales = _outputs(_parts(LossScale, after), ids)
        copied = outputs | loss_scales
        return Run(
            outputs={path: flat(jax.device_get(x)) for path, x in outputs.items()},
            drifted=[path for path, x in copied.items() if _copies_differ(x)],
            given={**self.floats, **(numbers or {})},
            loss_scale=loss_scale,
            overflows=overflows,
            loss_scales=jax.device_get([*loss_scales.values()]),
            states=states,
            counts=_counts(_outputs(_optimizers(after), ids)),
            more_skipped=_skipped_steps(states) - _skipped_steps(self.states),
        )

    def _places(self, loss_scale):
        """The numbers of a loss scale, by their paths among the arguments.

        If several states hold copies of it, each copy gets the same numbers.
        """
        others = _leaves(self.arguments, LossScale)
        places = [path for path in _leaves(self.arguments) if path not in others]
        numbers = itertools.cycle(jax.tree.leaves(loss_scale))
        return dict(zip(places, numbers, strict=False))


def _outputs(parts, old_ids):
    """Those of these parts, by path, that the step returned or changed in place.

    `old_ids` are the ids of the arrays that it was given. What it did not change may
    have been donated, so that it cannot be read.
    """
    made = {}
    for path, x in parts.items():
        is_new = any(id(leaf) not in old_ids for leaf in jax.tree.leaves(x))
        if is_new or path[0] == DictKey("result"):
            made[path] = x
    return made


def _parts(cls, tree):
    """The parts of a tree that are of a class, by path, with arrays for variables."""
    parts = _leaves(tree, cls)
    return {
        path: without_variables(x) for path, x in parts.items() if isinstance(x, cls)
    }


def _optimizers(tree):
    """The states of optimizers in a tree, by path: those of Optax and of this library."""

    def is_state(x):
        return isinstance(x, LossScaleState) or name_in_optax(x) is not None

    parts = jax.tree.leaves_with_path(tree, is_leaf=is_state)
    return {path: without_variables(x) for path, x in parts if is_state(x)}


def _counts(optimizers):
    """The integers in states of optimizers, such as Adam's count, as flat arrays.

    Those of loss scaling itself, such as how many steps were skipped, are left out. An
    optimizer itself, which Optax defines as well, has functions in it.
    """
    counts = []
    for state in optimizers.values():
        inside = state.inner_state if isinstance(state, LossScaleState) else state
        for x in _leaves(inside, LossScaleState).values():
            if isinstance(x, LossScaleState):
                counts += _counts({(): x})
            elif is_array_leaf(x) and jnp.issubdtype(dtype_of(x), jnp.integer):
                counts.append(flat(jax.device_get(x)))
    return counts


def numbers_in(tree: Any) -> Numbers:
    """The numbers of a tree by path, without loss scales, skip rules and PRNG keys.

    A variable that occurs several times is at the first of its paths only.
    """
    numbers = {}
    seen = set()
    for path, x in _leaves(tree, _LEFT_OUT).items():
        if isinstance(x, _LEFT_OUT) or id(x) in seen:
            continue
        if is_variable(x):
            seen.add(id(x))
        array = without_variables(x)
        if is_array_leaf(array) and not _is_key(dtype_of(array)):
            numbers[path] = array
    return numbers


def flat(x: Any) -> np.ndarray:
    """The numbers of an array as a vector of float64 or int64; a sample of a large one.

    A complex number becomes two numbers.
    """
    numbers = np.ravel(np.asarray(x))
    numbers = numbers[:: 1 + numbers.size // _SAMPLE]
    if np.iscomplexobj(numbers):
        numbers = numbers.view(numbers.real.dtype)
    return numbers.astype(np.float64 if is_inexact_leaf(numbers) else np.int64)


def _copies_differ(tree):
    """Whether devices hold copies of an array, or of parts of it, that differ."""
    for x in jax.tree.leaves(tree):
        copies = {}
        for shard in getattr(x, "addressable_shards", ()):
            numbers = flat(shard.data)
            first = copies.setdefault(str(shard.index), numbers)
            if not equal(first, numbers):
                return True
    return False


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays have the same numbers, where NaN equals NaN."""
    return np.array_equal(x, y, equal_nan=True)


def same(x: LossScale, y: LossScale) -> bool:
    """Whether two loss scales have the same state."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=False)
    return all(equal(flat(a), flat(b)) for a, b in pairs)


def outcomes(loss_scale: LossScale) -> tuple[LossScale, LossScale]:
    """The loss scale after a step that overflows, and after one that does not."""
    return jax.device_get(_outcomes(jax.device_put(loss_scale)))


@jax.jit
def _outcomes(loss_scale):
    """`outcomes`, compiled, for a loss scale on the device."""
    return loss_scale.adjust(False), loss_scale.adjust(True)


def _leaves(tree, whole=()):
    """The leaves of a tree by path; parts of the types `whole` are leaves, too."""

    def is_leaf(x):
        return isinstance(x, whole) or is_variable(x)

    return dict(jax.tree.leaves_with_path(tree, is_leaf=is_leaf))


def _copied(arguments, numbers):
    """A copy of the arguments with other numbers at some paths.

    A variable that occurs several times is still one variable in the copy.
    """
    copies = {}

    def copied(path, x):
        number = numbers.get(path)
        if not is_variable(x):
            return _copy(x, number)
        if id(x) not in copies:
            copies[id(x)] = jax.tree.map(lambda leaf: _copy(leaf, number), x)
        return copies[id(x)]

    return jax.tree.map_with_path(copied, arguments, is_leaf=is_variable)


def _copy(x, number):
    """A copy of a leaf; with `number`, an array of its type and placement for that."""
    if isinstance(x, jax.Array):
        if number is None:
            return x.copy()
        sharding = x.sharding if x.committed else None
        return jax.device_put(np.asarray(number, x.dtype), sharding)
    if isinstance(x, (np.ndarray, np.generic)):
        return np.array(x if number is None else number, x.dtype)
    return x if number is None else float(number)


def _is_key(dtype):
    """Whether a dtype is that of PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def _skipped_steps(states):
    """How many steps were skipped, by the state with the highest count; or 0."""
    return max((np.sum(state.skipped_steps) for state in states), default=0)
