"""What is known, while an array is traced, about the devices that it is on.

The type of a traced array contains a mesh of devices. Its axes are of two kinds.
Along `Auto` and `Explicit` axes, the array is one global array, which may be divided
into shards. Along `Manual` axes, `shard_map` has divided it: each replica has an array
of its own, which may differ from the others.
"""

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType


def is_on_several_devices(x: jax.Array) -> bool:
    """Whether an array is known, while it is traced, to be on several devices.

    The devices are known if the arguments of the `jit` are on several devices, or under
    `jax.set_mesh`. They are not known yet if only `in_shardings` will put the arguments
    on several devices. The array may be sharded over the devices or replicated. Axes
    that `shard_map` maps do not count: along these, the array belongs to one replica.
    """
    mesh = jax.typeof(x).sharding.mesh
    for size, axis_type in zip(mesh.axis_sizes, mesh.axis_types, strict=True):
        if size > 1 and axis_type != AxisType.Manual:
            return True
    return False


def varying_axes(x: jax.Array) -> frozenset:
    """Returns the axes of a `shard_map` along which replicas may have different values.

    JAX tracks these axes only with `check_vma`. Without it, the set is empty.
    """
    abstract: Any = jax.typeof(x)
    if hasattr(abstract, "vma"):
        return abstract.vma or frozenset()
    # Since jax 0.10, `manual_axis_type` has replaced `vma`.
    axes = abstract.manual_axis_type
    return getattr(axes, "varying", axes) or frozenset()


def in_mesh_of(arrays: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which a program that was traced with these arrays can run.

    A program that was traced with arrays on a mesh with explicit axes can run on other
    arrays only while that mesh is set. If one of these arrays is on such a mesh, the
    context sets the mesh. If none is, or if a mesh is set already, the context does
    nothing.
    """
    if jax.sharding.get_abstract_mesh().empty:
        for x in jax.tree.leaves(arrays):
            sharding = getattr(x, "sharding", None)
            mesh = getattr(sharding, "mesh", None)
            is_mesh = isinstance(mesh, jax.sharding.Mesh)
            if is_mesh and AxisType.Explicit in mesh.axis_types:
                return jax.set_mesh(mesh)
    return contextlib.nullcontext()
