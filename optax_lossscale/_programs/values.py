"""The dtypes, shapes and sizes of values.

A *value* is anything that may have a dtype: an array, traced or not, or a variable or
literal of a jaxpr. For example, `dtype_in` accepts both `x` and the variable that
stands for `x` in a program. (`_arrays/precision.py` has functions for the leaves of a
user's trees, which may be Python numbers.)
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
"""An operand of an equation: a variable or a literal."""

FLOAT32 = jnp.dtype(jnp.float32)
FLOAT64 = jnp.dtype("float64")
HALVES = frozenset(map(jnp.dtype, ("float16", "bfloat16")))
"""The dtypes in which `autocast` may compute products."""


def dtype_in(x: Any) -> Any:
    """Returns the dtype of a value or an abstract value; None if it has no dtype."""
    aval = getattr(x, "aval", x)
    return getattr(aval, "dtype", None)


def is_inexact(v: Any) -> bool:
    """Whether a value holds floating-point or complex numbers."""
    return is_inexact_dtype(dtype_in(v))


@functools.cache
def is_inexact_dtype(dtype: Any) -> bool:
    """Whether a dtype is floating-point or complex; False for None."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


@functools.cache
def is_narrow_dtype(dtype: Any) -> bool:
    """Whether a dtype is floating-point with 16 bits or fewer; False for None."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return dtype.itemsize < 4


def astype(x: Any, dtype: Any) -> Any:
    """Casts an array; returns `x` itself if it has no dtype, or if `dtype` is None.

    A token has no dtype, and None stands for the dtype in which `x` is stored.
    """
    old_dtype = dtype_in(x)
    # `None` is tested by identity, because `np.dtype("float64") == None` is True.
    if dtype is None or old_dtype is None or old_dtype == dtype:
        return x
    with _mesh_context(x):
        return lax.convert_element_type(x, dtype)


def _mesh_context(x: jax.typing.ArrayLike) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which JAX allows operations on `x`, whatever its mesh.

    Inside `jax.sharding.auto_axes`, an array's mesh may have the axes of the context's
    mesh, but of other types. JAX refuses operations on such an array.
    """
    mesh = jax.typeof(x).sharding.mesh
    context_mesh = jax.sharding.get_abstract_mesh()
    axis_types = {*mesh.axis_types, *context_mesh.axis_types}
    is_allowed = mesh.empty or context_mesh.empty or mesh == context_mesh
    if is_allowed or axis_types == {AxisType.Auto}:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def astypes(xs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Casts each array to the dtype at the same position, with `astype`."""
    pairs = zip(xs, dtypes, strict=True)
    return [astype(x, dtype) for x, dtype in pairs]


def dtypes_in(values: Sequence[Any]) -> list[Any]:
    """Returns the `dtype_in` of each value."""
    return [dtype_in(value) for value in values]


def lengths_of(array: Any) -> list[int]:
    """Returns the lengths of an array's axes; a symbolic length counts as 1024.

    Lengths are symbolic where `jax.export` leaves an axis open, such as the axis of the
    batch. The value 1024 is a heuristic, with which such an axis counts as long. A
    token has no shape and therefore no axes.
    """
    shape = getattr(array, "shape", ())
    return [n if isinstance(n, int) else 1024 for n in shape]


def shape_in(v: Any) -> tuple[int, ...]:
    """Returns the shape of a variable or a literal."""
    return v.aval.shape


def variables(values: Iterable[Any]) -> list[Var]:
    """Returns the variables among operands or results, without the literals."""
    return [v for v in values if isinstance(v, Var)]


def size_of(array: Any) -> int:
    """Counts the elements of an array; symbolic lengths count as in `lengths_of`."""
    return math.prod(lengths_of(array))
