"""Trials of a training step: runs on copies of its arguments, with other numbers.

An `Experiment` has the step and its arguments, and finds the loss scale among them. For
each trial it copies the arguments, puts in a loss scale and perhaps other numbers,
calls the step, and reads what comes out.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from optax_lossscale._arrays.contexts import BLANK_METRICS, OVERFLOWS
from optax_lossscale._arrays.precision import dtype_of, is_inexact_leaf
from optax_lossscale._arrays.validation import check_concrete
from optax_lossscale._arrays.variables import is_variable, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.get import get_loss_scale
from optax_lossscale._step.nesting import name_in_optax
from optax_lossscale._step.state import LossScaleState, loss_scales_in
from optax_lossscale.testing._numbers import (
    Path,
    arrays_in,
    fingerprint,
    nodes_in,
    replicas_differ,
    sample,
)
from optax_lossscale.testing._trial import Trial

RESULT = DictKey("result")  # the first key of what the step returns
_HIGH = 126  # the exponent of a finite loss scale at which most gradients overflow
_PERTURBATION = 2.0**-4  # relative to the number; of zero, the perturbation itself


class Experiment:
    """A step and its arguments, which are never changed, to make trials of.

    `name` is that of the assertion, for errors.

    Attributes:
      loss_scale: the one loss scale among the arguments, on the host.
      has_state: whether a state of loss scaling is among the arguments.
      floats: the floating-point and complex arrays among the arguments, by their paths.
        A Python number, such as a rate, is no array.
      counts: the paths of the integers in Optax's own states, such as Adam's `count`.
    """

    def __init__(
        self,
        name: str,
        step: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ):
        check_concrete(name, (args, kwargs))
        self._step = step
        self._arguments = {"args": args, "kwargs": kwargs}
        loss_scales = loss_scales_in(self._arguments)
        adaptive = list(filter(jax.tree.leaves, loss_scales))
        self._has_fixed = len(adaptive) < len(loss_scales)
        # A fixed loss scale has no number to vary. It counts only if all are fixed.
        counted = adaptive or loss_scales[:1]
        self.loss_scale = jax.device_get(get_loss_scale(counted))
        states = nodes_in(self._arguments, _is_state)
        self.has_state = bool(states)
        self._skipped_steps = _skipped_steps(states)
        self.floats = {
            path: np.asarray(jax.device_get(x))
            for path, x in arrays_in(self._arguments).items()
            if hasattr(x, "dtype") and is_inexact_leaf(x)
        }
        of_optax = nodes_in(self._arguments, lambda x: name_in_optax(x) is not None)
        self.counts = {
            path + inner
            for path, state in of_optax.items()
            for inner, x in arrays_in(state).items()
            if jnp.issubdtype(dtype_of(x), jnp.integer)
        }

    @cached_property
    def baseline(self) -> Trial:
        """The trial with the arguments as they are."""
        return self.trial(self.loss_scale)

    @cached_property
    def overflowing(self) -> list[Trial]:
        """Trials at loss scales at which gradients overflow.

        The last one is at an infinite loss scale, where all gradients overflow. If the
        step raises an error there, the last one is at 2**126.
        """
        if not jax.tree.leaves(self.loss_scale):
            return [self.trial(self.loss_scale, is_infinite=True)]
        trials = [self.at(_HIGH)]
        # The step may raise an error there, such as that of `raise_if_stuck`, or of a
        # logger that converts the scale to an integer.
        with contextlib.suppress(Exception):
            trials.append(self.at(np.inf))
        return trials

    @cached_property
    def perturbed(self) -> list[tuple[Trial, Trial]]:
        """Pairs of trials; in the second one, the floats of one argument are perturbed.

        For each argument there are two pairs: at the loss scale that was given, and at
        the highest one.
        """
        random = np.random.default_rng(0)
        pairs = []
        for _, paths in itertools.groupby(self.floats, key=lambda path: path[:2]):
            numbers = {path: _perturbed(self.floats[path], random) for path in paths}
            for trial in (self.baseline, self.overflowing[-1]):
                other = self.trial(trial.loss_scale, numbers, trial.is_infinite)
                pairs.append((trial, other))
        return pairs

    @property
    def to_be_skipped(self) -> list[Trial]:
        """The trials that overflow, and those with perturbed arguments.

        Where Adam's moments are zero, an update that was wrongly run on zero gradients
        changes nothing. With perturbed moments it does.
        """
        return self.overflowing + [other for _, other in self.perturbed]

    def with_nan(self, path: Path) -> Trial:
        """The trial with a NaN in the array at this path among the arguments."""
        numbers = self.floats[path].copy()
        numbers.flat[0] = np.nan
        return self.trial(self.loss_scale, {path: numbers})

    def at(self, exponent: float) -> Trial:
        """The trial at the loss scale 2**exponent, with the counters as given."""
        scales = np.full_like(self.loss_scale.loss_scale, 2.0**exponent)
        loss_scale = self.loss_scale.replace(loss_scale=scales)
        return self.trial(loss_scale, is_infinite=math.isinf(exponent))

    def trial(
        self,
        loss_scale: LossScale,
        numbers: Mapping[Path, Any] = MappingProxyType({}),
        is_infinite: bool = False,
    ) -> Trial:
        """Runs the step with this loss scale, and with other numbers at some paths.

        `is_infinite` says whether this loss scale is infinite. If so, fixed loss scales
        are made infinite as well.
        """
        loss_scale = jax.device_get(loss_scale)
        others = {**numbers, **self._numbers_of(loss_scale)}
        arguments = _copied(self._arguments, others)
        inputs = arrays_in(arguments)
        # They are read before the step may donate them.
        given_numbers = _samples(inputs)
        given_fingerprints = _fingerprints(inputs)
        # These arrays are kept alive, so that no output gets the id of one of them.
        old = jax.tree.leaves(without_variables(arguments))
        with (
            jax.debug_nans(False),
            jax.debug_infs(False),
            BLANK_METRICS(True),
            OVERFLOWS(is_infinite and self._has_fixed),
        ):
            result = self._step(*arguments["args"], **arguments["kwargs"])
        after = {RESULT.key: result, **arguments}
        outputs = _made(arrays_in(after), old)
        states = _made(nodes_in(after, _is_state), old)
        loss_scales = _made(_adaptive_in(after), old)
        on_devices = outputs | loss_scales
        return Trial(
            loss_scale=loss_scale,
            is_infinite=is_infinite,
            given=given_numbers,
            given_fingerprints=given_fingerprints,
            outputs=_samples(outputs),
            output_fingerprints=_fingerprints(outputs),
            loss_scales=jax.device_get(list(loss_scales.values())),
            states=jax.device_get(list(states.values())),
            more_skipped=_skipped_steps(states) - self._skipped_steps,
            diverged=[path for path, x in on_devices.items() if replicas_differ(x)],
        )

    def _numbers_of(self, loss_scale):
        """The numbers of a loss scale, by their paths among the arguments.

        If several states hold copies of it, each copy gets the same numbers.
        """
        inside = jax.tree.leaves_with_path(loss_scale)
        return {
            path + inner: number
            for path in _adaptive_in(self._arguments)
            for inner, number in inside
        }


def log2_of(loss_scale: LossScale) -> float:
    """The log2 of a loss scale, or of the highest one of several replicas."""
    return float(np.log2(np.max(loss_scale.loss_scale)))


def _is_state(x):
    """Whether this is a state of loss scaling."""
    return isinstance(x, LossScaleState)


def _skipped_steps(states):
    """How many steps were skipped, by the state with the highest count; or 0."""
    counts = [state.skipped_steps for state in states.values()]
    return max(map(np.sum, jax.device_get(counts)), default=0)


def _adaptive_in(tree):
    """The loss scales in a tree that can adapt, by their paths."""
    loss_scales = nodes_in(tree, lambda x: isinstance(x, LossScale))
    return {path: x for path, x in loss_scales.items() if jax.tree.leaves(x)}


def _made(parts, old):
    """What the step made: all that it returned, and arguments with a new array.

    An array is new if it is not in `old`. Arguments that the step left as they were are
    passed over: it may have donated them, and then they cannot be read.
    """
    old_ids = set(map(id, old))
    parts_made = {}
    for path, part in parts.items():
        ids = set(map(id, jax.tree.leaves(part)))
        if path[0] == RESULT or ids - old_ids:
            parts_made[path] = part
    return parts_made


def _samples(arrays):
    """The sampled numbers of each array, flat."""
    return {path: sample(x) for path, x in arrays.items()}


def _fingerprints(arrays):
    """The fingerprint of each array."""
    return {path: fingerprint(x) for path, x in arrays.items()}


def _perturbed(x, random):
    """An array with each number changed a little, up or down at random."""
    signs = random.choice([-1, 1], x.shape)
    changes = _PERTURBATION * signs * random.uniform(0.5, 1.5, x.shape)
    perturbed = np.where(x == 0, abs(changes), x * (1 + changes))
    return perturbed.astype(x.dtype)


def _copied(arguments, numbers):
    """A copy of the arguments with other numbers at some paths.

    A variable that occurs several times is still one variable in the copy.
    """
    variables = {}

    def copied(path, x):
        copy = jax.tree.map(partial(_copy, number=numbers.get(path)), x)
        return variables.setdefault(id(x), copy) if is_variable(x) else copy

    return jax.tree.map_with_path(copied, arguments, is_leaf=is_variable)


def _copy(x, number):
    """A copy of a leaf or, given `number`, that number with its dtype and sharding."""
    if number is None:
        return x.copy() if isinstance(x, (jax.Array, np.ndarray)) else x
    if isinstance(x, jax.Array):
        sharding = x.sharding if x.committed else None
        return jax.device_put(np.asarray(number, x.dtype), sharding)
    return np.asarray(number, x.dtype) if hasattr(x, "dtype") else type(x)(number)
