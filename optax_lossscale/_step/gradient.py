"""Computes scaled gradients: the gradients of the loss times the loss scale.

`value_and_scaled_grad` is for code that would otherwise call `jax.value_and_grad`. It
differentiates the loss times the loss scale and returns the unscaled loss with the
scaled gradients.

`scale_gradient` is for code that some other library differentiates. It returns the loss
unchanged but with a custom derivative, the loss scale instead of 1, so that by the
chain rule every gradient of the loss is multiplied by the scale.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.checks import check_function, shown
from optax_lossscale._arrays.contexts import DIAGNOSING
from optax_lossscale._arrays.precision import at_least_float32, is_inexact_leaf
from optax_lossscale._arrays.variables import find_nodes, is_module
from optax_lossscale._scales.loss_scale import LossScale
from optax_lossscale._step.get_loss_scale import resolve
from optax_lossscale._step.inputs import check_arrays
from optax_lossscale._step.loss import check_scalar, loss_of, warn_of_float16


def scale_gradient(loss: jax.typing.ArrayLike, loss_scale: Any) -> jax.Array:
    """Returns the loss unchanged, but multiplies its gradient by the loss scale.

    Use it in a loss function that other code differentiates, such as
    `nnx.value_and_grad`, `eqx.filter_value_and_grad`, or a trainer that calls
    `jax.grad` itself. In Flax NNX, with an `nnx.Optimizer` around `with_loss_scale`::

        def loss_fn(model):
            loss = jnp.mean((model(x) - y) ** 2)
            return ols.scale_gradient(loss, optimizer)

        loss, scaled_grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, scaled_grads, value=loss)

    The gradients are scaled, as `with_loss_scale` expects them. In forward mode, the
    tangent is scaled. Under `diagnose`, nothing is scaled, because `diagnose` tries its
    own loss scales.

    Args:
      loss: a real floating-point scalar.
      loss_scale: anything that `with_loss_scale` accepts, a traced number, or a state
        that holds exactly one loss scale. No gradient flows into it.

    Returns:
      The value of the loss, as a scalar of shape () in float32 or wider. If the loss is
      narrower, backpropagation begins by casting the loss scale to the dtype of the
      loss, where a large scale may be infinite: in float16, from 65520 on.

    Raises:
      TypeError: if the loss is not a real floating-point scalar.
      ValueError: if `loss_scale` is none of these, or a stack of several models' loss
        scales or states.
      ValueError: if `loss_scale` is a state that `get_loss_scale` rejects.

    Warns:
      UserWarning: if the loss is float16 and the loss scale may reach 65520, which is
        infinite in float16.

    Source: `optax.scale_gradient`, with a loss scale as the factor.

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
    warn_of_float16(loss, loss_scale)
    wide = at_least_float32(loss)
    return wide if DIAGNOSING.value else _with_scaled_tangent(wide, loss_scale)


@jax.custom_jvp
def _with_scaled_tangent(loss: jax.Array, loss_scale: LossScale) -> jax.Array:
    """Returns the loss, with the loss scale instead of 1 as its derivative."""
    return loss


@_with_scaled_tangent.defjvp
def _scaled_tangent(primals, tangents):
    """The JVP rule: multiplies the tangent of the loss by the loss scale."""
    loss, loss_scale = primals
    tangent, _ = tangents
    return loss, loss_scale.scale(tangent)


