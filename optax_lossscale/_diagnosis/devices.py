"""The inside of a `shard_map`, with the arrays of all devices stacked in one.

Python runs the program in a `shard_map` piece by piece, so the values between two
pieces have to exist outside of it. There, an array of shape (3,) on each of 4 devices
is one of shape (4, 3), whose first axis is divided among the devices. Inside a second
`shard_map` in the first, over 2 further devices each, it is one of shape (4, 2, 3).
`entered` and `exited` convert operands and results of the inner one to and from that
form, and `over` runs a piece.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, reshard

from optax_lossscale._diagnosis.value import Value
from optax_lossscale._programs.values import Array
from optax_lossscale._programs.versions import mapped_axes


class _Map(NamedTuple):
    """What one `shard_map` maps over."""

    mesh: Any
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of its devices."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def of_stack(self) -> jax.P:
        """The specification of a stack of its devices' arrays."""
        return jax.P(self.axes)

    def apply(self, function: Callable, in_specs: jax.P, out_specs: jax.P) -> Callable:
        """A function of one device's arrays, as one of arrays laid out by the specs."""
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
        # Along explicit axes, arrays have to lie as `in_specs` says beforehand.
        return lambda *args: mapped(*reshard(args, in_specs))

    def stacked(self, function: Callable) -> Callable:
        """A function of one device's arrays, as one of stacks of those of its devices."""

        def of_one_device(*args):
            return jax.tree.map(_as_stack, function(*jax.tree.map(_alone, args)))

        return self.apply(of_one_device, self.of_stack, self.of_stack)


class Devices(NamedTuple):
    """The devices that a program runs on, by the `shard_map`s around it."""

    maps: tuple[_Map, ...] = ()  # the outermost first

    def inside(self, eqn: JaxprEqn) -> "Devices":
        """The devices of the program in a `shard_map` that runs on these devices."""
        inner = _Map(eqn.params["mesh"], tuple(mapped_axes(eqn)))
        return Devices((*self.maps, inner))

    def over(self, function: Callable) -> Callable:
        """A function of one device's arrays, as one of their stacks over all maps."""
        for shard_map in reversed(self.maps):
            function = shard_map.stacked(function)
        return function

    def entered(self, value: Value, spec: jax.P) -> Value:
        """An operand of the innermost `shard_map`, as the stack of what each device gets."""
        return value.each(_on_each(self, _as_stack, spec, self.maps[-1].of_stack))

    def exited(self, value: Value, spec: jax.P) -> Value:
        """A result of the innermost `shard_map`, from its stack; undoes `entered`."""
        return value.each(_on_each(self, _alone, self.maps[-1].of_stack, spec))

    def everywhere(self, x: Array) -> Array:
        """An array that is the same on each device, as the stacked arrays of all."""
        if not self.maps:
            return x
        sizes = [shard_map.size for shard_map in self.maps]
        return jnp.broadcast_to(x, (*sizes, *x.shape))


@functools.cache
def _on_each(
    devices: Devices, function: Callable, in_spec: jax.P, out_spec: jax.P
) -> Callable:
    """Applies a function on each device of the innermost `shard_map`."""
    *outer, inner = devices.maps
    mapped = inner.apply(function, in_spec, out_spec)
    return jax.jit(Devices(tuple(outer)).over(mapped))


def _as_stack(x: jax.Array) -> jax.Array:
    """An array of one device as a stack of one."""
    return x[None]


def _alone(x: jax.Array) -> jax.Array:
    """The array of one device from a stack of one."""
    return x[0]
