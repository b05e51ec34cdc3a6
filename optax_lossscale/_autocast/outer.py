"""Products that sum nothing, by broadcasting: their derivatives are sums, not matrix products."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def outer_product(eqn: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The result of a product whose every number is one number times another, in float32."""
    if "window_strides" in eqn.params:
        return _pointwise_convolution(eqn, x, y)
    (contracted_x, contracted_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    x = _batch_first(x, contracted_x, batch_x)
    y = _batch_first(y, contracted_y, batch_y)
    after_x = range(x.ndim, eqn.outvars[0].aval.ndim)
    before_y = range(len(batch_x), x.ndim)
    return jnp.expand_dims(x, tuple(after_x)) * jnp.expand_dims(y, tuple(before_y))


def _batch_first(
    x: jax.Array, contracted: Sequence[int], batch: Sequence[int]
) -> jax.Array:
    """An operand of a `dot_general`: batch axes first, without those of length 1 to contract."""
    first = (*batch, *contracted)
    moved = jnp.moveaxis(x, first, range(len(first)))
    return jnp.squeeze(moved, tuple(range(len(batch), len(first))))


def _pointwise_convolution(eqn: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution by a kernel of a single place, over a single feature in each group."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    x = jnp.transpose(x, numbers.lhs_spec)  # batch, features, places
    places = [
        (low, high, dilation - 1)
        for (low, high), dilation in zip(
            params["padding"], params["lhs_dilation"], strict=True
        )
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *places])
    strides = (1, 1, *params["window_strides"])
    x = lax.slice(x, [0] * x.ndim, x.shape, strides)
    gains = jnp.ravel(kernel)  # one for each feature of the result
    x = jnp.repeat(x, gains.size // x.shape[1], axis=1)
    y = x * jnp.expand_dims(gains, tuple(range(1, x.ndim - 1)))
    order = [numbers.out_spec.index(axis) for axis in range(y.ndim)]
    return jnp.transpose(y, order)
