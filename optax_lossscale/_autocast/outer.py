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
    contracted, batch = eqn.params["dimension_numbers"]
    x = _batch_first(x, contracted[0], batch[0])
    y = _batch_first(y, contracted[1], batch[1])
    # Batch axes, then those of x, then those of y
    axes_of_x = range(len(batch[0]), x.ndim)
    axes_of_y = range(x.ndim, eqn.outvars[0].aval.ndim)
    x = jnp.expand_dims(x, tuple(axes_of_y))
    y = jnp.expand_dims(y, tuple(axes_of_x))
    return x * y


def _batch_first(
    x: jax.Array, contracted: Sequence[int], batch: Sequence[int]
) -> jax.Array:
    """An operand of a `dot_general`: batch axes first, without those of length 1 to contract."""
    first = (*batch, *contracted)
    x = jnp.moveaxis(x, first, range(len(first)))
    axes = range(len(batch), len(first))
    return jnp.squeeze(x, tuple(axes))


def _pointwise_convolution(eqn: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution by a kernel of a single place, over a single feature in each group."""
    numbers = eqn.params["dimension_numbers"]
    x = jnp.transpose(x, numbers.lhs_spec)  # batch, features, places
    x = _at_places(x, **eqn.params)
    gains = jnp.ravel(kernel)  # one for each feature of the result
    results_of_each = gains.size // x.shape[1]
    x = jnp.repeat(x, results_of_each, axis=1)
    axes_of_places = range(1, x.ndim - 1)
    y = x * jnp.expand_dims(gains, tuple(axes_of_places))
    order = [numbers.out_spec.index(axis) for axis in range(y.ndim)]
    return jnp.transpose(y, order)


def _at_places(
    x: jax.Array,
    *,
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    window_strides: Sequence[int],
    **params: Any,
) -> jax.Array:
    """What a convolution by a kernel of a single place multiplies by it, in each place."""
    edges = [(0, 0, 0), (0, 0, 0)]  # of batch and features
    for (low, high), dilation in zip(padding, lhs_dilation, strict=True):
        edges.append((low, high, dilation - 1))
    x = lax.pad(x, jnp.zeros((), x.dtype), edges)
    strides = (1, 1, *window_strides)
    return lax.slice(x, [0] * x.ndim, x.shape, strides)
