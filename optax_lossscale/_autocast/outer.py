"""An outer product as a multiplication.

`jnp.einsum("i,j->ij", x, y)` is a `dot_general` that sums nothing, so it is not
narrowed. Its derivatives are matrix products that do sum, and they would run in float32
as well. If the outer product is computed as `x[:, None] * y[None, :]` instead, its
derivatives are multiplications and sums, which a compiler can fuse.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from optax_lossscale._programs.values import shape_in


def outer_product(eqn: JaxprEqn, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes a `dot_general` that sums nothing by one multiplication."""
    _, (batch_x, batch_y) = eqn.params["dimension_numbers"]
    n_batch = len(batch_x)
    # The result has the batch axes first, then the axes of x, then the axes of y.
    x = jnp.moveaxis(x, batch_x, range(n_batch))
    y = jnp.moveaxis(y, batch_y, range(n_batch))
    n_axes = x.ndim + y.ndim - n_batch
    axes_of_x = range(n_batch, x.ndim)
    axes_of_y = range(x.ndim, n_axes)
    x = lax.expand_dims(x, axes_of_y)
    y = lax.expand_dims(y, axes_of_x)
    product = x * y
    # Contracted axes have length 1, and the result lacks them.
    shape = shape_in(eqn.outvars[0])
    return product.reshape(shape)
