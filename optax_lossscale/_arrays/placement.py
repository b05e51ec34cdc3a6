"""How an array lies on several devices: placed by the compiler, or by `shard_map`.

An array's type names a mesh of devices. Along axes that the compiler manages, the array
is one global array, whose parts may lie on different devices. Along axes that
`shard_map` maps, each replica has an array that may differ from the others.
"""

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType


def is_on_several_devices(x: jax.Array) -> bool:
    """Whether JAX knows, while it traces an array, that it lies on several devices.

    JAX knows if the arguments of the `jit` lie on several devices, or under
    `jax.set_mesh`. It does not know yet if only `in_shardings` will place the arguments
    there. Nor may it know, while it traces, whether the array is partitioned over the
    devices or replicated. Axes that `shard_map` maps do not count: along these, the
    array is what a single replica holds.
    """
    mesh = jax.typeof(x).sharding.mesh
    for size, axis_type in zip(mesh.axis_sizes, mesh.axis_types, strict=True):
        if size > 1 and axis_type != AxisType.Manual:
            return True
    return False


def varying_axes(x: jax.Array) -> frozenset:
    """The mapped axes of a `shard_map` along which replicas hold different values.

    JAX tracks these axes only with `check_vma`. Without it, the set is empty.
    """
    abstract: Any = jax.typeof(x)
    if hasattr(abstract, "vma"):
        return abstract.vma or frozenset()
    # Newer versions of JAX have `manual_axis_type` instead of `vma`.
    axes = abstract.manual_axis_type
    return getattr(axes, "varying", axes) or frozenset()


def in_mesh_of(arrays: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which a program that was traced with these arrays can run.

    A program that was traced with arrays on a mesh with explicit axes can run on other
    arrays only while that mesh is set. If one of these arrays lies on such a mesh, the
    context sets it. If none does, or if a mesh is set already, the context does nothing.
    """
    if jax.sharding.get_abstract_mesh().empty:
        for x in jax.tree.leaves(arrays):
            sharding = getattr(x, "sharding", None)
            mesh = getattr(sharding, "mesh", None)
            is_mesh = isinstance(mesh, jax.sharding.Mesh)
            if is_mesh and AxisType.Explicit in mesh.axis_types:
                return jax.set_mesh(mesh)
    return contextlib.nullcontext()
