"""Finds the loss scale that an argument describes or a state holds.

`as_loss_scale` accepts what users pass to `with_loss_scale`: a word such as
`"dynamic"`, a number, a config or a `LossScale`. `get_loss_scale` finds the loss scale
in an optimizer state. `resolve` accepts either, for functions such as
`value_and_scaled_grad`::

    value_and_scaled_grad(loss_fn, 1024)
    value_and_scaled_grad(loss_fn, state)
"""

from collections import OrderedDict
from typing import Any, Literal

import jax
import numpy as np

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.variables import (
    distinct_nodes,
    find_nodes,
    is_of_nnx,
    without_variables,
)
from optax_lossscale._scales.dynamic import DynamicLossScale
from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.headroom import HeadroomLossScale
from optax_lossscale._scales.loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScale
from optax_lossscale._step.loss import is_real
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
"""What describes a loss scale, such as the argument of `with_loss_scale`.

- `"dynamic"`: a `DynamicLossScale` with its defaults.
- `"headroom"`: a `HeadroomLossScale` with its defaults.
- A number, or a concrete array of shape (): a `FixedLossScale` with that scale.
- None: no scaling, a `FixedLossScale` of 1.
- A `LossScale`, or a dict from its `get_config`.
"""


_NAMED = {"dynamic": DynamicLossScale, "headroom": HeadroomLossScale}


def as_loss_scale(description: LossScaleLike) -> LossScale:
    """Returns the loss scale that a word, a number or a config describes."""
    match description:
        case LossScale():
            return description
        case None:
            return FixedLossScale(1)
        case str() if description in _NAMED:
            return _NAMED[description]()
        case dict():
            return LossScale.from_config(description)
    number = checks.python_number(description)
    if number is not None:
        checks.number("loss_scale", number, SMALLEST_SCALE, LARGEST_SCALE)
        return FixedLossScale(number)
    is_named = isinstance(description, str | type | np.dtype)
    is_16_bit_dtype = is_named and "16" in str(description)
    remedy = ". Pass a dtype to autocast(loss_fn, dtype)" if is_16_bit_dtype else ""
    raise ValueError(
        "a loss scale is None (no scaling), a number (fixed), 'dynamic', 'headroom', "
        f"a LossScale, or a dict from get_config(); got {checks.shown(description)}"
        f"{remedy}"
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
      ValueError: if `optax.MultiSteps` is wrapped around `with_loss_scale`.

    Warns:
      UserWarning: if another transformation stands before `with_loss_scale` in an
        `optax.chain`, as it receives scaled gradients.

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
    _check_what_is_around(state)
    return without_variables(loss_scales[0])


_REMEDY_FOR_SEVERAL = (
    "Pass one of the states, or one LossScale. Wrap an optimizer once, as a whole. To "
    "test a step with several states, make the step a function of one of them"
)


def _remedy_for_none(state: Any) -> str:
    """Returns advice for a state in which no loss scale is found."""
    if find_nodes(lambda x: is_of_nnx(x, "State"), state):
        return (
            "A state from nnx.split does not say what is a loss scale: call nnx.merge "
            "first, and pass the optimizer"
        )
    return (
        "Wrap the optimizer in with_loss_scale, and pass the state that its init "
        "returned, or pass a LossScale, such as FixedLossScale(128)"
    )


def _check_what_is_around(state: Any) -> None:
    """Raises or warns if a transformation around the wrapper gets scaled gradients.

    An optimizer is a pair of functions, which do not show what it consists of, but its
    state shows it: it holds the states of the transformations inside it.
    """
    if loss_scales_in(find_nodes(_is_multi_steps, state)):
        raise ValueError(
            "optax.MultiSteps around with_loss_scale sums scaled gradients and keeps "
            "the NaN of an overflow. Put it inside, where gradients are unscaled and "
            "finite: with_loss_scale(optax.MultiSteps(inner, …))"
        )
    if _is_preceded(state):
        checks.warn(
            "a transformation stands before with_loss_scale in an optax.chain, so it "
            "receives scaled gradients: clip_by_global_norm(1.0) would clip them, and "
            "the step would be as many times too small as the loss scale is large. Put "
            "it inside: with_loss_scale(optax.chain(clip, optimizer)). If these are "
            "the states of two optimizers instead, pass the one with the loss scale"
        )


def _is_multi_steps(state: Any) -> bool:
    """Whether this is the state of `optax.MultiSteps`, known by its fields."""
    return {"mini_step", "acc_grads"} <= set(getattr(state, "_fields", ()))


def _is_preceded(state: Any) -> bool:
    """Whether something stands before a loss scale in a chain, at any depth."""
    for chain in find_nodes(_is_chain, state):
        first, *others = _states_of(chain)
        if loss_scales_in(others) or _is_preceded(first):
            return True
    return False


def _is_chain(state: Any) -> bool:
    """Whether this is the state of an `optax.chain` or `optax.named_chain`.

    It is a tuple or an ordered dict of states: of named tuples, or of chains.
    """
    if type(state) not in (tuple, OrderedDict) or not state:
        return False
    return all(hasattr(x, "_fields") or _is_chain(x) for x in _states_of(state))


def _states_of(chain: Any) -> list[Any]:
    """Returns the states of a chain's transformations, in order."""
    return list(chain.values() if isinstance(chain, OrderedDict) else chain)


def resolve(loss_scale: Any) -> LossScale:
    """Returns the loss scale for the argument `loss_scale` of another function.

    The argument is a `LossScaleLike`, a state that holds one loss scale, or an array of
    shape (). The array may be traced, because some trainers pass the scale to their
    compiled step as an argument.
    """
    is_number = is_real(loss_scale) and np.shape(loss_scale) == ()
    if is_number and checks.is_traced(loss_scale):
        # Callers only multiply by the scale, and ask for its upper bound, which a
        # `DynamicLossScale` without a cap does not have either.
        return DynamicLossScale().replace(loss_scale=loss_scale)
    if _is_description(loss_scale):
        return as_loss_scale(loss_scale)
    of_state = get_loss_scale(loss_scale)
    check_no_stack(of_state.loss_scale)
    return of_state


def _is_description(x: Any) -> bool:
    """Whether `x` is None, a config or a single leaf, and so not a state.

    A config is recognized by its keys, because a state may be a dict as well.
    """
    match x:
        case None | {"class_name": str(), "config": _}:
            return True
    return jax.tree_util.all_leaves([x])
