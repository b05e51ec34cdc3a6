"""Over which devices an array is spread, by the compiler or by `shard_map`."""

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
    kind: Any = jax.typeof(x)
    # Newer versions of JAX have `manual_axis_type` in place of `vma`.
    axes = kind.vma if hasattr(kind, "vma") else kind.manual_axis_type
    return getattr(axes, "varying", axes) or frozenset()
