"""The argument `grad_dtype`: the dtypes in which gradients are computed.

A gradient has the dtype of what is differentiated. So the parameters are cast to
`grad_dtype` before the loss function is called, and with float16, their gradients take
half the memory. Only wider floats are cast: narrower ones have narrow gradients
already.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import dtype_of, is_inexact_leaf

# A dtype; a tree of dtypes, with None for leaves that are not cast; or a function from
# what is differentiated to either. The types name the usual containers; for others, use
# a function.
GradDtype: TypeAlias = (
    DTypeLike
    | Mapping[Any, "GradDtype | None"]
    | tuple["GradDtype | None", ...]
    | list[Any]
    | Callable[[Any], Any]
)


def cast_to_grad_dtype(grad_dtype: Any, differentiated: Any) -> Any:
    """The differentiated arguments, with wider floats cast as `grad_dtype` says.

    `grad_dtype` is first broadcast to their tree, of which it may be a prefix.
    """
    if _is_function(grad_dtype):
        grad_dtype = grad_dtype(differentiated)
        check_grad_dtype(grad_dtype)
    dtypes = jax.tree.broadcast(grad_dtype, differentiated, is_leaf=_is_none)
    return jax.tree.map_with_path(_cast, differentiated, dtypes, is_leaf=_is_none)


def _cast(path: Any, x: Any, dtype: Any) -> Any:
    """One leaf, cast to a dtype if it is a wider float; `None` casts nothing.

    A float of another dtype of the same width raises a `ValueError`: float16 and
    bfloat16 together make the model compute in float32.
    """
    if dtype is None or not is_inexact_leaf(x) or jnp.iscomplexobj(x):
        return x
    dtype = jnp.dtype(dtype)
    own_dtype = dtype_of(x)
    if own_dtype != dtype and own_dtype.itemsize == dtype.itemsize:
        raise ValueError(
            f"grad_dtype={dtype} only casts wider floats, but {path_name(path)} is "
            f"{own_dtype}: with {dtype} inputs the model would compute in float32. "
            f"Keep the parameters in float32 or in {dtype}, or pass "
            f"grad_dtype={own_dtype}"
        )
    return jnp.asarray(x, dtype) if own_dtype.itemsize > dtype.itemsize else x


def check_grad_dtype(grad_dtype: Any) -> None:
    """Raises unless this is a function or a tree of floating-point dtypes."""
    if _is_function(grad_dtype):
        return
    for leaf in jax.tree.leaves(grad_dtype):
        validation.floating_dtype("grad_dtype", leaf)


def _is_none(x: Any) -> bool:
    """Whether this is None, a leaf in trees of dtypes, not an empty subtree."""
    return x is None


def _is_function(grad_dtype: Any) -> bool:
    """Whether this is a function to call, and not a dtype or a tree of dtypes.

    A dtype such as `jnp.float16` is callable, too.
    """
    is_function = validation.is_function(grad_dtype)
    return is_function and validation.dtype_or_none(grad_dtype) is None
