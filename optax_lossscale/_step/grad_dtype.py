"""Casts parameters to `grad_dtype`, which makes it the dtype of their gradients.

JAX gives a gradient the dtype of the argument that is differentiated, so parameters are
cast before the loss function is called. With `grad_dtype=jnp.float16`, for example,
float32 parameters get float16 gradients, which take half the memory. Only floats wider
than `grad_dtype` are cast; the gradients of others are no wider than it already.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import dtype_of, is_inexact_leaf

GradDtype: TypeAlias = (
    DTypeLike
    | Mapping[Any, "GradDtype | None"]
    | tuple["GradDtype | None", ...]
    | list[Any]
    | Callable[[Any], Any]
)
"""A dtype, a tree of dtypes, or a function that returns one of these.

In a tree, None stands for a leaf that is not cast. A function receives the
differentiated argument. Type checkers accept only the containers that are listed here,
so for a tree with other nodes, pass a function.
"""


def cast_to_grad_dtype(grad_dtype: Any, differentiated: Any) -> Any:
    """Casts the wider floats among the differentiated arguments to `grad_dtype`.

    `grad_dtype` may be a prefix of the arguments' tree, to which it is broadcast.
    """
    if _is_function(grad_dtype):
        grad_dtype = grad_dtype(differentiated)
        check_grad_dtype(grad_dtype)
    dtypes = jax.tree.broadcast(grad_dtype, differentiated, is_leaf=_is_none)
    return jax.tree.map_with_path(_cast, differentiated, dtypes, is_leaf=_is_none)


def _cast(path: Any, x: Any, dtype: Any) -> Any:
    """Casts a leaf to a dtype if it is a wider float and the dtype is not None.

    Raises a `ValueError` if the leaf is a float of the same width but another dtype,
    such as bfloat16 instead of float16. Where the two meet, JAX promotes both to
    float32, so the model would compute in float32.
    """
    if dtype is None or not is_inexact_leaf(x) or jnp.iscomplexobj(x):
        return x
    dtype = jnp.dtype(dtype)
    own_dtype = dtype_of(x)
    if own_dtype != dtype and own_dtype.itemsize == dtype.itemsize:
        raise ValueError(
            f"grad_dtype={dtype} casts only wider floats, but {path_name(path)} is "
            f"{own_dtype}, so with {dtype} inputs the model would compute in float32. "
            f"Keep the parameters in float32 or in {dtype}, or pass "
            f"grad_dtype={own_dtype}"
        )
    return jnp.asarray(x, dtype) if own_dtype.itemsize > dtype.itemsize else x


def check_grad_dtype(grad_dtype: Any) -> None:
    """Raises a `ValueError` unless this is a function or a tree of float dtypes.

    The dtypes that a function returns are checked after the call of the function.
    """
    if _is_function(grad_dtype):
        return
    for leaf in jax.tree.leaves(grad_dtype):
        validation.floating_dtype("grad_dtype", leaf)


def _is_none(x: Any) -> bool:
    """Whether `x` is None, in a tree of dtypes a leaf rather than an empty subtree."""
    return x is None


def _is_function(grad_dtype: Any) -> bool:
    """Whether `grad_dtype` is a function rather than a dtype or a tree of dtypes.

    To be callable is not enough, because dtypes such as `jnp.float16` are callable too.
    """
    is_function = validation.is_function(grad_dtype)
    return is_function and validation.dtype_or_none(grad_dtype) is None
