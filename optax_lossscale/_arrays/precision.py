"""Which leaves loss scaling applies to and in which dtypes it computes.

Loss scaling multiplies and divides *inexact* leaves, whose elements are floating-point
or complex, of any width. It leaves all others as they are. *Narrow* leaves, whose
elements are floating-point numbers of 16 bits or fewer, are converted to float32
first::

    float16(2**-15) / 2**15             # 0: the gradient has underflowed again
    float32(float16(2**-15)) / 2**15    # 2**-30
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

T = TypeVar("T")


def is_inexact_leaf(x: Any) -> bool:
    """Whether a leaf's elements are floating-point or complex, of any width."""
    if not is_array_leaf(x):
        return False
    return jnp.issubdtype(dtype_of(x), jnp.inexact)


def is_narrow_leaf(x: Any) -> bool:
    """Whether a leaf's elements are floating-point numbers of 16 bits or fewer."""
    return is_inexact_leaf(x) and dtype_of(x).itemsize < 4


def is_array_leaf(x: Any) -> bool:
    """Whether a leaf is an array, a `jax.ShapeDtypeStruct` or a Python number."""
    # `jnp.float32` has a dtype, too, but is a class, not a number.
    has_dtype = hasattr(x, "dtype") and not isinstance(x, type)
    return has_dtype or isinstance(x, (bool, int, float, complex))


def at_least_float32(x: Any) -> Any:
    """Converts a narrow leaf to float32; returns every other leaf as it is."""
    if not is_narrow_leaf(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.dtype(jnp.float32))
    return jnp.asarray(x, jnp.float32)


def param_for_inner(param: Any) -> Any:
    """Converts a parameter for the inner optimizer: to float32 or wider.

    No optimizer can compute with a PRNG key, so zeros of its shape stand in for it.
    """
    is_array = isinstance(param, jax.Array)
    if is_array and jnp.issubdtype(param.dtype, jax.dtypes.prng_key):
        return jnp.zeros(param.shape, jnp.float32)
    return at_least_float32(param)


def map_inexact(function: Callable[[jax.Array], jax.Array], tree: T) -> T:
    """Applies `function` to each inexact leaf of a tree, after `at_least_float32`.

    All other leaves stay as they are.
    """

    def mapped(x):
        if not is_inexact_leaf(x):
            return x
        wide = at_least_float32(x)
        return function(jnp.asarray(wide))

    return jax.tree.map(mapped, tree)


def strongly_typed(x: Any, dtype: Any = None) -> Any:
    """Converts `x` to an array of `dtype`, or of its own dtype, without a weak type.

    For example, `jnp.asarray(1.0)` has a weak type: added to a float16 array, it does
    not make the sum float32. If an array's type changed between weak and strong from
    one step to the next, JAX would trace and compile the step again.
    """
    if dtype is None:
        dtype = dtype_of(x)
    return lax.convert_element_type(x, dtype)


def dtype_of(x: Any) -> np.dtype:
    """Returns the dtype that JAX gives an array, an abstract array or a Python number.

    For example, a float64 NumPy array has the dtype float32 unless 64-bit types are
    enabled.
    """
    if not hasattr(x, "dtype"):
        return jnp.result_type(x)
    dtype: Any = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return dtype
