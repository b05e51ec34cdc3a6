"""Finding the loss scale that an argument stands for, or that a state holds.

`get` takes what a user passes to the optimizer, such as a word, a number or a config.
`get_loss_scale` finds the loss scale in a state. `resolve` takes either, for functions
such as `value_and_scaled_grad`.
"""

from typing import Any, Literal, Self

import jax
import numpy as np

from optax_lossscale import presets
from optax_lossscale._arrays import messages, stateful, validation
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

LossScaleLike = (
    LossScale | float | Literal["dynamic", "headroom"] | dict[str, Any] | None
)


def get(identifier: LossScaleLike) -> LossScale:
    """The loss scale that an identifier stands for.

    Args:
      identifier: one of the following:

        - `"dynamic"`: a `DynamicLossScale`, with its defaults.
        - `"headroom"`: a `HeadroomLossScale`, which suits short runs, and gradients that
          are zero at most steps.
        - A number, or a concrete array of shape (): a `FixedLossScale` of it.
        - None: no scaling, a `FixedLossScale` of 1.
        - A `LossScale`: itself.
        - A dict from `get_config`: the loss scale that it describes.
        - A dict with the key `"preset"`: what the function or class of that name in
          `presets` returns, with the other items as its arguments.

    Returns:
      The `LossScale`, in its initial state unless it was passed itself.

    Raises:
      ValueError: for anything else. If a preset has an unknown name, or an unknown or
        missing argument, the error lists the known ones.

    Example:
      >>> import optax_lossscale as ols
      >>> ols.get(128)
      FixedLossScale(128.0)
      >>> ols.get("dynamic") == ols.DynamicLossScale()
      True
      >>> config = {"preset": "pytorch", "init_scale": 1024.0}
      >>> ols.get(config) == ols.presets.pytorch(init_scale=1024.0)
      True
    """
    match identifier:
        case LossScale():
            return identifier
        case None:
            return FixedLossScale(1)
        # `case "dynamic"` would also match an array of this string, which equals it.
        case str() if identifier == "dynamic":
            return DynamicLossScale()
        case str() if identifier == "headroom":
            return HeadroomLossScale()
        case {"preset": name, **arguments}:
            return _preset(name, arguments)
        case dict():
            return LossScale.from_config(identifier)
    if validation.python_number(identifier) is not None:
        with messages.user_names(loss_scale="scale"):
            return FixedLossScale(identifier)
    raise ValueError(
        "a loss scale is None (no scaling), a number (fixed), 'dynamic', 'headroom', "
        "a LossScale, a dict from get_config(), or a dict with the key 'preset'; got "
        f"{messages.shown(identifier)}. A dtype goes to autocast(loss_fn, dtype)"
    )


def _preset(name: Any, arguments: dict[Any, Any]) -> LossScale:
    """The loss scale that the preset of this name returns for these arguments."""
    known = presets.__all__
    if name not in known:
        raise ValueError(
            f"no preset is named {messages.shown(name)}; there are {', '.join(known)}"
        )
    return stateful.construct(getattr(presets, name), arguments)


def get_loss_scale(state: Any) -> LossScale:
    """The one loss scale in an optimizer state, however deeply nested.

    Args:
      state: a state of `with_loss_scale`'s transformation, or anything that holds one,
        such as the state of an `optax.chain`, a train state or an `nnx.Optimizer`. Or a
        `LossScale` itself.

    Returns:
      The `LossScale`, made of arrays even where `nnx` keeps them in variables.

    Raises:
      ValueError: if the state holds no loss scale, or more than one (`nnx` variables
        that two modules share count once).
      ValueError: if something is wrapped around `with_loss_scale` that belongs inside
        it, such as `optax.MultiSteps`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import optax_lossscale as ols
      >>> tx = optax.chain(ols.with_loss_scale(optax.adam(1e-3), 128), optax.scale(0.5))
      >>> ols.get_loss_scale(tx.init({"w": jnp.ones(3)}))
      FixedLossScale(128.0)
    """
    loss_scales = distinct_nodes(loss_scales_in(state))
    if len(loss_scales) != 1:
        remedy = _SEVERAL if loss_scales else _remedy_for_none(state)
        raise ValueError(
            f"expected exactly one loss scale in the state, found {len(loss_scales)} "
            f"in a {type(state).__name__}. {remedy}"
        )
    _check_nesting(state)
    return without_variables(loss_scales[0])


