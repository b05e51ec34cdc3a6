"""The dtypes of gradients: what is differentiated is cast to them first."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.names import path_name
from optax_lossscale._arrays.precision import dtype_of, is_inexact

# A dtype, a tree of them with None for what stays, or a function that returns one; for
# other containers, use a function.
GradDtype: TypeAlias = (
    DTypeLike
    | Mapping[Any, "GradDtype | None"]
    | tuple["GradDtype | None", ...]
    | list[Any]
    | Callable[[Any], Any]
)


def cast_to_grad_dtype(grad_dtype: Any, differentiated: Any) -> Any:
    """What is differentiated, with wider floats cast to the dtypes that grad_dtype says."""
    if _is_function(grad_dtype):
        grad_dtype = grad_dtype(differentiated)
        check_grad_dtype(grad_dtype)
    dtypes = jax.tree.broadcast(grad_dtype, differentiated, is_leaf=_is_none)
    return jax.tree.map_with_path(_cast, differentiated, dtypes, is_leaf=_is_none)


def _cast(path: Any, x: Any, dtype: Any) -> Any:
    """One leaf in a dtype, if it is wider; as it is for None."""
    if dtype is None or not is_inexact(x) or jnp.iscomplexobj(x):
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
    is_wider = own_dtype.itemsize > dtype.itemsize
    return jnp.asarray(x, dtype) if is_wider else x


def check_grad_dtype(grad_dtype: Any) -> None:
    """Raises for what is neither a function nor a tree of floating-point dtypes."""
    if _is_function(grad_dtype):
        return
    for leaf in jax.tree.leaves(grad_dtype):
        validation.floating_dtype("grad_dtype", leaf)


def _is_none(x: Any) -> bool:
    """Whether a leaf of dtypes says that nothing is cast."""
    return x is None


def _is_function(grad_dtype: Any) -> bool:
    """Whether it is to be called; dtypes, and modules as trees of them, are callable too."""
    is_leaf = jax.tree_util.all_leaves([grad_dtype])
    return is_leaf and callable(grad_dtype) and validation.dtype(grad_dtype) is None
