"""Finds the loss scale that an argument describes or a state holds.

`get` accepts what users pass to `with_loss_scale`: a word such as `"dynamic"`, a
number, a config or a `LossScale`. `get_loss_scale` finds the loss scale in an optimizer
state. `resolve` accepts either, for functions such as `value_and_scaled_grad`::

    value_and_scaled_grad(loss_fn, 1024)
    value_and_scaled_grad(loss_fn, state)
"""

from typing import Any, Literal

import jax
import numpy as np

from optax_lossscale._arrays import messages, validation
from optax_lossscale._arrays.variables import (
    distinct_nodes,
    find_nodes,
    is_of_nnx,
    without_variables,
)
from optax_lossscale._scales.dynamic import DynamicLossScale
from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.headroom import HeadroomLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.nesting import (
    check_master_weights_are_last,
    check_wrappers_are_inside,
)
from optax_lossscale._step.state import check_no_stack, loss_scales_in

LossScaleLike = (
    LossScale
    | float
    | np.number
    | jax.Array
    | Literal["dynamic", "headroom"]
    | dict[str, Any]
    | None
)

_REMEDY_FOR_SEVERAL = (
    "Pass one of the states, or one LossScale. Wrap an optimizer once, as a whole. To "
    "test a step with several states, make the step a function of one of them"
)


def get(identifier: LossScaleLike) -> LossScale:
    """Returns the loss scale that a word, a number or a config describes.

    `with_loss_scale` and other functions call it on their argument `loss_scale`, so a
    program can read that argument from a config file, as a word, a number or a dict.

    Args:
      identifier: one of the following:

        - `"dynamic"`: a `DynamicLossScale` with its defaults.
        - `"headroom"`: a `HeadroomLossScale` with its defaults. It suits short runs,
          and gradients that are all zero on most steps.
        - A number, or a concrete array of shape (): a `FixedLossScale` with that scale.
        - None: no scaling, a `FixedLossScale` of 1.
        - A `LossScale`: returned unchanged.
        - A dict from `get_config`: the loss scale that it describes.

    Returns:
      The `LossScale`, in its initial state unless `identifier` is a `LossScale`.

    Raises:
      ValueError: if `identifier` is none of these, or is a number that is not between
        2**-60 and 2**60.

    Example:
      >>> import optax_lossscale as ols
      >>> ols.get(128)
      FixedLossScale(128.0)
      >>> ols.get("dynamic") == ols.DynamicLossScale()
      True
    """
    match identifier:
        case LossScale():
            return identifier
        case None:
            return FixedLossScale(1)
        # `case "dynamic"` would also match a NumPy array that holds this string.
        case str() if identifier == "dynamic":
            return DynamicLossScale()
        case str() if identifier == "headroom":
            return HeadroomLossScale()
        case dict():
            return LossScale.from_config(identifier)
    if validation.python_number(identifier) is not None:
        with messages.user_names(loss_scale="scale"):
            return FixedLossScale(identifier)  # pyrefly: ignore[bad-argument-type]
    is_named = isinstance(identifier, str | type | np.dtype)
    is_16_bit_dtype = is_named and "16" in str(identifier)
    remedy = ". Pass a dtype to autocast(loss_fn, dtype)" if is_16_bit_dtype else ""
    raise ValueError(
        "a loss scale is None (no scaling), a number (fixed), 'dynamic', 'headroom', "
        f"a LossScale, or a dict from get_config(); got {messages.shown(identifier)}{remedy}"
    )


def get_loss_scale(state: Any) -> LossScale:
    """Returns the one loss scale in an optimizer state, however deeply nested.

    Use it to read the current scale, `get_loss_scale(state)()`, or to unscale gradients
    for a log, `get_loss_scale(state).unscale(scaled_grads)`.

    Args:
      state: a state of the transformation that `with_loss_scale` returns, or anything
        that contains such a state: the state of an `optax.chain`, a train state, or an
        `nnx.Optimizer`. A `LossScale` itself is also accepted.

    Returns:
      The `LossScale`. Its state fields are arrays, even if `nnx` keeps them in
      variables. If the state is a stack of several models' states, so is the loss
      scale.

    Raises:
      ValueError: if the state holds no loss scale, or more than one. (A loss scale in
        `nnx` variables that two modules share counts once.)
      ValueError: if `optax.MultiSteps`, `conditionally_transform`, `apply_if_finite`
        or `contrib.mechanize` is wrapped around `with_loss_scale`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = optax.chain(ols.with_loss_scale(optax.adam(1e-3), 128), optax.scale(0.5))
      >>> ols.get_loss_scale(tx.init({"w": jnp.ones(3)}))
      FixedLossScale(128.0)
    """
    loss_scales = distinct_nodes(loss_scales_in(state))
    if len(loss_scales) != 1:
        remedy = _REMEDY_FOR_SEVERAL if loss_scales else _remedy_for_none(state)
        raise ValueError(
            f"expected exactly one loss scale in the state, found {len(loss_scales)} "
            f"in a {type(state).__name__}. {remedy}"
        )
    check_wrappers_are_inside(state)
    return without_variables(loss_scales[0])


def _remedy_for_none(state: Any) -> str:
    """Returns advice for a state in which no loss scale is found."""
    if find_nodes(lambda x: is_of_nnx(x, "State"), state):
        return (
            "A state from nnx.split does not say what is a loss scale: call nnx.merge "
            "first, and pass the optimizer"
        )
    return (
        "Wrap the optimizer in with_loss_scale, and pass the state that its init "
        "returned, or pass a LossScale, such as get(128)"
    )


def resolve(loss_scale: Any) -> LossScale:
    """Returns the loss scale for the argument `loss_scale` of another function.

    The argument is anything that `get` accepts, a state that holds one loss scale, or
    an array of shape (). The array may be traced, because some trainers pass the scale
    to their compiled step as an argument.
    """
    is_number = validation.is_real(loss_scale) and np.shape(loss_scale) == ()
    if is_number and validation.is_traced(loss_scale):
        return _with_traced_scale(loss_scale)
    if _is_identifier(loss_scale):
        return get(loss_scale)
    check_master_weights_are_last(loss_scale)
    found = get_loss_scale(loss_scale)
    check_no_stack(found.loss_scale)
    return found


def _with_traced_scale(scale: Any) -> LossScale:
    """Returns a loss scale whose current scale is a traced number.

    Callers only multiply by the scale and ask for its upper bound. No bound of a traced
    number is known, and a `DynamicLossScale` without a cap has none.
    """
    return DynamicLossScale().replace(loss_scale=scale)


def _is_identifier(x: Any) -> bool:
    """Whether `x` is for `get`, not a state: None, a config, or a single leaf.

    A config is recognized by its keys, because a state may be a dict as well.
    """
    match x:
        case None | {"class_name": str(), "config": _}:
            return True
    return jax.tree_util.all_leaves([x])
