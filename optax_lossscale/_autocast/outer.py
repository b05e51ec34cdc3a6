"""An outer product as a multiplication.

A `dot_general` that sums nothing is not narrowed. But its derivatives are products that
sum, and those that JAX makes from a `dot_general` in float32 would run in float32. The
derivatives of a multiplication are multiplications and sums.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from optax_lossscale._programs.values import shape_in


def outer_product(eqn: JaxprEqn, x: jax.Array, y: jax.Array) -> jax.Array:
    """The result of a `dot_general` that sums nothing, by one multiplication."""
    (contracted, _), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    # The axes of the result are those of the batch, those of x alone, and those of y
    # alone. Contracted axes have length 1.
    shape = shape_in(eqn.outvars[0])
    first = range(len(batch_x))
    n_x = x.ndim - len(contracted)
    of_batch = shape[: first.stop]
    of_x = shape[first.stop : n_x]
    of_y = shape[n_x:]
    x = jnp.moveaxis(x, batch_x, first)
    y = jnp.moveaxis(y, batch_y, first)
    x = x.reshape(of_batch + of_x + (1,) * len(of_y))
    y = y.reshape(of_batch + (1,) * len(of_x) + of_y)
    return x * y
