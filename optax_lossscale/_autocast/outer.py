"""An outer product as a multiplication.

The derivatives of a `dot_general` would be products, and here in float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def outer_product(eqn: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The result of a `dot_general` whose every number is one number times another."""
    (contracted_x, contracted_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    x = _batch_first(x, contracted_x, batch_x)
    y = _batch_first(y, contracted_y, batch_y)
    # Batch axes, then those of x, then those of y
    axes_of_x = range(len(batch_x), x.ndim)
    axes_of_y = range(x.ndim, eqn.outvars[0].aval.ndim)
    x = jnp.expand_dims(x, tuple(axes_of_y))
    y = jnp.expand_dims(y, tuple(axes_of_x))
    return x * y


def _batch_first(
    x: jax.Array, contracted: Sequence[int], batch: Sequence[int]
) -> jax.Array:
    """An operand with its batch axes first, without those of length 1 to contract."""
    first = (*batch, *contracted)
    x = jnp.moveaxis(x, first, range(len(first)))
    return jnp.squeeze(x, tuple(range(len(batch), len(first))))
