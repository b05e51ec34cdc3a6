"""Runs a training step on copies of its arguments, with some of their values replaced.

An `Experiment` holds the step and its arguments and finds the loss scale among them.
Each run of the step is a `Trial`. For example, `experiment.trial_at(10)` copies the
arguments, replaces the loss scale with 2**10, calls the step, and records what the step
returned and which arguments it changed in place.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.checks import check_concrete
from optax_lossscale._arrays.precision import dtype_of, is_inexact_leaf
from optax_lossscale._arrays.variables import (
    distinct_nodes,
    is_variable,
    without_variables,
)
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.nesting import name_in_optax
from optax_lossscale._step.state import LossScaleState, loss_scales_in
from optax_lossscale._step.stuck import LossScaleError
from optax_lossscale.testing._numbers import (
    Path,
    arrays_in,
    fingerprint,
    nodes_in,
    replicas_differ,
    sample,
)
from optax_lossscale.testing._trial import Trial

T = TypeVar("T")

RESULT = DictKey("result")
"""The first key in the path of whatever the step returns."""

# The largest loss scale. Gradients of 2**-44 or more overflow in float16 there.
_HIGH_EXPONENT = 60
# How much an element is perturbed, relative to its magnitude, or absolute for a zero.
# This is multiplied by a random number from 0.5 to 1.5, so the change is 3% to 9%. Even
# the smallest change is 4 times the largest relative difference of neighboring
# bfloat16 numbers, which is 0.8%.
_PERTURBATION = 2.0**-4


class Experiment:
    """A step and its arguments.

    The arguments are copied for each trial and never change.

    Args:
      name: the name of the assertion that runs the experiment, for errors.
      step: the training step.
      args: its positional arguments.
      kwargs: its keyword arguments.

    Attributes:
      loss_scale: the loss scale among the arguments, on the host.
      has_state: whether a `LossScaleState` is among the arguments.
      floats: the floating-point and complex arrays among the arguments, by path, in
        their own shapes and dtypes. Python numbers, such as a learning rate, are not
        included.
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
        self._step_error: Exception | None = None  # the last one that the step raised
        loss_scales = loss_scales_in(self._arguments)
        adaptive = [x for x in loss_scales if _can_adapt(x)]
        self._has_fixed = len(adaptive) < len(loss_scales)
        # Fixed loss scales have no value that a trial could replace, so they are
        # disregarded beside one that adapts. If none adapts, the first stands for all.
        candidates = distinct_nodes(adaptive or loss_scales[:1])
        if len(candidates) != 1:
            raise ValueError(
                f"{name} needs exactly one loss scale among the step's arguments, "
                f"found {len(candidates)}. Wrap the whole optimizer in with_loss_scale "
                "once, and pass its state. If the step uses several states, close over "
                "the others"
            )
        self.loss_scale = jax.device_get(without_variables(candidates[0]))
        states = nodes_in(self._arguments, _is_state)
        self.has_state = bool(states)
        self._skip_count = _skip_count(states)
        self.floats = {
            path: np.asarray(jax.device_get(x))
            for path, x in arrays_in(self._arguments).items()
            if hasattr(x, "dtype") and is_inexact_leaf(x)
        }
        self.counts = _counts_in(self._arguments)

    @cached_property
    def baseline(self) -> Trial:
        """The trial with the arguments as they are."""
        return self.trial(self.loss_scale)

    @cached_property
    def trial_at_one(self) -> Trial:
        """The trial at a loss scale of 1, or the baseline if the scale is fixed.

        The baseline is often skipped, because training may begin at too high a scale,
        and a skipped step does not show what its gradients would have changed.
        """
        return self.trial_at(0) if _can_adapt(self.loss_scale) else self.baseline

    @cached_property
    def overflow_trials(self) -> list[Trial]:
        """Trials at loss scales so large that gradients overflow.

        The last trial is at an infinite loss scale, where all gradients but zeros
        overflow, or at 2**60 if the step raises an error at an infinite one. If the
        loss scale is fixed, such an error is passed on, because nothing else makes
        gradients overflow.
        """
        if not _can_adapt(self.loss_scale):
            return [self.trial(self.loss_scale, is_infinite=True)]
        trials = [self.trial_at(_HIGH_EXPONENT)]
        try:
            trials.append(self.trial_at(np.inf))
        except Exception as error:
            # A step may raise an error at infinity, for example by `raise_if_stuck` or
            # in a logger that converts the loss scale to an integer. An error that the
            # step did not raise is a bug of this package and must not be hidden.
            if error is not self._step_error:
                raise
        return trials

    def warn_of_error(self) -> None:
        """Warns if the step raised an error, so that a trial was left out.

        Only an error at an infinite loss scale gets this far; all others are passed on.
        """
        error = self._step_error
        # `raise_if_stuck` raises a `LossScaleError` if gradients overflow or steps are
        # skipped, as they should at an infinite loss scale.
        if error is not None and not isinstance(error, LossScaleError):
            checks.warn(
                f"the step raised {checks.shown(error)} at an infinite loss scale, "
                f"so it was tested only at loss scales up to 2**{_HIGH_EXPONENT}"
            )

    @cached_property
    def perturbed_pairs(self) -> list[tuple[Trial, Trial]]:
        """Pairs of trials that differ in the floats of one argument.

        In the second trial of a pair, these floats are perturbed. Each argument that
        holds floats has two pairs: one at the original loss scale, and one at that of
        the last overflow trial.
        """
        rng = np.random.default_rng(0)
        pairs = []
        # The first two keys of a path, such as `args` and 0, say which argument it is.
        for _, paths in itertools.groupby(self.floats, key=lambda path: path[:2]):
            values = {path: _perturb(self.floats[path], rng) for path in paths}
            for trial in (self.baseline, self.overflow_trials[-1]):
                perturbed = self.trial(trial.loss_scale, values, trial.is_infinite)
                pairs.append((trial, perturbed))
        return pairs

    @property
    def possibly_skipped(self) -> list[Trial]:
        """The trials in which the step may be skipped.

        These are the overflow trials and all trials with perturbed arguments. The
        perturbed ones reveal a step that replaces its gradients with zeros on overflow
        but updates the parameters anyway. With Adam's moments at their initial zeros,
        such an update changes no parameter; with perturbed moments, it does.
        """
        return self.overflow_trials + [trial for _, trial in self.perturbed_pairs]

    def skips_all(self, trial: Trial) -> bool:
        """Whether a trial skipped its step, or all steps if one call takes several.

        Such a call may be a `lax.scan` over batches. It reports whether its last step
        was applied and counts the skipped ones. In the last overflow trial, it should
        skip all of its steps, which tells how many there are.
        """
        n_steps = self.overflow_trials[-1].skip_count_change
        return trial.was_skipped and trial.skip_count_change >= n_steps

    def trial_with_nan(self, path: Path) -> Trial:
        """Runs the step with a NaN in one of the arrays among its arguments."""
        values = self.floats[path].copy()
        values.flat[:1] = np.nan  # [0] would raise an error for an empty array
        return self.trial(self.loss_scale, {path: values})

    def trial_at(self, exponent: float) -> Trial:
        """Runs the step at the loss scale 2**exponent.

        The rest of the loss scale's state, such as its counters, is not replaced.
        """
        scales = np.full_like(self.loss_scale.loss_scale, 2.0**exponent)
        loss_scale = self.loss_scale.replace(loss_scale=scales)
        return self.trial(loss_scale, is_infinite=math.isinf(exponent))

    def trial(
        self,
        loss_scale: LossScale,
        values: Mapping[Path, Any] = MappingProxyType({}),
        is_infinite: bool = False,
    ) -> Trial:
        """Runs the step once.

        Args:
          loss_scale: replaces the loss scale among the arguments.
          values: new values for some arrays among the arguments, by path.
          is_infinite: whether an infinite loss scale should make gradients overflow.
            If so, fixed loss scales are infinite during the run; one that adapts must
            be infinite already.
        """
        loss_scale = jax.device_get(loss_scale)
        replacements = {**values, **self._values_of(loss_scale)}
        arguments = _copy_tree(self._arguments, replacements)
        inputs = arrays_in(arguments)
        # The inputs are read now, because the step may donate their buffers.
        input_samples = _map_values(sample, inputs)
        input_fingerprints = _map_values(fingerprint, inputs)
        # Holding on to the old leaves keeps Python from reusing their ids for outputs.
        old_leaves = jax.tree.leaves(without_variables(arguments))
        result = self._call_step(arguments, is_infinite)
        tree = {RESULT.key: result, **arguments}
        arrays = arrays_in(tree)
        outputs = _only_outputs(arrays, old_leaves)
        # A NumPy array may hold new elements although it is the same array.
        for path, x in arrays.items():
            is_numpy_input = path in inputs and isinstance(x, np.ndarray)
            if is_numpy_input and fingerprint(x) != input_fingerprints[path]:
                outputs[path] = x
        states = _only_outputs(nodes_in(tree, _is_state), old_leaves)
        loss_scales = _only_outputs(_adaptive_in(tree), old_leaves)
        may_diverge = outputs | loss_scales
        return Trial(
            loss_scale=loss_scale,
            is_infinite=is_infinite,
            arguments=input_samples,
            argument_fingerprints=input_fingerprints,
            outputs=_map_values(sample, outputs),
            output_fingerprints=_map_values(fingerprint, outputs),
            loss_scales=jax.device_get(list(loss_scales.values())),
            states=jax.device_get(list(states.values())),
            skip_count_change=_skip_count(states) - self._skip_count,
            diverged=[path for path, x in may_diverge.items() if replicas_differ(x)],
        )

    def _call_step(self, arguments: dict[str, Any], is_infinite: bool) -> Any:
        """Calls the step in a context that fits a trial, and returns its result.

        NaNs and infinities raise no error, because they are expected in some trials.
        `metrics` returns the same loss scale in all trials, so that it does not count
        as an output that depends on the scale. If `is_infinite`, fixed loss scales are
        infinite. An error of the step is stored as `_step_error` and passed on.
        """
        with (
            jax.debug_nans(False),
            jax.debug_infs(False),
            TESTING_METRICS(True),
            TESTING_OVERFLOW(is_infinite and self._has_fixed),
        ):
            try:
                result = self._step(*arguments["args"], **arguments["kwargs"])
                # An error in a callback may be raised only when outputs are ready.
                return jax.block_until_ready(result)
            except Exception as error:
                self._step_error = error
                raise

    def _values_of(self, loss_scale: LossScale) -> dict[Path, Any]:
        """Returns the leaves of a loss scale, by their paths among the arguments.

        If several states among the arguments hold a copy of the loss scale, the leaves
        are returned for each copy.
        """
        return {
            path + subpath: value
            for path in _adaptive_in(self._arguments)
            for subpath, value in jax.tree.leaves_with_path(loss_scale)
        }


