"""What a step may be given, and the errors that say so."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import dtype_of, is_inexact
from optax_lossscale._arrays.variables import plain
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._scales.validation import is_numeric, shown
from optax_lossscale._skips.rule import SkipRule
from optax_lossscale._step.state import LossScaleState

Mask = Any | Callable[[Any], Any]


def refuse_other_leaves(name: str, tree: Any) -> None:
    """Raises for a tree with leaves that are neither arrays nor numbers."""
    for path, x in jax.tree.leaves_with_path(tree):
        if not hasattr(x, "dtype") and not isinstance(x, (bool, int, float, complex)):
            raise TypeError(
                f"{name} must be a tree of arrays, got {shown(x)} at {path_name(path)}; of a "
                "model that holds other things give the arrays alone, as eqx.filter(model, "
                "eqx.is_inexact_array) does"
            )


def refuse_other_shapes(grads: Any, params: Any) -> None:
    """Raises unless each gradient has its parameter's shape, or a batch of it."""

    def check(path, p, g):
        shape, batch = np.shape(p), np.shape(g)[: np.ndim(g) - np.ndim(p)]
        if np.shape(g) != (*batch, *shape):
            raise ValueError(
                f"a gradient must have the shape of its parameter, {shape} at "
                f"{path_name(path)}; got {np.shape(g)}"
            )

    jax.tree.map_with_path(check, params, grads)


def mask_of(grads: Any, mask: Mask | None) -> Any:
    """The mask as a prefix of the gradients, made of bools."""
    if callable(mask):
        mask = mask(grads)
        refuse_other_masks(mask)
    if mask is None:
        return True
    try:
        jax.tree.broadcast(mask, grads)
    except ValueError as error:
        raise ValueError(
            "mask must be a prefix of the gradients' tree, with a bool for each leaf or branch; "
            f"got {jax.tree.structure(mask)} for {jax.tree.structure(grads)}"
        ) from error
    return mask


def refuse_other_masks(mask: Mask | None) -> None:
    """Raises for what is neither a function nor a tree of bools."""
    for leaf in [] if callable(mask) else jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            raise TypeError(
                "mask must be a tree of bools, or a function from the gradients to one; got "
                f"{shown(leaf)} in it"
            )


def refuse_other_states(state: Any, order: str) -> None:
    """Raises for what is no state of this transformation, or came back as something else."""
    if not isinstance(state, LossScaleState):
        raise TypeError(
            "the state must be the LossScaleState that this transformation's init or its "
            f"last step returned, got a {type(state).__name__}; the order of the arguments "
            f"is {order}"
        )
    if not isinstance(state.loss_scale, LossScale):
        raise TypeError(
            f"the state's loss_scale must be a LossScale, got {shown(state.loss_scale)}: restore "
            "a checkpoint into the state that tx.init(params) returns"
        )
    kind = dtype_of(state.should_apply)
    if kind != np.bool_:
        raise TypeError(
            f"the state's should_apply came back as {kind}: a transformation around the wrapper "
            "has computed with its state, as SAM's transparent mode does. Put it inside: "
            "with_loss_scale(optax.contrib.sam(…))"
        )


def refuse_another_configuration(given: LossScale, own: LossScale) -> None:
    """Raises for a loss scale that goes by other rules than the transformation's."""
    if jax.tree.structure(given) != jax.tree.structure(own):
        raise ValueError(
            "the state's loss scale is of another configuration than this transformation's:\n"
            f"  state:          {given.get_config()}\n  transformation: {own.get_config()}\n"
            "To go on with this configuration, keep the rest of the state: "
            "tx.init(params)._replace(inner_state=state.inner_state)"
        )


def refuse_another_rule(given: SkipRule | None, own: SkipRule | None) -> None:
    """Raises for a rule of skipping that is not the transformation's."""
    if jax.tree.structure(given) != jax.tree.structure(own):
        described = lambda rule: "none" if rule is None else shown(rule)
        raise ValueError(
            "the state's rule of skipping is another than this transformation's:\n"
            f"  state:          {described(given)}\n  transformation: {described(own)}\n"
            "To go on with this rule, keep the rest of the state: "
            "state._replace(skip_rule=tx.init(params).skip_rule)"
        )


