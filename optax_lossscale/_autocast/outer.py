"""Products that sum nothing, by broadcasting: their derivatives are sums, not matrix products."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def outer_product(eqn: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The result of a product whose every number is one number times another, in float32."""
    if eqn.primitive.name == "conv_general_dilated":
        return _pointwise_convolution(eqn, x, y)
    contracted, batch = eqn.params["dimension_numbers"]
    x = _batch_first(x, contracted[0], batch[0])
    y = _batch_first(y, contracted[1], batch[1])
    ndim = eqn.outvars[0].aval.ndim
    after_x = range(x.ndim, ndim)
    before_y = range(len(batch[0]), x.ndim)
    return jnp.expand_dims(x, tuple(after_x)) * jnp.expand_dims(y, tuple(before_y))


def _batch_first(x: jax.Array, contracted: tuple[int, ...], batch: tuple[int, ...]) -> jax.Array:
    """An operand of a `dot_general`: batch axes first, without those of length 1 to contract."""
    moved = jnp.moveaxis(x, (*batch, *contracted), range(len(batch) + len(contracted)))
    return jnp.squeeze(moved, tuple(range(len(batch), len(batch) + len(contracted))))


def _pointwise_convolution(eqn: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution by a kernel of a single place, over a single feature in each group."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    x = jnp.transpose(x, numbers.lhs_spec)  # batch, features, places
    gaps = [dilation - 1 for dilation in params["lhs_dilation"]]
    edges = [(low, high, gap) for (low, high), gap in zip(params["padding"], gaps, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *edges])
    x = lax.slice(x, [0] * x.ndim, x.shape, (1, 1, *params["window_strides"]))
    gains = jnp.ravel(kernel)
    x = jnp.repeat(x, gains.size // x.shape[1], axis=1)
    y = x * jnp.expand_dims(gains, tuple(range(1, x.ndim - 1)))
    return jnp.transpose(y, tuple(numbers.out_spec.index(axis) for axis in range(y.ndim)))