def log2_of(loss_scale: LossScale) -> float:
    """Computes the log2 of a loss scale, or of the highest one if replicas differ."""
    return float(np.log2(np.max(loss_scale.loss_scale)))


def _is_state(x: Any) -> bool:
    """Whether a node is a `LossScaleState`."""
    return isinstance(x, LossScaleState)


def _can_adapt(loss_scale: LossScale) -> bool:
    """Whether a loss scale has state, which a fixed one lacks."""
    return bool(jax.tree.leaves(loss_scale))


def _skip_count(states: Mapping[Path, LossScaleState]) -> int:
    """Returns the highest count of skipped steps in any state, or 0 without states.

    If a state has one count per replica, their sum is used.
    """
    counts = [state.skipped_steps for state in states.values()]
    return max(map(np.sum, jax.device_get(counts)), default=0)


def _counts_in(tree: Any) -> set[Path]:
    """Returns the paths of the integers in states whose classes Optax defines.

    A `LossScaleState` may lie inside such a state. Its counts of skipped steps are left
    out, because a skipped step should change them.
    """
    optax_states = nodes_in(tree, lambda x: name_in_optax(x) is not None)
    counts = {
        path + subpath
        for path, state in optax_states.items()
        for subpath, x in arrays_in(state).items()
        if jnp.issubdtype(dtype_of(x), jnp.integer)
    }
    skip_counts = {
        (*path, GetAttrKey(name))
        for path in nodes_in(tree, _is_state)
        for name in ("skipped_steps", "consecutive_skipped_steps")
    }
    return counts - skip_counts


