"""An outer product as a multiplication.

A `dot_general` that sums nothing stays in float32, and so would its derivatives, which
are matrix products that sum. As a multiplication, its derivatives are multiplications
and sums, which a compiler fuses.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from optax_lossscale._programs.values import shape_in


def outer_product(eqn: JaxprEqn, x: jax.Array, y: jax.Array) -> jax.Array:
    """The result of a `dot_general` that sums nothing, by one multiplication."""
    _, (batch_x, batch_y) = eqn.params["dimension_numbers"]
    n_batch = len(batch_x)
    # The axes of the batch come first, then those of x alone, then those of y alone.
    x = jnp.moveaxis(x, batch_x, range(n_batch))
    y = jnp.moveaxis(y, batch_y, range(n_batch))
    of_y = range(x.ndim, x.ndim + y.ndim - n_batch)
    product = lax.expand_dims(x, of_y) * lax.expand_dims(y, range(n_batch, x.ndim))
    # The contracted axes, of length 1, are left out.
    return product.reshape(shape_in(eqn.outvars[0]))
