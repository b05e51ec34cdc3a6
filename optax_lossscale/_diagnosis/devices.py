"""The inside of a `shard_map`, with the arrays of all devices stacked in one.

Python runs the program in a `shard_map` piece by piece, so the values between two
pieces have to exist outside of it. There, an array of shape (3,) on each of 4 devices
is one of shape (4, 3), whose first axis is divided among the devices. `enter` and
`leave` convert the operands and results of the `shard_map` to and from that form, and
`over` runs a piece.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._programs.versions import mapped_axes


class Devices(NamedTuple):
    """The devices that a `shard_map` maps over."""

    mesh: Any
    axes: tuple[Any, ...]

    @classmethod
    def of(cls, eqn: Any) -> "Devices":
        """The devices of a `shard_map`."""
        return cls(eqn.params["mesh"], tuple(mapped_axes(eqn)))

    def over(self, function: Callable) -> Callable:
        """A function for one device's arrays, as one for the stacked arrays of all."""

        def of_one(*args):
            results = function(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: jnp.expand_dims(x, 0), results)

        each = jax.P(self.axes)
        return self._mapped(of_one, each, each)

    def enter(self, x: Any, spec: Any) -> Any:
        """Stacks the parts of an array that the devices have by its `spec`."""
        each = jax.P(self.axes)
        return self._mapped(lambda x: jnp.expand_dims(x, 0), spec, each)(x)

    def leave(self, x: Any, spec: Any) -> Any:
        """The array whose parts by its `spec` are stacked; undoes `enter`."""
        each = jax.P(self.axes)
        return self._mapped(lambda x: x[0], each, spec)(x)

    def repeated(self, x: np.ndarray) -> np.ndarray:
        """Stacks an array that is the same on all devices."""
        count = math.prod(self.mesh.shape[axis] for axis in self.axes)
        return np.broadcast_to(x, (count, *x.shape))

    def _mapped(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