def _adaptive_in(tree: Any) -> dict[Path, LossScale]:
    """Returns the loss scales in a tree that can adapt, by path."""
    loss_scales = nodes_in(tree, lambda x: isinstance(x, LossScale))
    return {path: x for path, x in loss_scales.items() if _can_adapt(x)}


def _only_outputs(
    nodes: Mapping[Path, Any],
    old_leaves: Iterable[Any],
) -> dict[Path, Any]:
    """Returns the nodes that the step returned, or into which it put a new array.

    An array is new if it is not among `old_leaves`. Arguments that the step did not
    change are left out, because it may have donated their buffers, which cannot be read
    then.
    """
    old_ids = set(map(id, old_leaves))
    outputs = {}
    for path, node in nodes.items():
        ids = set(map(id, jax.tree.leaves(node)))
        if path[0] == RESULT or ids - old_ids:
            outputs[path] = node
    return outputs


def _map_values(
    function: Callable[[Any], T],
    arrays: Mapping[Path, Any],
) -> dict[Path, T]:
    """Applies a function to each array in a dict."""
    return {path: function(x) for path, x in arrays.items()}


def _perturb(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Makes each element of an array a little larger or smaller, at random.

    Zeros become positive, so that second moments, such as Adam's, are not negative.
    """
    signs = rng.choice([-1, 1], x.shape)
    changes = _PERTURBATION * signs * rng.uniform(0.5, 1.5, x.shape)
    perturbed = np.where(x == 0, abs(changes), x * (1 + changes))
    return perturbed.astype(x.dtype)


def _copy_tree(tree: Any, values: Mapping[Path, Any]) -> Any:
    """Copies a tree, with values in place of the leaves at some paths.

    A variable of Flax NNX that occurs at several paths is a single variable in the
    copy, too.
    """
    variables = {}

    def copied(path, x):
        value = values.get(path)
        copy = jax.tree.map(lambda leaf: _copy_leaf(leaf, value), x)
        if not is_variable(x):
            return copy
        return variables.setdefault(id(x), copy)

    return jax.tree.map_with_path(copied, tree, is_leaf=is_variable)


def _copy_leaf(x: Any, value: Any) -> Any:
    """Copies a leaf, or converts `value` to the leaf's type, dtype and sharding."""
    if value is None:
        is_array = isinstance(x, (jax.Array, np.ndarray))
        return x.copy() if is_array else x
    if not hasattr(x, "dtype"):
        return type(x)(value)
    array = np.asarray(value, x.dtype)
    if not isinstance(x, jax.Array):
        return array
    sharding = x.sharding if x.committed else None
    return jax.device_put(array, sharding)
