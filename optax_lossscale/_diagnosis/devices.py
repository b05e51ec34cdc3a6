"""What a `shard_map` gives to each of its devices, all at once: the first axis is theirs."""

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
        """Those of a `shard_map`."""
        return cls(eqn.params["mesh"], tuple(mapped_axes(eqn)))

    def over(self, function: Callable) -> Callable:
        """A function of what one device has, for all of them."""

        def of_one(*args):
            results = function(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: jnp.expand_dims(x, 0), results)

        each = jax.P(self.axes)
        return self._mapped(of_one, each, each)

    def enter(self, x: Any, spec: Any) -> Any:
        """What each of them has of an array."""
        each = jax.P(self.axes)
        return self._mapped(lambda x: jnp.expand_dims(x, 0), spec, each)(x)

    def leave(self, x: Any, spec: Any) -> Any:
        """The array of which each of them has a part."""
        each = jax.P(self.axes)
        return self._mapped(lambda x: x[0], each, spec)(x)

    def repeated(self, x: np.ndarray) -> np.ndarray:
        """What is the same for each of them."""
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
