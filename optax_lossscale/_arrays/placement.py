"""Over which devices an array is spread, by the compiler or by `shard_map`."""

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType


def is_partitioned(x: jax.Array) -> bool:
    """Whether the compiler may spread the array over devices, as `jit` does."""
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    sizes = [size for size, kind in axes if kind != AxisType.Manual]
    return max(sizes, default=1) > 1


def varying_axes(x: jax.Array) -> frozenset:
    """The axes of `shard_map` along which the array differs; none without `check_vma`."""
    return _varying(jax.typeof(x))


def in_its_mesh(x: jax.typing.ArrayLike) -> contextlib.AbstractContextManager[Any]:
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


def _varying(kind: Any) -> frozenset:
    """The axes along which an array of a type differs."""
    axes = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type  # since jax 0.9
    return getattr(axes, "varying", axes) or frozenset()
