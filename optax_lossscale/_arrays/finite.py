"""The check: is every number of a tree finite?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from optax_lossscale._arrays.precision import is_inexact


def all_finite(tree: Any) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity.

    Args:
      tree: any pytree of arrays and Python numbers. `None`, integer, bool and
        float0 leaves are always finite.

    Returns:
      A bool scalar, shape (); True for an empty tree.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> bool(ols.all_finite({"w": jnp.ones(3), "b": None, "n": 7}))
      True
      >>> bool(ols.all_finite({"w": jnp.array([1.0, jnp.nan])}))
      False
    """
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_inexact(x)]
    if not leaves:
        return jnp.array(True)
    if any(map(is_partitioned, leaves)):
        return _all_finite(leaves)
    # Chosen when the program is lowered, by the platform that it is lowered for.
    return lax.platform_dependent(leaves, cpu=_all_finite_on_cpu, default=_all_finite)


def is_partitioned(x: jax.Array) -> bool:
    """Whether the compiler may spread the array over devices, as `jit` does."""
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in axes)


def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    # Partitioned, this takes one all-reduce, of a flag for each leaf.
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all()


def _all_finite_on_cpu(leaves: list[jax.Array]) -> jax.Array:
    # A max is no way out: XLA's loses NaNs there. And a reduction of one output it compiles to
    # several passes, through an array of the leaf's size. But one of two outputs becomes a
    # single pass at the speed of memory, in every dtype and with the unscaling fused into it.
    # Hence a second question to each number, whose answer the first implies.
    flags = [flag for x in leaves for flag in _both_all(jnp.isfinite(x), lax.eq(x, x))]
    # The barrier keeps the flags from being fused with their conjunction: a kernel that has
    # an argument for every leaf compiles in quadratic time.
    return lax.optimization_barrier(jnp.stack(flags)).all()


def _both_all(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    return lax.reduce((a, b), (np.True_, np.True_), _both_and, range(a.ndim))


def _both_and(a, b):
    return lax.bitwise_and(a[0], b[0]), lax.bitwise_and(a[1], b[1])