def refuse_narrower(inner_state: Any, expected: Callable[[], Any]) -> None:
    """Raises for an inner state that is narrower than `init` makes it.

    Second moments of small gradients underflow in float16, and the state of a bare optimizer of
    16-bit parameters holds them in it.

    Args:
      inner_state: the state given.
      expected: gives the shapes of what `init` makes, and is only called where they matter.
    """
    is_narrow = lambda x: is_inexact(x) and dtype_of(x).itemsize < 4
    if not any(map(is_narrow, jax.tree.leaves(inner_state))):
        return

    def check(path, given, needed):
        if is_narrow(given) and dtype_of(given).itemsize < dtype_of(needed).itemsize:
            raise ValueError(
                f"the inner state holds {dtype_of(given)} where it needs {dtype_of(needed)}, at "
                f"{path_name(path)}: it is that of an optimizer of 16-bit parameters, and small "
                "numbers would underflow in it. Cast it once: state._replace(inner_state="
                "optax.tree.cast_like(restored, state.inner_state)), with the state of init"
            )

    shapes = expected()
    if jax.tree.structure(shapes) == jax.tree.structure(inner_state):
        jax.tree.map_with_path(check, inner_state, shapes)


def refuse_masked(scaled_grads: Any) -> None:
    """Raises where others see the gradients that are left out here, which are scaled."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    if any(map(is_masked, jax.tree.leaves(scaled_grads, is_leaf=is_masked))):
        raise ValueError(
            "with_loss_scale is inside optax.masked, optax.partition or optax.multi_transform, "
            "which hand the gradients of all other parameters on as they are, scaled: wrap the "
            "whole of it, as in with_loss_scale(optax.masked(inner, mask))"
        )


def scalar(value: ArrayLike) -> jax.Array:
    """The true loss, as an array."""
    value = plain(value)
    if not is_numeric(value) or jnp.iscomplexobj(value):
        raise TypeError(
            f"value must be the true loss, a real number, got {shown(value)}; of a pair (loss, "
            "aux) or of several losses in a dict pass the loss alone"
        )
    if np.shape(value) != ():
        raise TypeError(
            f"value must be the true loss, a scalar, got shape {np.shape(value)}; reduce it, with "
            "jnp.mean say"
        )
    return jnp.asarray(value)


def extra_args_of(
    inner: optax.GradientTransformation, value: jax.Array | None, extra_args: dict[str, Any]
) -> dict[str, Any]:
    """The extra arguments for `inner`: the loss among them, where it takes one."""
    parameters = inspect.signature(inner.update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    is_taken = value is not None and (takes_any or "value" in parameters)
    return {"value": value} | extra_args if is_taken else extra_args


def refuse_another_inner_state(
    error: Exception, inner_state: Any, init: Callable[[Any], LossScaleState], params: Any
) -> None:
    """Raises where inner failed, if its state is not what it makes of such parameters."""
    if params is None:
        return
    expected = jax.eval_shape(init, params).inner_state
    kind = lambda tree: (jax.tree.structure(tree), [np.shape(x) for x in jax.tree.leaves(tree)])
    if kind(inner_state) != kind(expected):
        raise ValueError(
            "the state's inner_state is that of another optimizer, or of other parameters: this "
            f"one's is {shown(expected)}, got {shown(inner_state)}. Begin with tx.init(params). "
            f"The optimizer says: {error}"
        ) from error


def refuse_value_within(error: Exception) -> None:
    """Raises where what is wrapped handed `value` on to a part that does not take it."""
    if isinstance(error, TypeError) and "unexpected keyword argument 'value'" in str(error):
        raise TypeError(
            "a part of inner does not take value, the true loss, which the parts of an "
            "optax.chain are all given. Wrap that part so that it is given no extra arguments, as "
            "in optax.GradientTransformation(*optax.contrib.sam(…))"
        ) from error
