"""The abstract loss scale: what all loss scales have in common."""

import abc
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.finite import (
    AxisName,
    across,
    all_finite,
    largest,
    on_all_replicas,
)
from optax_lossscale._arrays.precision import T, map_inexact
from optax_lossscale._arrays.stateful import Stateful, checked, state_field


class LossScale(Stateful):
    """A number that the loss is multiplied by, and the rule by which it adapts.

    A loss scale is immutable: `update` and `adjust` return a new one. To write your
    own, subclass this class and define `adjust`: that alone makes it a frozen dataclass
    and a pytree. Its fields are configuration: arguments of the constructor, static
    under `jit`, written by `get_config`. Those declared with `state_field` are state:
    array leaves, changed by `replace`. A `__post_init__` has to call
    `super().__post_init__()`. The scale that `adjust` returns should be finite and
    positive after any sequence of steps.

    Attributes:
      initial_scale: the loss scale before the first step; configuration.
      loss_scale: the loss scale now; float32, shape (); state.

    Raises:
      ValueError: if `initial_scale` is not a positive, normal float32.

    Example:
      A scale that halves at an overflow and creeps up otherwise:

      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> class Creeping(ols.LossScale):
      ...     rate: float = 1.01
      ...
      ...     def adjust(self, grads_finite):
      ...         factor = jnp.where(grads_finite, self.rate, 0.5)
      ...         return self.replace(loss_scale=self.loss_scale * factor)
      >>> ls = Creeping(initial_scale=1000.0)
      >>> ls, should_apply = ls.update({"w": jnp.array([jnp.inf])})
      >>> print(ls(), should_apply)
      500.0 False
    """

    _kind = "loss scale"
    initial_scale: float = checked(validation.scale, default=2.0**15)
    loss_scale: jax.Array = state_field()

    def __post_init__(self):
        super().__post_init__()
        self._set(loss_scale=np.float32(self.initial_scale))

    def __call__(self) -> jax.Array:
        """The current loss scale: float32, shape ()."""
        return jnp.asarray(self.loss_scale, jnp.float32)

    @abc.abstractmethod
    def adjust(self, grads_finite: ArrayLike) -> Self:
        """The loss scale after one step, from the flag alone.

        Args:
          grads_finite: whether the step's gradients were finite; bool, shape ().

        Returns:
          The new loss scale, with the structure and dtypes of this one.
        """

    def update(
        self, grads: Any, axis_name: AxisName | None = None
    ) -> tuple[Self, jax.Array | bool]:
        """Checks the gradients and adapts the scale.

        Args:
          grads: the unscaled gradients, any pytree; `None` leaves are ignored. If a
            `mask` excludes some, the step passes a list of the rest.
          axis_name: under `pmap` or `shard_map`, the axis or axes over which all
            replicas decide together, at the cost of communicating one scalar.

        Returns:
          The new loss scale, and `should_apply`, a bool, shape (); Python's True if
          unchecked.

        Raises:
          ValueError: if `axis_name` names no axis of an enclosing `pmap` or
            `shard_map`.
        """
        finite = on_all_replicas(all_finite(grads), axis_name)
        return self.adjust(finite), finite

    def exhausted(self) -> jax.Array:
        """Whether the last step overflowed at a scale that could not fall; a bool, shape ()."""
        return jnp.array(False)

    def scale(self, tree: T) -> T:
        """A loss, or any pytree, with floating-point and complex leaves times the scale.

        8- and 16-bit floats become float32; all other leaves keep their dtype, and
        `None`, integer and float0 leaves their values.
        """
        scale = self()

        def scaled(x):
            dtype = jnp.finfo(x.dtype).dtype  # that of the parts of complex numbers
            return x * scale.astype(dtype)

        return map_inexact(scaled, tree)

    def unscale(self, tree: T) -> T:
        """Gradients, or any pytree, with floating-point and complex leaves divided by the scale.

        Dtypes are those of `scale()`; exact for a power of two, else within an ulp or
        two.
        """
        # XLA turns x / scale into x * (1 / scale), and above 2**126 the latter factor
        # is subnormal and flushed to zero. Hence two factors, a barrier that keeps XLA
        # from multiplying them, and quotients for both: anything simpler XLA would
        # recompute in the kernel of each leaf.
        scale = lax.optimization_barrier(self)()
        is_huge = scale > 2.0**100
        shift = jnp.where(is_huge, 4.0, 1.0).astype(jnp.float32)

        @functools.cache  # as tracing takes time
        def factors(dtype):
            wide_shift = shift.astype(dtype)
            pair = (1 / wide_shift, wide_shift / scale.astype(dtype))
            if not jax.tree.leaves(self):
                return pair  # of constants
            return lax.platform_dependent(
                *pair, cpu=_in_one_array, default=lambda *pair: pair
            )

        def unscaled(x):
            inverse_shift, shifted_inverse = factors(jnp.finfo(x.dtype).dtype)
            return x * inverse_shift * shifted_inverse

        return map_inexact(unscaled, tree)


def _in_one_array(*scalars: jax.Array) -> tuple[jax.Array, ...]:
    """The same scalars, read from one array: a CPU's kernels compile faster with fewer arguments.

    A GPU's compiler would then merge kernels of several leaves, and compile those for
    longer.
    """
    return tuple(lax.optimization_barrier(jnp.stack(scalars)))


def choose(flag: ArrayLike, if_true: T, if_false: T) -> T:
    """The one loss scale or the other, leaf by leaf."""
    return jax.tree.map(functools.partial(jnp.where, flag), if_true, if_false)


def largest_of_all(grads: Any, axis_name: AxisName | None) -> jax.Array:
    """The largest absolute gradient of all replicas; infinity if any gradient is not finite."""
    return across(lax.pmax, largest(grads), axis_name)
