"""The values in a program: their dtypes, and which equations multiply them."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.work import terms_of

FLOAT32 = jnp.dtype(jnp.float32)
FLOAT64 = jnp.dtype("float64")
HALVES = frozenset({jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)})


def dtype_in(x: Any) -> Any:
    """The dtype of an array, a type, a variable or a literal; None if it has none."""
    return getattr(getattr(x, "aval", x), "dtype", None)


def is_float(v: Any) -> bool:
    """Whether a variable is a floating-point or complex array."""
    dtype = dtype_in(v)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def in_dtype(dtype: Any, x: Any) -> Any:
    """An array in another dtype; unchanged if it has no dtype, or is to have None."""
    now = dtype_in(x)
    has_none = dtype is None or now is None  # NumPy's float64 equals None
    if has_none or now == dtype:
        return x
    with _in_its_mesh(x):
        return lax.convert_element_type(x, dtype)


def _in_its_mesh(x: jax.typing.ArrayLike) -> contextlib.AbstractContextManager[Any]:
    """A context for an operation on an array that may belong to another mesh than what is around.

    As an array inside of `auto_axes` does, whose mesh has the same axes with other
    types.
    """
    mesh = jax.typeof(x).sharding.mesh
    around = jax.sharding.get_abstract_mesh()
    kinds = {*mesh.axis_types, *around.axis_types}
    is_one_mesh = mesh.empty or around.empty or mesh == around
    if is_one_mesh or kinds == {AxisType.Auto}:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def in_dtypes(dtypes: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """Each array in its dtype."""
    return [in_dtype(dtype, x) for dtype, x in zip(dtypes, xs, strict=True)]


def dtypes_in(variables: Sequence[Any]) -> list[Any]:
    """The dtypes in which variables were traced."""
    return list(map(dtype_in, variables))


def numbers_in(array: Any) -> int:
    """How many numbers an array has; a size that `jax.export` leaves open counts as 1024."""
    sizes = [n if isinstance(n, int) else 1024 for n in array.shape]
    return math.prod(sizes)


def is_product(eqn: Any) -> bool:
    """Whether this is a matrix product or a convolution."""
    if Is.PRODUCT not in traits(eqn) or multiplies_once(eqn):
        return False
    if Is.OUTER not in traits(eqn):
        return True
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    # A sum of products to single numbers leaves no axis.
    n_summed = len(contracted) + len(batch)
    return any(len(v.aval.shape) > n_summed for v in eqn.invars)


def multiplies_once(eqn: Any) -> bool:
    """Whether a product sums nothing: each of its results is a single number times another."""
    return terms_of(eqn) == 1


def asks_for_precision(eqn: Any) -> bool:
    """Whether a product requests its precision, by itself or by the default around it."""
    precision = eqn.params.get("precision")
    if isinstance(precision, tuple):
        return lax.Precision.HIGHEST in precision
    return precision is not None
