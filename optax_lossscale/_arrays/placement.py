"""Over which devices an array is spread, by the compiler or by `shard_map`."""

from typing import Any

import jax
from jax.sharding import AxisType


def is_partitioned(x: jax.Array) -> bool:
    """Whether the compiler may spread the array over devices, as `jit` does."""
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in axes)


def varying_axes(x: jax.Array) -> frozenset:
    """The axes of `shard_map` along which the array differs; none without `check_vma`."""
    kind: Any = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # jax >= 0.9
