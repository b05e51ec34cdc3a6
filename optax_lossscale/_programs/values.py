"""The dtypes, shapes and sizes of values.

A *value* is anything that may have a dtype: an array, traced or not, or a variable or
literal of a jaxpr.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var
from jax.sharding import AxisType

Array = jax.Array | np.ndarray
"""An array on a device or on the host."""

Atom = Var | Literal
"""What an equation reads: a variable, or a literal."""

FLOAT32 = jnp.dtype(jnp.float32)
FLOAT64 = jnp.dtype("float64")
HALVES = frozenset(map(jnp.dtype, ("float16", "bfloat16")))


def dtype_in(x: Any) -> Any:
    """The dtype of an array, a shape, a variable or a literal; None if it has none."""
    return getattr(getattr(x, "aval", x), "dtype", None)


def is_inexact(v: Any) -> bool:
    """Whether a variable or an array holds floating-point or complex numbers."""
    return is_inexact_dtype(dtype_in(v))


@functools.cache
def is_inexact_dtype(dtype: Any) -> bool:
    """Whether a dtype is a floating-point or complex one; None is not."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


@functools.cache
def is_narrow_dtype(dtype: Any) -> bool:
    """Whether a dtype is a floating-point one of 16 bits or fewer; None is not."""
    return (
        dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    )


def astype(x: Any, dtype: Any) -> Any:
    """Casts an array; returns `x` itself if it has no dtype, or if `dtype` is None."""
    now = dtype_in(x)
    has_none = dtype is None or now is None  # `np.dtype("float64") == None` is True
    if has_none or now == dtype:
        return x
    with _in_its_mesh(x):
        return lax.convert_element_type(x, dtype)


def _in_its_mesh(x: jax.typing.ArrayLike) -> contextlib.AbstractContextManager[Any]:
    """A context in which an operation on an array may run, whatever mesh it belongs to.

    Inside of `auto_axes`, an array may have another mesh than the context has: one with
    the same axes, of other types. JAX refuses operations on it there.
    """
    mesh = jax.typeof(x).sharding.mesh
    around = jax.sharding.get_abstract_mesh()
    axis_types = {*mesh.axis_types, *around.axis_types}
    is_one_mesh = mesh.empty or around.empty or mesh == around
    if is_one_mesh or axis_types == {AxisType.Auto}:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def astypes(xs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Casts each array to the dtype at its place, as `astype` does."""
    return [astype(x, dtype) for x, dtype in zip(xs, dtypes, strict=True)]


def dtypes_in(values: Sequence[Any]) -> list[Any]:
    """The dtype of each value, as `dtype_in` gives it."""
    return list(map(dtype_in, values))


def lengths_of(array: Any) -> list[int]:
    """The lengths of an array's axes; one that `jax.export` leaves open counts 1024.

    A token, which is no array, has no axes.
    """
    return [n if isinstance(n, int) else 1024 for n in getattr(array, "shape", ())]


def shape_in(v: Any) -> tuple[int, ...]:
    """The shape of a variable or a literal."""
    return v.aval.shape


def variables(values: Iterable[Any]) -> list[Var]:
    """The variables among values such as operands, without literals."""
    return [v for v in values if isinstance(v, Var)]


def size_of(array: Any) -> int:
    """How many numbers an array has, as `lengths_of` counts them."""
    return math.prod(lengths_of(array))
