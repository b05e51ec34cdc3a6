"""Which leaves loss scaling applies to, and in which dtypes it computes with them.

Loss scaling multiplies and divides *inexact* leaves, floating-point and complex numbers
of any width, and passes all others on as they are. *Narrow* floats, of 16 bits or
fewer, are converted to float32 first: small gradients would underflow again if they
were divided by the loss scale in float16.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

T = TypeVar("T")


def is_inexact_leaf(x: Any) -> bool:
    """Whether a leaf is a floating-point or complex number, of any width."""
    if not is_array_leaf(x):
        return False
    return jnp.issubdtype(dtype_of(x), jnp.inexact)


def is_narrow_leaf(x: Any) -> bool:
    """Whether a leaf is a floating-point number of 16 bits or fewer."""
    return is_inexact_leaf(x) and dtype_of(x).itemsize < 4


def is_array_leaf(x: Any) -> bool:
    """Whether a leaf is an array, a `jax.ShapeDtypeStruct` or a Python number."""
    has_dtype = hasattr(x, "dtype") and not isinstance(
        x, type
    )  # jnp.float32, too, has one
    return has_dtype or isinstance(x, (bool, int, float, complex))


def at_least_float32(x: Any) -> Any:
    """A narrow float converted to float32, and every other leaf as it is."""
    if not is_narrow_leaf(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.dtype(jnp.float32))
    return jnp.asarray(x, jnp.float32)


def map_inexact(function: Callable[[jax.Array], jax.Array], tree: T) -> T:
    """The tree with `function` of each inexact leaf, which it gets in float32 or wider.

    All other leaves stay as they are.
    """

    def mapped(x):
        if not is_inexact_leaf(x):
            return x
        wide = at_least_float32(x)
        return function(jnp.asarray(wide))

    return jax.tree.map(mapped, tree)


def strongly_typed(x: Any, dtype: Any = None) -> Any:
    """`x` in the given dtype, or in its own, and strongly typed.

    An array whose type changes between weak and strong from one step to the next makes
    JAX trace and compile the step again.
    """
    if dtype is None:
        dtype = dtype_of(x)
    return lax.convert_element_type(x, dtype)


def precise_product(scale: jax.Array, factor: float) -> jax.Array:
    """The float32 product of a scale and a Python float, as computed in float64."""
    factor32 = np.float32(factor)
    is_exact = float(factor32) == factor
    if is_exact:
        return scale * factor32
    # Other systems divide a scale by 3, or multiply it by 0.3 in double precision. A
    # float32 product with 1/3, itself rounded, may be an ulp off, and XLA compiles a
    # division by a constant to that very product. In float64 both come out as in those
    # systems.
    with jax.enable_x64(True):
        wide = lax.convert_element_type(scale, np.float64)
        product = wide * np.float64(factor)
        return lax.convert_element_type(product, np.float32)


def dtype_of(x: Any) -> np.dtype:
    """The dtype that JAX gives to an array, an abstract array or a Python number.

    With 64-bit types disabled, a float64 NumPy array counts as float32.
    """
    if not hasattr(x, "dtype"):
        return jnp.result_type(x)
    dtype: Any = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return dtype
