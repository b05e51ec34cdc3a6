"""An outer product as a multiplication.

A `dot_general` that sums nothing is not narrowed. But its derivatives are products that
sum, and would run in float32 when JAX makes them from a `dot_general`. Those of a
multiplication are multiplications and sums.
"""

from typing import Any

import jax
import jax.numpy as jnp


def outer_product(eqn: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The result of a `dot_general` that sums nothing, by one multiplication."""
    (contracted, _), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    # The axes of the result: those of the batch, those of x alone, then those of y
    # alone. Contracted axes have length 1.
    shape = eqn.outvars[0].aval.shape
    n_batch = len(batch_x)
    n_x = x.ndim - len(contracted)
    x = jnp.moveaxis(x, batch_x, range(n_batch)).reshape(shape[:n_x])
    y = jnp.moveaxis(y, batch_y, range(n_batch))
    y = y.reshape(shape[:n_batch] + (1,) * (n_x - n_batch) + shape[n_x:])
    return jnp.expand_dims(x, range(n_x, len(shape))) * y
