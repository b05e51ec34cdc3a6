"""Loss scaling inside a model: every block's backward pass at a power of two of its own."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import at_least_float32, dtype_of, is_inexact
from optax_lossscale._arrays.variables import is_module
from optax_lossscale._scales import validation
from optax_lossscale._scales.loss_scale import AxisName
from optax_lossscale.experimental._exponent import (
    as_varying,
    exponent_of_one_use,
    fit,
    unscale,
    zero_tally,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rescaled:
    """Activations on their way between two blocks: what `enter` and a rescaled block return.

    Only `leave` and the next block read them. Beside them goes a scalar, always zero, whose
    cotangent is the exponent of theirs.
    """

    _value: Any
    _tally: jax.Array  # shape=(), dtype=float32


def rescale(
    block: Callable[..., Any],
    *,
    margin: int = 16,
    cotangent_dtype: Any = None,
    axis_name: AxisName | None = None,
) -> Callable[..., Rescaled]:
    """A block of a model, whose backward pass has a loss scale of its own.

    One loss scale serves a model whose gradients all fit into float16 at once. Where they
    do not, as when they shrink from block to block of a deep model, each block can be given
    the scale that it needs: before the block's backward pass its cotangent `g` is multiplied by
    the power of two that its own largest number asks for::

        block's forward pass:   y = block(params, x)

        block's backward pass:  bits = 16 - margin - exponent(max(abs(g)))
                                d_params, d_x = vjp(block)(g * 2**bits)
                                k = k + bits
                                hand out  d_params / 2**k   in the parameters' dtype
                                hand on   d_x, k            to the block before

    A float16 number is below 2**16, and the largest of `g` comes to lie in `[0.5, 1)` times
    2**(16 - margin). All of this is exact: in float32 the gradients are, bit for bit, those of the
    model as it was, unless they are at the very ends of float32's range, or the compiler rounds
    the two programs differently. There is no state;
    `k` travels from block to block as the cotangent of a scalar that goes with the
    activations. What comes out are the gradients of the loss as it was given, so
    `value_and_grad` and every loss scale work around it as around any other model.

    The source of the idea is Zhao et al. 2019, "Adaptive loss scaling for mixed precision
    training". To take the scale from the numbers themselves, without statistics, is what training
    in float8 calls just-in-time, or current, scaling.

    Args:
      block: `block(params, x, *args, **kwargs) -> y`, a pure function of pytrees. It converts
        parameters and activations to float16 by itself. A residual connection is inside it.
      margin: how many bits to leave between the largest number of the cotangent and
        float16's overflow, from 0 to 24, for what is larger inside the block: gradients of
        parameters, above all, are sums over the batch. Where these bits do not suffice, gradients
        are not finite, the step is skipped, and no loss scale around the block can help. With 16,
        the largest is between 0.5 and 1.
      cotangent_dtype: None, or `float8_e5m2` or `float8_e4m3fn`, to which the cotangent is
        rounded, to nearest, at the scale that uses that dtype's range. It is then converted
        back, as JAX has cotangents in the dtype of their activations: this shows
        what an 8-bit backward pass would lose.
      axis_name: the axis or axes over which replicas use the same power of two. Needed only
        for a block that itself communicates over them, under `pmap` or under `shard_map` without
        `check_vma`; with it they agree by themselves. The only communication is one scalar.

    Returns:
      `rescaled(params, activations, *args, **kwargs) -> activations`, for `jit`, `lax.scan`,
      `jax.checkpoint`, `vmap`, `shard_map`. `activations` are what `enter` or another rescaled
      block returned, for a single use: if two blocks were given the same, gradients would
      be sums of numbers at different scales, and come out as NaN instead. The gradients of
      `params`, `args` and `kwargs` come out at the scale of the loss. What is no array, as in an
      Equinox module, passes through. It raises a `TypeError` for activations without
      `enter`, for activations anywhere else, and for `params`, `args` or `kwargs` in
      float16 or less, in which gradients at the scale of the loss would underflow.

    Raises:
      TypeError: if `block` is no function.
      ValueError: if `margin` or `cotangent_dtype` is none of the above.

    Example:
      Two blocks of a model in float16, which holds nothing below 2**-24:

      >>> import jax, jax.numpy as jnp
      >>> from optax_lossscale import experimental
      >>> def block(w, x):
      ...     return w.astype(jnp.float16) * x * 2.0**-10
      >>> def loss_fn(ws, x, block, enter, leave):
      ...     x = enter(x)
      ...     for w in ws:
      ...         x = block(w, x)
      ...     return jnp.sum(leave(x).astype(jnp.float32)) * 2.0**-10
      >>> ws, x = [jnp.float32(1)] * 2, jnp.full(4, 2.0**5, jnp.float16)
      >>> same = lambda x: x
      >>> print(*jax.grad(loss_fn)(ws, x, block, same, same))
      0.0 0.0
      >>> rescaled = experimental.rescale(block), experimental.enter, experimental.leave
      >>> print(*jax.grad(loss_fn)(ws, x, *rescaled))
      1.1920929e-07 1.1920929e-07
    """
    validation.function("block", block)
    margin = validation.count("margin", margin, least=0, most=24)
    if cotangent_dtype is not None:
        allowed = "None, float8_e5m2 or float8_e4m3fn"
        given, cotangent_dtype = cotangent_dtype, validation.dtype(cotangent_dtype)
        if cotangent_dtype not in (jnp.float8_e5m2, jnp.float8_e4m3fn):
            validation.refuse("cotangent_dtype", given, allowed)

    @functools.wraps(block)
    def rescaled(params: Any, activations: Rescaled, /, *args: Any, **kwargs: Any) -> Rescaled:
        _expect_activations("a rescaled block", activations)
        given = {"params": params, "args": args, "kwargs": kwargs}
        _refuse_inputs(given)
        weights, rest = _partition(given)

        def run(weights, x):
            given = _combine(weights, rest)
            y = block(given["params"], x, *given["args"], **given["kwargs"])
            _refuse_activations("a rescaled block returned", y)
            return y

        @jax.custom_vjp
        def boundary(weights, x, tally):
            y = run(weights, x)
            return y, tally + zero_tally(y)

        def forward(weights, x, tally):
            y, pullback = jax.vjp(run, weights, x)
            return (y, tally + zero_tally(y)), (pullback, tally)

        def backward(residuals, cotangents):
            pullback, tally = residuals
            cotangent, exponent = cotangents[0], exponent_of_one_use(cotangents[1])
            dtypes = jax.tree.map(dtype_of, cotangent)
            cotangent, exponent, use = fit(
                cotangent, exponent, dtypes, margin, cotangent_dtype, axis_name
            )
            weights, x = pullback(cotangent)
            return unscale(weights, exponent), x, as_varying(use, tally)

        boundary.defvjp(forward, backward)
        return Rescaled(*boundary(weights, activations._value, activations._tally))

    return rescaled


def rescale_model(forward: Callable[..., Any], *, margin: int = 16) -> Callable[..., Any]:
    """A whole forward pass as one rescaled block: loss scaling without any state.

    The gradients come out unscaled, from whatever differentiates the loss: for
    trainers that do so by themselves and are given a loss function and an optimizer. The scale
    is chosen at every step from the largest number of the loss's gradient with respect to
    the outputs. A step that overflows all the same has gradients that are not finite, so wrap
    the optimizer to check them: `with_loss_scale(inner, None, skip="nonfinite")`.

    Args:
      forward: `forward(params, *args, **kwargs) -> outputs`, a pure function of pytrees, without
        the loss. It converts parameters and inputs to float16 by itself.
      margin: as of `rescale`.

    Returns:
      `rescaled(params, *args, **kwargs) -> outputs`, the outputs with their 8- and 16-bit floats
      as float32. The gradients of `params` and `args` come out in their own dtypes, which for
      `params` and `kwargs` are to be float32.

    Raises:
      TypeError: if `forward` is no function.
      ValueError: if `margin` is not from 0 to 24.

    Example:
      The loss is so small that its gradient is zero in float16:

      >>> import jax, jax.numpy as jnp
      >>> from optax_lossscale import experimental
      >>> def forward(w, x):
      ...     return w.astype(jnp.float16) * x
      >>> def loss_fn(w, forward):
      ...     return jnp.sum(forward(w, jnp.ones(2, jnp.float16))) * 2.0**-30
      >>> print(jax.grad(loss_fn)(jnp.float32(1), forward))
      0.0
      >>> grad = jax.grad(loss_fn)(jnp.float32(1), experimental.rescale_model(forward))
      >>> float(grad) == 2 * 2.0**-30
      True
    """
    validation.function("forward", forward)

    def of_arrays(params, x, rest, /, **kwargs):
        return forward(params, *_combine(x, rest), **kwargs)

    block = rescale(of_arrays, margin=margin)

    @functools.wraps(forward)
    def rescaled(params: Any, /, *args: Any, **kwargs: Any) -> Any:
        x, rest = _partition(args)
        return leave(block(params, enter(x), rest, **kwargs))

    return rescaled


def enter(x: Any) -> Rescaled:
    """Activations for the first rescaled block.

    Args:
      x: what the first block takes, any pytree of arrays. Its gradient comes out at the scale of
        the loss and in the dtype of `x`: where something before `enter` is trained, as an
        embedding, let that be a block too, or float32.

    Returns:
      The activations.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import experimental
      >>> print(experimental.leave(experimental.enter(jnp.ones(2))))
      [1. 1.]
    """
    _refuse_activations("enter was given", x)
    return Rescaled(*_enter(x))


def leave(activations: Rescaled) -> Any:
    """What the last rescaled block returned, for the loss.

    Args:
      activations: from the last block, or from `enter`.

    Returns:
      The block's output with its 8- and 16-bit floats as float32, in which the loss can hand
      back a gradient of any size.

    Raises:
      TypeError: if these are no such activations.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale import experimental
      >>> block = experimental.rescale(lambda w, x: (w * x).astype(jnp.float16))
      >>> experimental.leave(block(jnp.float32(2), experimental.enter(jnp.ones(3)))).dtype
      dtype('float32')
    """
    _expect_activations("leave", activations)
    dtypes = jax.tree.map(dtype_of, activations._value)

    @jax.custom_vjp
    def boundary(value, tally):
        return jax.tree.map(at_least_float32, value)

    def forward(value, tally):
        return jax.tree.map(at_least_float32, value), tally

    def backward(tally, cotangent):
        # Whatever survives the conversion will do: the block chooses for itself.
        cotangent, _, use = fit(cotangent, jnp.float32(0), dtypes, margin=1)
        return cotangent, as_varying(use, tally)

    boundary.defvjp(forward, backward)
    return boundary(activations._value, activations._tally)


@jax.custom_vjp
def _enter(x):
    return x, zero_tally(x)


def _enter_forward(x):
    return (x, zero_tally(x)), None


def _enter_backward(_, cotangents):
    cotangent, tally = cotangents
    return (unscale(cotangent, exponent_of_one_use(tally)),)


_enter.defvjp(_enter_forward, _enter_backward)


def _partition(tree: Any) -> tuple[Any, Any]:
    """The arrays of a tree, and all else: a Python number is a tracer where it is traced."""
    is_array = lambda x: hasattr(x, "dtype")
    arrays = jax.tree.map(lambda x: x if is_array(x) else None, tree)
    return arrays, jax.tree.map(lambda x: None if is_array(x) else x, tree)


def _combine(arrays: Any, rest: Any) -> Any:
    is_none = lambda x: x is None
    return jax.tree.map(lambda a, b: b if a is None else a, arrays, rest, is_leaf=is_none)


def _expect_activations(who: str, activations: Any) -> None:
    if not isinstance(activations, Rescaled):
        kind = type(activations).__name__
        raise TypeError(
            f"{who} takes what enter(x) or the rescaled block before it returned, got a {kind}"
        )
    if shape := jnp.shape(activations._tally):
        raise TypeError(
            f"{who} was given activations that have one power of two, which a mask of shape "
            f"{shape}, or an axis that was mapped, has made several. A mask of single examples "
            "belongs inside the block, as in jnp.where(mask, block(params, x), x), and enter and "
            "leave under the vmap of the blocks. A mask of no dimensions may be outside"
        )


def _refuse_activations(what: str, tree: Any) -> None:
    is_rescaled = lambda x: isinstance(x, Rescaled)
    if any(map(is_rescaled, jax.tree.leaves(tree, is_leaf=is_rescaled))):
        raise TypeError(
            f"{what} activations that are rescaled already, whose exponent would be lost. A block "
            "takes one, as its second argument, and returns plain arrays: what joins two chains "
            "belongs into one block, or leave(…) one of them"
        )


def _refuse_inputs(weights: dict[str, Any]) -> None:
    _refuse_activations("a rescaled block was given, beside its activations,", weights)
    for x in jax.tree.leaves(weights, is_leaf=is_module):
        if is_module(x):
            raise TypeError(
                f"{type(x).__name__} is an nnx.Module, whose batch statistics and random streams "
                "would be lost: split it, graphdef, state = nnx.split(model), and give the state "
                "to a block that calls nnx.merge(graphdef, state)(x)"
            )
    for path, x in jax.tree.flatten_with_path(weights)[0]:
        # The exponents of bfloat16 are those of float32.
        if is_inexact(x) and jnp.finfo(dtype_of(x)).maxexp < jnp.finfo(jnp.float32).maxexp:
            raise TypeError(
                f"the gradient of {path_name(path)} would underflow in {dtype_of(x)} at the scale "
                "of the loss: keep it in float32 and convert it inside the block (and "
                "differentiate without compute_dtype), or close over it if it is not trained"
            )
