"""The mesh in which a traced program can run."""

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType


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
