"""From a loss function to scaled gradients, in two ways.

`value_and_scaled_grad` differentiates the loss times the loss scale, and returns the
loss itself beside the gradients. `scale_gradient` is for code that differentiates by
itself: it returns the loss as it is, with a derivative that is multiplied by the loss
scale. By the chain rule, all gradients of that loss are then multiplied by the scale.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._arrays import messages, validation
from optax_lossscale._arrays.contexts import DIAGNOSING
from optax_lossscale._arrays.precision import at_least_float32, is_inexact_leaf
from optax_lossscale._arrays.variables import find_nodes, is_module
from optax_lossscale._scales.fixed import FixedLossScale
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.get import resolve
from optax_lossscale._step.grad_dtype import (
    GradDtype,
    cast_to_grad_dtype,
    check_grad_dtype,
)
from optax_lossscale._step.inputs import check_arrays, check_scalar

_INFINITE_IN_FLOAT16 = 65520  # from here on, numbers round to infinity, not to 65504


def scale_gradient(loss: jax.typing.ArrayLike, loss_scale: Any) -> jax.Array:
    """The loss itself, with a gradient that is multiplied by the loss scale.

    Return it from a loss function that other code differentiates:
    `nnx.value_and_grad`, `eqx.filter_value_and_grad`, or a trainer that calls
    `jax.grad` itself. The gradients come out scaled, as `with_loss_scale` expects them;
    in forward mode, the tangent is scaled. Under `diagnose`, which tries loss scales of
    its own, the gradient is not scaled.

    Source: `optax.scale_gradient`, with a loss scale as the factor.

    Args:
      loss: a real floating-point scalar.
      loss_scale: anything that `get` accepts, a traced number, or a state that holds
        exactly one loss scale. No gradient flows into it.

    Returns:
      The unchanged loss, shape (), in float32 or wider. Backpropagation begins with the
      loss scale in the dtype of the loss, and float16 may not hold it.

    Raises:
      TypeError: if the loss is not a real floating-point scalar.
      ValueError: if `loss_scale` is not a loss scale, or a state that holds none or
        several, or one in which something comes after `with_master_weights`.

    Warns:
      UserWarning: if the loss is float16 and the loss scale may reach 65520, which is
        infinite in float16.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(x):
      ...     return ols.scale_gradient(jnp.square(x), ols.FixedLossScale(8))
      >>> loss, scaled_grad = jax.value_and_grad(loss_fn)(3.0)
      >>> float(loss), float(scaled_grad)
      (9.0, 48.0)
    """
    check_scalar("the loss", loss)
    loss = jnp.asarray(loss)
    if not is_inexact_leaf(loss):
        raise TypeError(f"the loss must be a floating-point number, got {loss.dtype}")
    loss_scale = resolve(loss_scale)
    _warn_of_float16(loss, loss_scale)
    wide = at_least_float32(loss)
    return wide if DIAGNOSING.value else _with_scaled_tangent(wide, loss_scale)


@jax.custom_jvp
def _with_scaled_tangent(loss: jax.Array, loss_scale: LossScale) -> jax.Array:
    """The loss, whose derivative is the loss scale instead of 1."""
    return loss


@_with_scaled_tangent.defjvp
def _scaled_tangent(primals, tangents):
    """The JVP rule: the loss as it is, and its tangent times the loss scale."""
    loss, loss_scale = primals
    tangent, _ = tangents
    return loss, loss_scale.scale(tangent)


def _warn_of_float16(loss: Any, loss_scale: LossScale) -> None:
    """Warns of a float16 loss if the loss scale may be infinite in float16."""
    highest = getattr(loss_scale, "max_scale", None)
    if isinstance(loss_scale, FixedLossScale):
        highest = loss_scale.initial_scale
    is_low = highest is not None and highest < _INFINITE_IN_FLOAT16
    if getattr(loss, "dtype", None) == jnp.float16 and not is_low:
        messages.warn(
            "the loss is float16, where a loss scale is infinite from "
            f"{_INFINITE_IN_FLOAT16} on. Compute the loss in float32: "
            "jnp.mean((prediction - target).astype(jnp.float32) ** 2)"
        )


def value_and_scaled_grad(
    fun: Callable[..., Any],
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    grad_dtype: GradDtype | None = None,
    **kwargs: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad`, but the gradients are those of the scaled loss.

    The loss is multiplied by the loss scale before it is differentiated, so small
    gradients do not underflow in float16. Call this inside the training step, with the
    step's own state: a function made before the loop would keep the first loss scale.

    Args:
      fun: a function that returns the loss, a real floating-point scalar.
      loss_scale: anything that `get` accepts, a traced number, or an optimizer state
        that holds exactly one loss scale.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`, a pair of the loss and anything
        else.
      grad_dtype: the dtype of the gradients. Wider floats among the differentiated
        arguments are cast to it, and `fun` is called with the narrow ones. This alone
        does not make products 16 bits wide, as each operation computes in the widest
        dtype among its inputs: for that, pass `autocast(fun)`. One of:

        - A dtype, such as `jnp.float16` for half the memory.
        - A tree of dtypes, with `None` for no cast, that is a prefix of the
          differentiated argument (for several `argnums`, of the tuple of them).
        - A function that takes this argument, and returns a dtype or a tree.
      **kwargs: further arguments of `jax.value_and_grad`.

    Returns:
      A function of `fun`'s arguments that returns `(value, scaled_grads)`: `fun`'s own
      value, bit for bit (with `grad_dtype`, its value for the arguments as cast), and
      *scaled* gradients, for `with_loss_scale`. For the norm of the true gradients, use
      `metrics(state)["gradient_norm"]` if a skip rule measures it, and otherwise
      `optax.tree.norm(get_loss_scale(state).unscale(scaled_grads))`.

    Raises:
      TypeError: if `fun` is not a function, or `argnums` are not ints.
      TypeError: when called, if the loss is not a real floating-point scalar, or if
        `fun` returns no pair with `has_aux`.
      TypeError: when called, if a differentiated argument is not a tree of arrays, has
        integers (unless `allow_int=True`), or is an `nnx.Module`. Differentiate modules
        with `nnx` and `scale_gradient`.
      ValueError: if `loss_scale` is not a loss scale, or a state that holds none or
        several, or one in which something comes after `with_master_weights`.
      ValueError: if `argnums` name an argument twice; when called, also if they do so
        by a negative number.
      ValueError: if `grad_dtype` has dtypes other than floating-point ones; when
        called, also if it is not a prefix of the differentiated argument, or if the
        argument has floats of another dtype of the same width.

    Warns:
      UserWarning: when called, for a float16 loss, as `scale_gradient` does.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> loss, scaled_grad = ols.value_and_scaled_grad(jnp.square, ols.FixedLossScale(8))(3.0)
      >>> float(loss), float(scaled_grad)
      (9.0, 48.0)
    """
    loss_scale = resolve(loss_scale)
    validation.check_function("fun", fun)
    check_grad_dtype(grad_dtype)
    positions = validation.argnums_tuple(argnums)
    if not positions:
        raise TypeError("argnums must be an int or a sequence of at least one, got ()")

    def scaled_fun(*args, **kw):
        returned = fun(*args, **kw)
        loss = loss_of(returned, has_aux)
        check_scalar("the loss", loss)
        _warn_of_float16(loss, loss_scale)
        return loss_scale.scale(jnp.asarray(loss)), returned

    scaled_value_and_grad = jax.value_and_grad(
        scaled_fun, argnums, has_aux=True, **kwargs
    )

    @functools.wraps(fun)
    def value_and_scaled_grad_fn(*args, **kw):
        are_given = all(-len(args) <= n < len(args) for n in positions)
        if are_given:  # otherwise, JAX raises an error
            args = _checked_and_cast(args, argnums, grad_dtype)
        (_, returned), scaled_grads = scaled_value_and_grad(*args, **kw)
        return returned, scaled_grads

    return value_and_scaled_grad_fn


