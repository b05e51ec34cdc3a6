"""The check: is every number of a tree finite? And in the same pass, how large is the largest?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._arrays.placement import is_partitioned
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
    leaves = _inexact_leaves(tree)
    return _reduce(leaves, _all_finite_on_cpu, _all_finite) if leaves else jnp.array(True)


def largest(tree: Any) -> jax.Array:
    """The largest absolute value in a tree; infinity if a number in it is not finite.

    It costs the one pass over the tree that `all_finite` costs, and says what that says.

    Args:
      tree: any pytree of arrays and Python numbers; leaves that `all_finite` does not look
        at are left out.

    Returns:
      A float32 scalar, shape (), never NaN: 0 for an empty tree, the larger of its two parts
      for a complex number, and the largest float32 for a wider number above it.
    """
    leaves = _inexact_leaves(tree)
    return _reduce(leaves, _largest_on_cpu, _largest) if leaves else jnp.float32(0)


def _inexact_leaves(tree: Any) -> list[jax.Array]:
    return [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_inexact(x)]


def _reduce(
    leaves: list[jax.Array],
    on_cpu: Callable[[list[jax.Array]], jax.Array],
    elsewhere: Callable[[list[jax.Array]], jax.Array],
) -> jax.Array:
    if any(map(is_partitioned, leaves)):
        return elsewhere(leaves)
    # Chosen when the program is lowered, by the platform that it is lowered for.
    return lax.platform_dependent(leaves, cpu=on_cpu, default=elsewhere)


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


def _largest(leaves: list[jax.Array]) -> jax.Array:
    # Partitioned, this takes one all-reduce, of a number for each leaf.
    or_infinity = lambda x: jnp.where(jnp.isfinite(x), _size(x), jnp.inf)
    return jnp.stack([jnp.max(or_infinity(x), initial=0) for x in leaves]).max()


def _largest_on_cpu(leaves: list[jax.Array]) -> jax.Array:
    # Two outputs again, of which the flag is needed besides: it knows of the NaNs that the
    # maximum loses.
    sizes, flags = zip(*(_max_and_all(_size(x), jnp.isfinite(x)) for x in leaves), strict=True)
    sizes, flags = lax.optimization_barrier((jnp.stack(sizes), jnp.stack(flags)))
    return jnp.where(flags.all(), sizes.max(), jnp.inf)


def _size(x: jax.Array) -> jax.Array:
    """The absolute value as float32, which is infinite for no finite number."""
    if jnp.iscomplexobj(x):
        return jnp.maximum(_size(x.real), _size(x.imag))
    if x.dtype.itemsize > 4:
        x = jnp.clip(x, -_LARGEST, _LARGEST)
    return jnp.abs(x.astype(jnp.float32))


_LARGEST = float(np.finfo(np.float32).max)


def _max_and_all(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    return lax.reduce((a, b), (np.float32(0), np.True_), _max_and, range(a.ndim))


def _max_and(a, b):
    return lax.max(a[0], b[0]), lax.bitwise_and(a[1], b[1])


def _both_all(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    return lax.reduce((a, b), (np.True_, np.True_), _both_and, range(a.ndim))


def _both_and(a, b):
    return lax.bitwise_and(a[0], b[0]), lax.bitwise_and(a[1], b[1])
