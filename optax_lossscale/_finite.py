"""The check: is every number of a tree finite?"""

from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._precision import is_inexact


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
    flags = [_leaf_is_finite(jnp.asarray(x)) for x in jax.tree.leaves(tree) if is_inexact(x)]
    # One reduction over the stacked flags: a chain of ands compiles slower.
    return jnp.stack(flags).all() if flags else jnp.array(True)


def _leaf_is_finite(x: jax.Array) -> jax.Array:
    # x * 0 is 0 where x is finite and NaN where it is not, and a sum cannot lose
    # a NaN, as XLA's max on CPU does. On CPU these two dtypes sum at the speed of
    # memory, four times faster than all(isfinite(x)); float16 does not.
    if x.dtype in (jnp.float32, jnp.bfloat16):
        return jnp.sum(x * jnp.zeros((), x.dtype)) == 0
    return jnp.all(jnp.isfinite(x))