_SEVERAL = (
    "Pass one of the states, or one LossScale. An optimizer is wrapped as a whole, "
    "once. To test a step that takes several states, make it a function of one of them."
)


def _remedy_for_none(state: Any) -> str:
    """What to do about a state in which no loss scale is found."""
    if find_nodes(lambda x: is_of_nnx(x, "State"), state):
        return (
            "A state of nnx.split does not say what is a loss scale: call nnx.merge "
            "first, and pass the optimizer."
        )
    return (
        "Wrap the optimizer in with_loss_scale once and pass the state that its init "
        "returned, or pass a LossScale, such as get(128)."
    )


def loss_scales_in(state: Any) -> list[LossScale]:
    """Every loss scale in a state, however deeply nested."""
    return find_nodes(lambda x: isinstance(x, LossScale), state)


def resolve(loss_scale: Any) -> LossScale:
    """The loss scale that an argument `loss_scale` of another function stands for.

    The argument is anything that `get` takes, a state that holds one loss scale, or an
    array of shape (). The array may be traced, as where a trainer passes the scale
    through an argument of its own.
    """
    is_number = validation.is_real(loss_scale) and np.shape(loss_scale) == ()
    if is_number and validation.is_traced(loss_scale):
        return _TracedLossScale().replace(loss_scale=loss_scale)
    match loss_scale:  # a dict may be a config, or part of a state
        case None | {"preset": str()} | {"class_name": str(), "config": _}:
            return get(loss_scale)
    if jax.tree_util.all_leaves([loss_scale]):
        return get(loss_scale)
    of_state = get_loss_scale(loss_scale)
    shape = np.shape(of_state.loss_scale)
    if shape:
        raise ValueError(
            f"the state is a stack, whose loss scale has shape {shape}, as made by "
            "vmap(tx.init) or pmap: call this under vmap or pmap, as in "
            "vmap(train_step)(params, state, batch)"
        )
    return of_state


class _TracedLossScale(LossScale):
    """A loss scale that never adapts, but whose value is state, so it may be traced."""

    def adjust(self, grads_finite: jax.typing.ArrayLike) -> Self:
        return self


# Optax's wrappers that must not be around `with_loss_scale`, by the names of their
# states, and what they would do there. They are not imported, so that this package works
# with a version of Optax that has moved one of them.
_AROUND = {
    "MultiStepsState": (
        "MultiSteps",
        "sums scaled gradients and keeps the NaN of an overflow",
    ),
    "ConditionallyTransformState": (
        "conditionally_transform",
        "passes some gradients on scaled",
    ),
    "ApplyIfFiniteState": (
        "apply_if_finite",
        "hides overflows from it, so they never lower it",
    ),
    "MechanicState": (
        "contrib.mechanize",
        "learns its learning rate from scaled gradients",
    ),
}


def name_in_optax(state: Any) -> str | None:
    """The name of a state's class if Optax defines the class, else None."""
    cls = type(state)
    return cls.__name__ if cls.__module__.split(".")[0] == "optax" else None


def _is_around(state: Any) -> bool:
    """Whether this is the state of a wrapper in `_AROUND`, with a loss scale inside."""
    return name_in_optax(state) in _AROUND and bool(loss_scales_in(state))


def _check_nesting(state: Any) -> None:
    """Raises if a wrapper is around `with_loss_scale` that belongs inside it."""
    around = find_nodes(_is_around, state)
    if around:
        name, harm = _AROUND[type(around[0]).__name__]
        raise ValueError(
            f"optax.{name} around with_loss_scale {harm}: put it inside, where "
            "gradients are unscaled and finite, as in "
            f"with_loss_scale(optax.{name}(inner, …))"
        )
