"""From a loss function to scaled gradients."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_lossscale._arrays.precision import at_least_float32, at_most, is_array
from optax_lossscale._arrays.variables import is_module
from optax_lossscale._scales.get import resolve
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._scales.validation import floating_dtype, function, shown


def scale_loss(loss: jax.typing.ArrayLike, loss_scale: Any) -> jax.Array:
    """The loss times the loss scale.

    To differentiate by other means than `value_and_grad`, `scale_gradient` keeps the true loss.

    Args:
      loss: a real floating-point scalar.
      loss_scale: whatever `get` takes, or an optimizer state that holds exactly one.

    Returns:
      The scaled loss, shape (), float32 or wider.

    Raises:
      TypeError: if the loss is not a real floating-point scalar.
      ValueError: if `loss_scale` is no loss scale, or a state that holds none or several.

    Example:
      >>> import optax_lossscale as ols
      >>> float(ols.scale_loss(0.5, ols.FixedLossScale(128)))
      64.0
    """
    return resolve(loss_scale).scale(_scalar(loss))


def scale_gradient(loss: jax.typing.ArrayLike, loss_scale: Any) -> jax.Array:
    """The loss itself, whose gradient is times the loss scale.

    One line inside a loss function, for whatever differentiates it: `nnx.value_and_grad`,
    `eqx.filter_value_and_grad`, a trainer that calls `jax.grad` itself. What comes out is the
    true loss with scaled gradients, as `with_loss_scale`'s transformation takes them. In
    forward mode it is the tangent that is scaled.

    Args:
      loss: a real floating-point scalar.
      loss_scale: whatever `get` takes, or an optimizer state that holds exactly one. It gets
        no gradient itself.

    Returns:
      The loss bit for bit, shape (), as float32 or wider: a gradient times the loss scale
      may be more than float16 holds.

    Raises:
      TypeError: if the loss is not a real floating-point scalar.
      ValueError: if `loss_scale` is no loss scale, or a state that holds none or several.

    Source: `optax.scale_gradient`, with a loss scale for the factor.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(x):
      ...     return ols.scale_gradient(jnp.square(x), ols.FixedLossScale(8))
      >>> loss, grad = jax.value_and_grad(loss_fn)(3.0)
      >>> float(loss), float(grad)
      (9.0, 48.0)
    """
    return _with_scaled_tangent(at_least_float32(_scalar(loss)), resolve(loss_scale))


@jax.custom_jvp
def _with_scaled_tangent(loss: jax.Array, loss_scale: LossScale) -> jax.Array:
    return loss


@_with_scaled_tangent.defjvp
def _scaled_tangent(primals, tangents):
    (loss, loss_scale), (tangent, _) = primals, tangents
    return loss, loss_scale.scale(tangent)


def _scalar(loss: Any) -> jax.Array:
    """The loss as an array, if it is a real floating-point scalar."""
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic, int, float)):
        raise TypeError(
            f"the loss must be a scalar, got a {type(loss).__name__}; of a function that returns "
            "(loss, aux) say has_aux=True"
        )
    loss = jnp.asarray(loss)
    if loss.shape != ():
        raise TypeError(
            f"the loss must be a scalar, got shape {loss.shape}; reduce it, with jnp.mean say"
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"the loss must be a real floating-point number, got dtype {loss.dtype}")
    return loss


def value_and_grad(
    fun: Callable[..., Any],
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    compute_dtype: DTypeLike | None = None,
    **kwargs: Any,
) -> Callable[..., tuple[Any, Any]]:
    """As `jax.value_and_grad`, but the gradients are those of the scaled loss.

    Call it inside the training step, with the step's own state: the loss scale is the
    one that it was given, and a function made before the loop would keep to the first.

    Args:
      fun: a function that returns a real floating-point scalar, or with `has_aux` a
        pair of that and anything.
      loss_scale: whatever `get` takes, or an optimizer state that holds exactly one.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      compute_dtype: a floating-point dtype, such as `jnp.float16`: the arguments that are
        differentiated are cast to it first, where they are wider floats, and their
        gradients come in it. They take half the memory then. The model casts its inputs to
        the dtype of its parameters: a float32 input would make all that follows float32,
        as would a module that keeps to a dtype of its own, such as `nnx.Embed`.
      **kwargs: further arguments of `jax.value_and_grad`.

    Returns:
      A function of `fun`'s arguments that returns `(value, scaled_grads)`: the value
      is `fun`'s own, not scaled, bit for bit; the gradients are *still scaled*, as
      `with_loss_scale`'s transformation takes them.

    Raises:
      ValueError: if `loss_scale` is no loss scale, or a state that holds none or several, or
        `compute_dtype` is not one of floating-point numbers.
      TypeError: if `fun` is no function or `argnums` no ints; when called, if the loss is
        not a real floating-point scalar, or if what is to be differentiated is an `nnx.Module`
        or has leaves that are no arrays, as a module of Equinox: differentiate those by their
        own means, with `scale_gradient`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> loss, grad = ols.value_and_grad(jnp.square, ols.FixedLossScale(8))(3.0)
      >>> float(loss), float(grad)
      (9.0, 48.0)
    """
    loss_scale = resolve(loss_scale)
    function("fun", fun)
    if compute_dtype is not None:
        floating_dtype("compute_dtype", compute_dtype)
    differentiated = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    for number in differentiated:
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise TypeError(f"argnums must be an int or a sequence of ints, got {shown(argnums)}")

    def scaled_fun(*args, **kw):
        value = fun(*args, **kw)
        return scale_loss(loss_of(value, has_aux), loss_scale), value

    scaled_value_and_grad = jax.value_and_grad(scaled_fun, argnums, has_aux=True, **kwargs)

    @functools.wraps(fun)
    def value_and_scaled_grad(*args, **kw):
        positions = {range(len(args))[n] for n in differentiated if -len(args) <= n < len(args)}
        _refuse_modules([args[n] for n in positions])
        if compute_dtype is not None:
            cast = lambda arg: jax.tree.map(partial(at_most, jnp.dtype(compute_dtype)), arg)
            args = [cast(arg) if n in positions else arg for n, arg in enumerate(args)]
        (_, value), scaled_grads = scaled_value_and_grad(*args, **kw)
        return value, scaled_grads

    return value_and_scaled_grad


def grad(
    fun: Callable[..., Any],
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    compute_dtype: DTypeLike | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """As `jax.grad`, but the gradients are those of the scaled loss.

    Args:
      fun: as for `value_and_grad`, as are the other arguments.
      loss_scale: whatever `get` takes, or an optimizer state that holds exactly one.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      compute_dtype: what the arguments differentiated are cast to first.
      **kwargs: further arguments of `jax.value_and_grad`.

    Returns:
      A function of `fun`'s arguments that returns the scaled gradients, or with
      `has_aux` the pair `(scaled_grads, aux)`.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> float(ols.grad(jnp.square, ols.FixedLossScale(8))(3.0))
      48.0
    """
    with_value = value_and_grad(
        fun, loss_scale, argnums, has_aux, compute_dtype=compute_dtype, **kwargs
    )

    @functools.wraps(fun)
    def scaled_grad(*args, **kw):
        value, scaled_grads = with_value(*args, **kw)
        return (scaled_grads, value[1]) if has_aux else scaled_grads

    return scaled_grad


def loss_of(value: Any, has_aux: bool) -> Any:
    """The loss in what a loss function returned."""
    if not has_aux:
        return value
    if not (isinstance(value, tuple) and len(value) == 2):
        raise TypeError(
            "with has_aux=True the function must return a pair (loss, aux), got a "
            f"{type(value).__name__}"
        )
    return value[0]


def _refuse_modules(tree: Any) -> None:
    """Raises for what cannot be differentiated as a pytree of arrays."""
    for x in jax.tree.leaves(tree, is_leaf=is_module):
        if is_module(x):
            raise TypeError(
                f"{type(x).__name__} is an nnx.Module, whose batch statistics and random streams "
                "jax.grad would lose. Differentiate with nnx.value_and_grad, of a loss function "
                "that returns scale_gradient(loss, optimizer.opt_state)"
            )
        if not is_array(x):
            raise TypeError(
                f"the argument to differentiate has a leaf that is no array, {x!r}. "
                "Differentiate with what knows such modules, eqx.filter_value_and_grad say, of a "
                "loss function that returns scale_gradient(loss, state)"
            )