def _checked_and_cast(
    args: tuple[Any, ...], argnums: int | Sequence[int], grad_dtype: GradDtype | None
) -> Sequence[Any]:
    """The arguments, with the differentiated ones checked, and cast to `grad_dtype`."""
    positions = validation.argnums_tuple(argnums)
    if len({n % len(args) for n in positions}) < len(positions):
        raise ValueError(f"argnums must name each argument once, got {argnums}")
    operands = [args[n] for n in positions]
    is_one = not isinstance(argnums, Sequence)
    differentiated = operands[0] if is_one else tuple(operands)
    _check_no_modules(differentiated)
    check_arrays("what is differentiated", differentiated)
    if grad_dtype is None:
        return args
    cast = cast_to_grad_dtype(grad_dtype, differentiated)
    new_args = list(args)
    for n, operand in zip(positions, [cast] if is_one else cast, strict=True):
        new_args[n] = operand
    return new_args


def loss_of(returned: Any, has_aux: bool) -> Any:
    """The loss in what a loss function returned: the first of a pair with `has_aux`."""
    if not has_aux:
        return returned
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            "with has_aux=True the function must return a pair (loss, aux), got a "
            f"{type(returned).__name__}"
        )
    return returned[0]


def check_keywords(fun: Callable[..., Any], ours: Sequence[str], args: tuple) -> None:
    """Raises if a function has an argument of the name of one of our keywords.

    A caller of `minimize` who passes `has_aux=…` may mean the loss function's own
    argument of that name, which would silently keep its default. The name is allowed if
    `args`, the positional arguments that the function will be given, or a
    `functools.partial` give that argument a value.
    """
    try:
        signature = inspect.signature(fun)
        bound = {*signature.bind_partial(*args).arguments}
    except (TypeError, ValueError):  # no signature, or args do not fit: the call fails
        return
    bound.update(getattr(inspect.unwrap(fun), "keywords", {}))  # of a functools.partial
    for name in ours:
        if name in signature.parameters and name not in bound:
            raise TypeError(
                f"{name} is an argument of this call, and one of the function's own, "
                "which would not get it: bind the latter, as in "
                f"functools.partial(function, {name}=…)"
            )


def _check_no_modules(tree: Any) -> None:
    """Raises for an `nnx.Module`, whose parameters alone can be differentiated."""
    modules = find_nodes(is_module, tree)
    if modules:
        raise TypeError(
            f"{type(modules[0]).__name__} is an nnx.Module, whose batch statistics and "
            "random streams jax.grad would lose. Differentiate with nnx.value_and_grad "
            "a loss function that returns scale_gradient(loss, optimizer); or take the "
            "parameters out, graphdef, params, rest = nnx.split(model, nnx.Param, "
            "...), and differentiate a function of them that calls "
            "nnx.merge(graphdef, params, rest)"
        )
