"""Which leaves are numbers to scale, in which dtypes they are kept, and exact products."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

T = TypeVar("T")
_PYTHON_NUMBER = (bool, int, float, complex)


def is_inexact(x: Any) -> bool:
    """Whether a leaf is a floating-point or complex number, of any width."""
    if not is_array(x):
        return False
    return jnp.issubdtype(dtype_of(x), jnp.inexact)


def is_narrow(x: Any) -> bool:
    """Whether a leaf is a floating-point number of 16 or 8 bits."""
    return is_inexact(x) and dtype_of(x).itemsize < 4


def is_array(x: Any) -> bool:
    """Whether a leaf is an array, an abstract one or a Python number."""
    return hasattr(x, "dtype") or isinstance(x, _PYTHON_NUMBER)


def at_least_float32(x: Any) -> Any:
    """8- and 16-bit floats as float32; everything else as it came."""
    if not is_narrow(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.dtype(jnp.float32))
    return jnp.asarray(x, jnp.float32)


def map_inexact(function: Callable[[jax.Array], jax.Array], tree: T) -> T:
    """`function` of every inexact leaf, as an array of at least float32; the rest as it came."""

    def mapped(x):
        if not is_inexact(x):
            return x
        wide = at_least_float32(x)
        return function(jnp.asarray(wide))

    return jax.tree.map(mapped, tree)


def strong(x: Any, dtype: Any = None) -> Any:
    """`x` in its own or the given dtype, never weakly typed, which would cause a new trace."""
    if dtype is None:
        dtype = dtype_of(x)
    return lax.convert_element_type(x, dtype)


def times(scale: jax.Array, factor: float) -> jax.Array:
    """The product, rounded to float32 only once, even if the factor is not a float32."""
    if float(np.float32(factor)) == factor:
        return scale * np.float32(factor)
    # The references divide by 3, or multiply by a C double of 0.3. A float32 product
    # with a rounded 1/3 is an ulp off, and XLA makes exactly that of a division by a
    # constant. In float64 both come out right.
    with jax.enable_x64(True):
        wide = lax.convert_element_type(scale, np.float64)
        product = wide * np.float64(factor)
        return lax.convert_element_type(product, np.float32)


def dtype_of(x: Any) -> np.dtype:
    """The dtype that JAX has for an array, an abstract array or a Python number."""
    if not hasattr(x, "dtype"):
        return jnp.result_type(x)
    dtype: Any = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return dtype
