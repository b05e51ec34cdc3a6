"""Trials of a training step: runs on copies of its arguments, with other numbers.

An `Experiment` has the step and its arguments, and finds the loss scale among them. For
each trial it copies the arguments, puts in a loss scale and perhaps other numbers,
calls the step, and reads what comes out.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from optax_lossscale._arrays.contexts import BLANK_METRICS, OVERFLOWS
from optax_lossscale._arrays.precision import is_inexact_leaf
from optax_lossscale._arrays.validation import check_concrete
from optax_lossscale._arrays.variables import is_variable, without_variables
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.get import get_loss_scale
from optax_lossscale._step.state import loss_scales_in
from optax_lossscale.testing._contents import (
    Path,
    contents,
    is_loss_scale,
    numbers_in,
    parts_of,
)
from optax_lossscale.testing._trial import Trial

# The exponents of finite loss scales at which most gradients overflow
_OVERFLOWING = (126, 124)


class Experiment:
    """A step and its arguments, which are never changed, to make trials of.

    `name` is that of the assertion, for errors.

    Attributes:
      loss_scale: the one loss scale among the arguments, on the host.
      floats: the floating-point and complex arrays among the arguments, by their paths.
    """

    def __init__(self, name: str, step: Callable[..., Any], args: Any, kwargs: Any):
        check_concrete(name, (args, kwargs))
        self._step = step
        self._arguments = {"args": args, "kwargs": kwargs}
        self.floats = {
            path: np.asarray(jax.device_get(x))
            for path, x in numbers_in(self._arguments).items()
            if is_inexact_leaf(x)
        }
        loss_scales = loss_scales_in(self._arguments)
        varying = [x for x in loss_scales if jax.tree.leaves(x)]
        self._has_fixed = len(varying) < len(loss_scales)
        # A fixed loss scale has no number to vary. It counts only if all are fixed.
        counted = varying or loss_scales[:1]
        self.loss_scale = jax.device_get(get_loss_scale(counted))

    def at(self, exponent: float, fixed_overflow: bool = False) -> Trial:
        """The trial at the loss scale 2**exponent, with the counters as given."""
        scales = np.full_like(self.loss_scale.loss_scale, 2.0**exponent)
        loss_scale = self.loss_scale.replace(loss_scale=scales)
        return self.trial(loss_scale, fixed_overflow=fixed_overflow)

    def overflowing(self) -> list[Trial]:
        """Trials at loss scales at which gradients overflow, also those that are fixed.

        The last one is at an infinite loss scale, where all gradients do, unless the
        step raises an error there.
        """
        if not jax.tree.leaves(self.loss_scale):
            return [self.trial(self.loss_scale, fixed_overflow=True)]
        trials = [self.at(x, self._has_fixed) for x in _OVERFLOWING]
        # The step may raise an error there, such as that of `raise_if_stuck`, or of a
        # logger that converts the scale to an integer.
        with contextlib.suppress(Exception):
            trials.append(self.at(np.inf, self._has_fixed))
        return trials

    def repeated(self, trial: Trial, numbers: Mapping[Path, Any]) -> Trial:
        """A trial at the same loss scales as another one, with other numbers."""
        return self.trial(trial.loss_scale, numbers, trial.fixed_overflow)

    def trial(
        self,
        loss_scale: LossScale,
        numbers: Mapping[Path, Any] = MappingProxyType({}),
        fixed_overflow: bool = False,
    ) -> Trial:
        """Runs the step with this loss scale, and with other numbers at some paths.

        With `fixed_overflow`, every fixed loss scale is infinite.
        """
        loss_scale = jax.device_get(loss_scale)
        others = {**numbers, **self._numbers_of(loss_scale)}
        arguments = _copied(self._arguments, others)
        before = contents(arguments)
        # These arrays are kept alive, so that no output gets the id of one of them.
        old = jax.tree.leaves(without_variables(arguments))
        with (
            jax.debug_nans(False),
            jax.debug_infs(False),
            BLANK_METRICS(True),
            OVERFLOWS(fixed_overflow),
        ):
            result = self._step(*arguments["args"], **arguments["kwargs"])
        after = contents({"result": result, **arguments}, old)
        return Trial(loss_scale, fixed_overflow, before, after)

    def _numbers_of(self, loss_scale):
        """The numbers of a loss scale, by their paths among the arguments.

        If several states hold copies of it, each copy gets the same numbers.
        """
        inside = jax.tree.leaves_with_path(loss_scale)
        return {
            place + path: number
            for place in parts_of(is_loss_scale, self._arguments)
            for path, number in inside
        }


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
            copies[id(x)] = jax.tree.map(partial(_copy, number=number), x)
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
    return x if number is None else type(x)(number)