def value_and_scaled_grad(
    fun: Callable[..., Any],
    loss_scale: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Like `jax.value_and_grad`, but returns the gradients of the scaled loss.

    The loss is multiplied by the loss scale before it is differentiated, so that small
    gradients do not underflow in float16. Call this inside the training step, with the
    current state: a function made before the loop would always use the first scale::

        loss, scaled_grads = ols.value_and_scaled_grad(loss_fn, state)(params, batch)
        params, state = tx.apply_gradients(scaled_grads, state, params, value=loss)

    Args:
      fun: a function that returns the loss, a real floating-point scalar.
      loss_scale: anything that `with_loss_scale` accepts, a traced number, or an
        optimizer state that holds exactly one loss scale.
      argnums: which positional arguments to differentiate.
      has_aux: whether `fun` returns a pair `(loss, aux)`, where `aux` can be anything.
      **kwargs: further arguments of `jax.value_and_grad`.

    Returns:
      A function with the arguments of `fun` that returns `(value, scaled_grads)`.
      `value` is what `fun` returns, bit for bit. `scaled_grads` are *scaled*, for
      `with_loss_scale`. After the step, the norm of the true gradients is
      `metrics(state)["gradient_norm"]`.

    Raises:
      TypeError: if `fun` is not a function.
      TypeError: if `argnums` are not ints or are empty.
      TypeError: when called, if the loss is not a real floating-point scalar.
      TypeError: when called, if `has_aux` is set and `fun` does not return a pair.
      TypeError: when called, if a differentiated argument is not a tree of arrays, has
        integers (unless `allow_int=True`), or is an `nnx.Module`. Differentiate modules
        with `nnx` and `scale_gradient`.
      ValueError: if `loss_scale` is one that `scale_gradient` rejects.
      ValueError: if `argnums` name an argument twice; when called, if they do so by a
        negative number.

    Warns:
      UserWarning: when called, if the loss is float16 and the loss scale may reach
        65520, which is infinite in float16.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> gradient = ols.value_and_scaled_grad(jnp.square, ols.FixedLossScale(8))
      >>> loss, scaled_grad = gradient(3.0)
      >>> float(loss), float(scaled_grad)
      (9.0, 48.0)
    """
    loss_scale = resolve(loss_scale)
    check_function("fun", fun)
    positions = _positions(argnums)

    def scaled_fun(*args, **fun_kwargs):
        returned = fun(*args, **fun_kwargs)
        loss = loss_of(returned, has_aux)
        check_scalar("the loss", loss)
        warn_of_float16(loss, loss_scale)
        return loss_scale.scale(jnp.asarray(loss)), returned

    scaled_value_and_grad = jax.value_and_grad(
        scaled_fun, argnums, has_aux=True, **kwargs
    )

    @functools.wraps(fun)
    def value_and_scaled_grad_fn(*args, **fun_kwargs):
        if all(-len(args) <= n < len(args) for n in positions):  # else JAX raises
            if len({n % len(args) for n in positions}) < len(positions):
                raise ValueError(f"argnums must name each argument once, got {argnums}")
            differentiated = [args[n] for n in positions]
            if len(differentiated) == 1:
                [differentiated] = differentiated
            _check_no_modules(differentiated)
            check_arrays("what is differentiated", differentiated)
        (_, returned), scaled_grads = scaled_value_and_grad(*args, **fun_kwargs)
        return returned, scaled_grads

    return value_and_scaled_grad_fn


def _positions(argnums: Any) -> tuple[int, ...]:
    """Converts `argnums`, an int or a sequence of ints, to a tuple.

    Raises a `TypeError` for anything else.
    """
    positions = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    # A bool is an int, too, but may have been meant for `has_aux`.
    are_ints = all(
        type(n) is not bool and isinstance(n, int | np.integer) for n in positions
    )
    if not positions or not are_ints:
        raise TypeError(
            "argnums must be an int or a sequence of one or more ints, got "
            f"{shown(argnums)}"
        )
    return positions


def _check_no_modules(tree: Any) -> None:
    """Raises a `TypeError` if a tree holds an `nnx.Module`.

    Only the parameters of a module can be differentiated, and `jax.grad` would lose the
    module's batch statistics and random streams.
    """
    modules = find_nodes(is_module, tree)
    if modules:
        raise TypeError(
            f"{type(modules[0]).__name__} is an nnx.Module, whose batch statistics and "
            "random streams jax.grad would lose. Use nnx.value_and_grad on a loss "
            "function that returns scale_gradient(loss, optimizer). Or take the "
            "parameters out, and differentiate a function of them:\n"
            "    graphdef, params, rest = nnx.split(model, nnx.Param, ...)\n"
            "    loss_fn = lambda params: loss(nnx.merge(graphdef, params, rest))"
        )
