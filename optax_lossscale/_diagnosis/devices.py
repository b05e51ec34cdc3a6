"""The inside of a `shard_map`, with the arrays of all devices stacked in one.

Python runs the program in a `shard_map` piece by piece, so the values between two
pieces have to exist outside of it. There, an array of shape (3,) on each of 4 devices
is one of shape (4, 3), whose first axis is divided among the devices. `entered` and
`left` convert operands and results of the `shard_map` to and from that form, and `over`
runs a piece.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from optax_lossscale._diagnosis.loops import Value


class Devices(NamedTuple):
    """The devices that a `shard_map` maps over."""

    mesh: jax.sharding.Mesh
    axes: tuple[str, ...]

    def over(self, function: Callable) -> Callable:
        """A function for one device's arrays, as one for the stacked arrays of all."""

        def of_one(*args):
            results = function(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: x[None], results)

        each = jax.P(self.axes)
        return self._mapped(of_one, each, each)

    def entered(self, value: Value, spec: jax.P) -> Value:
        """An operand of the `shard_map`: stacks the parts that the devices have."""
        return value.each(self._mapped(lambda x: x[None], spec, jax.P(self.axes)))

    def left(self, value: Value, spec: jax.P) -> Value:
        """A result of the `shard_map`, from the stacked parts; undoes `entered`."""
        return value.each(self._mapped(lambda x: x[0], jax.P(self.axes), spec))

    def _mapped(
        self, function: Callable, in_specs: jax.P, out_specs: jax.P
    ) -> Callable:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
