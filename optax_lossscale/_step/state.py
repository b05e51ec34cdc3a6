"""The state of an optimizer with loss scaling and the checks at the start of a step.

Between two steps, a state may pass through a checkpoint, a `vmap` or another
transformation and come back changed. If a checkpoint restored a flag as a float, for
example, training would silently continue with wrong values. Each step therefore checks
everything that can be checked without reading an array: types, structures, shapes and
dtypes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_lossscale._arrays.checks import path_name, shown
from optax_lossscale._arrays.precision import dtype_of, is_array_leaf, is_narrow_leaf
from optax_lossscale._arrays.stateful import Stateful
from optax_lossscale._arrays.variables import (
    distinct_nodes,
    find_nodes,
    without_variables,
)
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale.skips import SkipRule


class LossScaleState(NamedTuple):
    """The state of `with_loss_scale`.

    Save the state in checkpoints as it is. To log it, call `metrics`; to read the loss
    scale, call `get_loss_scale`. Both also find the state inside the state of an
    `optax.chain`, a train state or an `nnx.Optimizer`.

    Attributes:
      loss_scale: the `LossScale`, with its counters.
      inner_state: the state of the wrapped optimizer.
      should_apply: whether the last step was applied; bool, shape (). A step that
        checks nothing, with `skip=None` and a fixed loss scale, does not change it.
      skipped_steps: the number of steps skipped so far; int32, shape ().
      consecutive_skipped_steps: the number of steps skipped since the last applied
        step; int32, shape ().
      gradient_norm: the global L2 norm of the last step's unscaled gradients, or
        infinity if they were not finite or their norm was 2**64 or more; float32, shape
        (). With `skip=None`, nothing is measured, and this is None.
      skip_rule: the `SkipRule` that judges finite steps, with its state; or None.
    """

    loss_scale: LossScale
    inner_state: Any
    should_apply: jax.Array
    skipped_steps: jax.Array
    consecutive_skipped_steps: jax.Array
    gradient_norm: jax.Array | None = None
    skip_rule: SkipRule | None = None


def loss_scales_in(state: Any) -> list[LossScale]:
    """Finds every loss scale in a state, however deeply nested."""
    return find_nodes(lambda x: isinstance(x, LossScale), state)


def loss_scale_states_in(state: Any) -> list[LossScaleState]:
    """Finds every `LossScaleState` in an optimizer state.

    `nnx` variables in it are replaced by their arrays. Several states that share their
    variables are returned once.
    """
    states = find_nodes(lambda x: isinstance(x, LossScaleState), state)
    return [without_variables(x) for x in distinct_nodes(states)]


def loss_scale_state_or_none(state: Any) -> LossScaleState | None:
    """Returns the `LossScaleState` in a state, or None for a bare loss scale.

    The state must be one that `get_loss_scale` accepts, so that there is only one.
    """
    return next(iter(loss_scale_states_in(state)), None)


def check_state(state: Any) -> None:
    """Raises unless this is the `LossScaleState` of one model, with a bool flag."""
    if not isinstance(state, LossScaleState):
        raise TypeError(
            "the state must be the LossScaleState that this transformation's init or "
            f"its last step returned, got a {type(state).__name__}. The order of the "
            "arguments is gradients, state, params"
        )
    dtype = dtype_of(state.should_apply)
    if dtype != np.bool_:
        raise TypeError(
            f"the state's should_apply came back as {dtype}, not as bool. Either a "
            "checkpoint was restored into another dtype, or a transformation around "
            "the wrapper has computed with its state, as SAM's transparent mode does. "
            "Put it inside the wrapper: with_loss_scale(optax.contrib.sam(…))"
        )
    check_no_stack(state.should_apply)


def check_no_stack(scalar: Any) -> None:
    """Raises a `ValueError` if a scalar has axes, as it has in a stack of states."""
    shape = np.shape(scalar)
    if shape:
        raise ValueError(
            f"the state is a stack of shape {shape}, as made by vmap(tx.init) or pmap. "
            "Run the whole step under the same vmap or pmap: "
            "vmap(train_step)(params, state, batch)"
        )


def check_configuration(name: str, in_state: Any, configured: Any) -> None:
    """Raises a `ValueError` if state and transformation configure a field differently.

    The field is a loss scale or a skip rule. The configuration of either is static,
    that is, part of its structure as a pytree, so it is enough to compare structures.
    """
    if jax.tree.structure(in_state) != jax.tree.structure(configured):
        raise ValueError(
            f"the {name.replace('_', ' ')} in the state is configured differently from "
            f"this transformation's:\n  state:          {_shown(in_state, configured)}"
            f"\n  transformation: {_shown(configured, in_state)}\nRestore a checkpoint "
            "into what tx.init(params) returns. To continue with the transformation's "
            "configuration, keep the rest of the state: "
            f"state._replace({name}=tx.init(params).{name})"
        )


def _shown(x: Any, other: Any) -> str:
    """Shows a configuration; beside one of the same class, only what differs."""
    if not isinstance(x, Stateful) or type(x) is not type(other):
        return shown(x)
    theirs = other.get_config()["config"]
    config = x.get_config()["config"].items()
    listed = ", ".join(
        f"{name}={value!r}" for name, value in config if value != theirs[name]
    )
    return f"{type(x).__name__}({listed})"


def check_inner_state(
    inner_state: Any, init: Callable[[Any], Any], params: Any
) -> None:
    """Raises a `ValueError` if an inner state does not fit 16-bit numbers in it.

    It must have the structure, shapes and dtypes of `init(params)`, or small values
    would underflow and master weights be joined wrongly. A state without 16-bit numbers
    and master weights is left to the inner update.
    """
    leaves = jax.tree.leaves_with_path(inner_state)
    is_narrow = [is_narrow_leaf(x) or _is_remainder(x) for _, x in leaves]
    if not any(is_narrow) and not any(map(is_narrow_leaf, jax.tree.leaves(params))):
        return
    needed = jax.tree.leaves_with_path(jax.eval_shape(init, params))
    if [path for path, _ in leaves] != [path for path, _ in needed]:
        faults = ["another structure"]
    else:
        pairs = zip(leaves, needed, strict=True)
        faults = [_misfit(path, x, y) for (path, x), (_, y) in pairs]
    fault = next(filter(None, faults), None)
    if fault:
        raise ValueError(
            f"the inner state has {fault}. It comes from other parameters, or from an "
            "optimizer of 16-bit parameters, in which small values would underflow. "
            "Make a new one, and cast the old one into it once:\n"
            "    state = tx.init(params)\n"
            "    inner_state = optax.tree.cast_like(restored, state.inner_state)\n"
            "    state = state._replace(inner_state=inner_state)"
        )


def _misfit(path: Any, x: Any, needed: Any) -> str | None:
    """Says how an array does not do for what is needed, or returns None if it does."""
    is_narrower = is_narrow_leaf(x) and dtype_of(x).itemsize < needed.dtype.itemsize
    is_other_remainder = _is_remainder(x) != _is_remainder(needed)
    if np.shape(x) == needed.shape and not is_narrower and not is_other_remainder:
        return None
    actual = f"{dtype_of(x)}{list(np.shape(x))}"
    wanted = f"{dtype_of(needed)}{list(needed.shape)}"
    return f"{actual} where it needs {wanted}, at {path_name(path)}"


def _is_remainder(x: Any) -> bool:
    """Whether an array holds the remainders of bfloat16 parameters."""
    return is_array_leaf(x) and dtype_of(x) == np.uint16
