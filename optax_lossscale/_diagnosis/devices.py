"""Runs the program in a `shard_map` piece by piece, on *stacks* of all devices' arrays.

Between two pieces, Python holds values that exist only inside the `shard_map`, where
each device has its own array. A stack joins these arrays into one array outside the
`shard_map`. An array of shape (3,) on each of 4 devices becomes a stack of shape
(4, 3), whose first axis is divided among the devices. A second `shard_map` inside the
first, over a mesh axis of size 2, adds an axis: (4, 2, 3).

Three methods return functions, which the caller compiles:

- `Devices.to_stack`: from an operand of the innermost `shard_map` to its stack.
- `Devices.over_stacks`: from stacks to stacks, given a function of one device's arrays.
- `Devices.from_stack`: from the stack of a result of the innermost `shard_map` to the
  result.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, reshard

from optax_lossscale._programs.values import Array
from optax_lossscale._programs.versions import mapped_axes


class _ShardMap(NamedTuple):
    """The mesh axes that one `shard_map` maps over.

    Attributes:
      mesh: the mesh of the `shard_map`.
      axes: the names of the mesh axes that this `shard_map` maps over, without those of
        an enclosing one.
    """

    mesh: Any
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of devices along the axes."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def stack_spec(self) -> jax.P:
        """The spec of a stack, whose first axis is divided among the devices."""
        return jax.P(self.axes)

    def over_shards(
        self, function: Callable[..., Any], in_specs: jax.P, out_specs: jax.P
    ) -> Callable[..., Any]:
        """Lifts a function of one device's arrays to arrays sharded by specs."""
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if any(types[axis] != AxisType.Explicit for axis in self.axes):
            return mapped

        # If all axes are explicit, JAX refuses arguments with another sharding.
        def resharded(*args):
            return mapped(*reshard(args, in_specs))

        return resharded

    def over_stacks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Lifts a function of one device's arrays to stacks over these devices."""

        def on_one_device(*stacks_of_one):
            args = jax.tree.map(_only_row, stacks_of_one)
            results = function(*args)
            return jax.tree.map(_stack_of_one, results)

        return self.over_shards(on_one_device, self.stack_spec, self.stack_spec)


class Devices(NamedTuple):
    """The devices on which a program runs, as given by the `shard_map`s around it.

    Attributes:
      maps: the `shard_map`s around the program, the outermost first. Without any, a
        stack is the array itself.
    """

    maps: tuple[_ShardMap, ...] = ()

    def inside(self, eqn: JaxprEqn) -> "Devices":
        """Returns the devices inside a `shard_map` that runs on these devices."""
        inner = _ShardMap(eqn.params["mesh"], tuple(mapped_axes(eqn)))
        return Devices((*self.maps, inner))

    def over_stacks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Lifts a function of one device's arrays to stacks over all `maps`."""
        for shard_map in reversed(self.maps):
            function = shard_map.over_stacks(function)
        return function

    def to_stack(self, spec: jax.P) -> Callable[[Array], jax.Array]:
        """Returns the function from an operand of the innermost `shard_map` to a stack.

        The operand is sharded by `spec`.
        """
        return self._on_each(_stack_of_one, spec, self.maps[-1].stack_spec)

    def from_stack(self, spec: jax.P) -> Callable[[Array], jax.Array]:
        """Returns the function from a stack to a result of the innermost `shard_map`.

        The result is sharded by `spec`.
        """
        return self._on_each(_only_row, self.maps[-1].stack_spec, spec)

    def replicate(self, x: Array) -> Array:
        """Repeats an array for each device, as a stack over all `maps`."""
        if not self.maps:
            return x
        sizes = [shard_map.size for shard_map in self.maps]
        return jnp.broadcast_to(x, (*sizes, *x.shape))

    def _on_each(
        self,
        function: Callable[[jax.Array], jax.Array],
        in_spec: jax.P,
        out_spec: jax.P,
    ) -> Callable[[Array], jax.Array]:
        """Lifts a function of one device's array to the innermost `shard_map`."""
        *outer, inner = self.maps
        mapped = inner.over_shards(function, in_spec, out_spec)
        return Devices(tuple(outer)).over_stacks(mapped)


def _stack_of_one(x: jax.Array) -> jax.Array:
    """Adds the axis of a stack: on one device, a stack has one row."""
    return x[None]


def _only_row(x: jax.Array) -> jax.Array:
    """Returns the one row that a stack has on one device."""
    return x[0]
