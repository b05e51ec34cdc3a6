"""How an array lies on several devices: placed by the compiler, or by `shard_map`."""

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType


def is_on_several_devices(x: jax.Array) -> bool:
    """Whether an array is known to lie on several devices while it is traced.

    It may be partitioned over them or replicated: while tracing, JAX may not know
    which. JAX knows that an array lies on several devices if the arguments of the `jit`
    do, or under `jax.set_mesh`; it does not know it if only `in_shardings` will place
    the arguments there. Axes that `shard_map` maps do not count:
    along these, the array is what one replica holds.
    """
    mesh = jax.typeof(x).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    sizes = [size for size, axis_type in axes if axis_type != AxisType.Manual]
    return max(sizes, default=1) > 1


def varying_axes(x: jax.Array) -> frozenset:
    """The mapped axes of a `shard_map` along which replicas hold different values.

    JAX keeps track of them only with `check_vma`; without it, the set is empty.
    """
    abstract: Any = jax.typeof(x)
    if hasattr(abstract, "vma"):
        return abstract.vma or frozenset()
    # Newer versions of JAX have this in place of `vma`.
    axes = abstract.manual_axis_type
    return getattr(axes, "varying", axes) or frozenset()


def in_mesh_of(arrays: Any) -> contextlib.AbstractContextManager[Any]:
    """A context with the mesh along whose explicit axes a tree's arrays lie.

    Under this mesh, what was traced of these arrays runs on others as well. If there is
    a mesh already, or no such array, the context changes nothing.
    """
    if jax.sharding.get_abstract_mesh().empty:
        for x in jax.tree.leaves(arrays):
            sharding = getattr(x, "sharding", None)
            mesh = getattr(sharding, "mesh", None)
            is_mesh = isinstance(mesh, jax.sharding.Mesh)
            if is_mesh and AxisType.Explicit in mesh.axis_types:
                return jax.set_mesh(mesh)
    return contextlib.nullcontext()
