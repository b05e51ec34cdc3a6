"""From a loss function to scaled gradients."""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_lossscale._arrays.precision import at_most
from optax_lossscale._scales.get import resolve
from optax_lossscale._scales.validation import floating_dtype, function, shown


def scale_loss(loss: jax.typing.ArrayLike, loss_scale: Any) -> jax.Array:
    """The loss times the loss scale, to be differentiated by other means.

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
    return resolve(loss_scale).scale(loss)


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
        gradients come in it. They take half the memory then, and the model needs no casts
        of its own.
      **kwargs: further arguments of `jax.value_and_grad`.

    Returns:
      A function of `fun`'s arguments that returns `(value, scaled_grads)`: the value
      is `fun`'s own, not scaled, bit for bit; the gradients are *still scaled*, as
      `with_loss_scale`'s transformation takes them.

    Raises:
      ValueError: if `loss_scale` is no loss scale, or a state that holds none or several, or
        `compute_dtype` is not one of floating-point numbers.
      TypeError: if `fun` is no function or `argnums` no ints; when called, if the loss is
        not a real floating-point scalar.

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
        if has_aux and not (isinstance(value, tuple) and len(value) == 2):
            raise TypeError(
                "with has_aux=True the function must return a pair (loss, aux), got a "
                f"{type(value).__name__}"
            )
        loss: Any = value[0] if has_aux else value
        return scale_loss(loss, loss_scale), value

    scaled_value_and_grad = jax.value_and_grad(scaled_fun, argnums, has_aux=True, **kwargs)

    @functools.wraps(fun)
    def value_and_scaled_grad(*args, **kw):
        if compute_dtype is not None:
            positions = {range(len(args))[n] for n in differentiated}
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
