"""The abstract loss scale, and how scaling the loss keeps gradients from underflowing.

Float16 has few exponents: its positive numbers lie between 2**-24 and 65504. Many
gradients are smaller than that, and become zero where they are computed in float16. But
by the chain rule, the gradients of a loss that is multiplied by a number are multiplied
by it, too. So the loss is multiplied by a *loss scale* before it is differentiated
(`LossScale.scale`), which moves the gradients into float16's range; and the gradients
are divided by the same number in float32, where small numbers do fit, before the
optimizer sees them (`LossScale.unscale`).

The larger the scale, the fewer gradients underflow; but at some scale the largest
gradients overflow to infinity. Such a step is skipped, and the scale is lowered. A loss
scale is the number together with the rule that adapts it. `update` is the part of a
step that decides: it checks the unscaled gradients and returns the next loss scale, and
whether to apply the step. By default it asks `adjust`, which each subclass defines, and
which is given the result of the check alone. A loss scale that measures gradients
overrides `update`, too.
"""

import abc
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.finite import AxisName, all_finite, on_all_replicas
from optax_lossscale._arrays.precision import T, map_inexact
from optax_lossscale._arrays.stateful import Stateful, checked, state_field


class LossScale(Stateful):
    """A number that the loss is multiplied by, and the rule by which it adapts.

    A loss scale is immutable: `update` and `adjust` return a new one. To write your
    own, subclass this class, which makes it a frozen dataclass and a pytree, and define
    `adjust`. Its fields are configuration: hashable arguments of the constructor,
    static under `jit`, written by `get_config`. Those declared with `state_field` are
    state: array leaves, changed by `replace`. A `__post_init__` has to call
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
    _state_checks: ClassVar = {"loss_scale": validation.scale}
    initial_scale: float = checked(validation.scale, default=2.0**15)
    loss_scale: jax.Array = state_field()

    def __post_init__(self):
        super().__post_init__()
        self._set(loss_scale=np.float32(self.initial_scale))

    def __call__(self) -> jax.Array:
        """The current loss scale as a JAX array, float32, shape ().

        The field `loss_scale` is a NumPy number until the first step.
        """
        return jnp.asarray(self.loss_scale, jnp.float32)

    @abc.abstractmethod
    def adjust(self, grads_finite: ArrayLike) -> Self:
        """The loss scale after one step, from the flag alone.

        Args:
          grads_finite: whether the step's gradients were finite; bool, shape ().

        Returns:
          The new loss scale, with the structure, shapes and dtypes of this one.
        """

    def update(
        self, grads: Any, axis_name: AxisName | None = None
    ) -> tuple[Self, jax.Array | bool]:
        """Checks the gradients and adapts the scale.

        Args:
          grads: the unscaled gradients, any pytree; `None` leaves are ignored. With a
            `mask`, `with_loss_scale` passes a flat list of gradients, with None for
            each that the mask excludes.
          axis_name: under `pmap` or `shard_map`, the axis or axes over which all
            replicas decide together, at the cost of communicating one scalar.

        Returns:
          The new loss scale, and `should_apply`: a bool array of shape (), or Python's
          True if nothing was checked.

        Raises:
          ValueError: if `axis_name` names no axis of an enclosing `pmap` or
            `shard_map`.
        """
        finite = on_all_replicas(all_finite(grads), axis_name)
        return self.adjust(finite), finite

    def exhausted(self) -> jax.Array:
        """Whether gradients overflowed at a scale that could not fall.

        It tells of the last step that the scale adapted to: a step that is skipped for
        its loss, or by a skip rule, does not change the answer. `raise_if_stuck` raises
        if it is True.

        Returns:
          A bool, shape (); always False unless a subclass overrides this.
        """
        # `DynamicLossScale` and `ToleranceLossScale` keep this flag in their state.
        exhausted = getattr(self, "_exhausted", False)
        return jnp.asarray(exhausted)

    def scale(self, tree: T) -> T:
        """Multiplies a loss, or the leaves of any pytree, by the scale.

        Args:
          tree: the loss, or any pytree.

        Returns:
          The tree with its floating-point and complex leaves times the scale. Floats of
          16 bits or fewer become float32, as they may not hold the product; wider ones
          keep their dtype. All other leaves are returned as they are.
        """
        scale = self()
        return map_inexact(lambda x: x * scale.astype(x.dtype), tree)

    def unscale(self, tree: T) -> T:
        """Divides gradients, or the leaves of any pytree, by the scale.

        Args:
          tree: the scaled gradients, or any pytree.

        Returns:
          The tree with its floating-point and complex leaves divided by the scale, in
          the dtypes that `scale` returns. The quotients are exact if the scale is a
          power of two, and otherwise within an ulp or two; but subnormal ones may
          become 0.
        """
        # All leaves of a dtype share the factors, as tracing takes time.
        factors_in = functools.cache(self._inverse_factors)

        def unscaled(x):
            real_dtype = jnp.finfo(x.dtype).dtype
            first, second = factors_in(real_dtype)
            # Strict promotion multiplies no complex number by a real one: hence the
            # casts, which change nothing else.
            return x * first.astype(x.dtype) * second.astype(x.dtype)

        return map_inexact(unscaled, tree)

    def _inverse_factors(self, dtype: np.dtype) -> tuple[jax.Array, ...]:
        """Two factors of a real dtype, whose product is `1 / scale`.

        `unscale` multiplies by one after the other, as XLA compiles `x / scale` to
        `x * (1 / scale)`, and above 2**126 that reciprocal is subnormal and flushed to
        zero. A barrier keeps XLA from multiplying the two factors.
        """
        scale = lax.optimization_barrier(self)()
        is_huge = scale > 2.0**126
        shift = jnp.where(is_huge, 4.0, 1.0).astype(dtype)
        # XLA computes a division once, and repeats a cheaper operation in the kernel of
        # each leaf: hence `1 / shift`.
        factors = (1 / shift, shift / scale.astype(dtype))
        if not jax.tree.leaves(self):
            return factors  # constants, as a fixed scale has no state
        return lax.platform_dependent(
            *factors, cpu=_in_one_array, default=lambda *factors: factors
        )


def checks_gradients(update: T) -> T:
    """Marks an `update` that checks all gradients, which a step then need not do.

    The mark is on the function, not on the class, so a subclass that overrides `update`
    loses it.
    """
    vars(update)["checks_gradients"] = True
    return update


def _in_one_array(*scalars: jax.Array) -> tuple[jax.Array, ...]:
    """The same scalars, read from one array behind a barrier.

    A CPU's kernels compile faster with fewer arguments. On GPU it would be a loss: the
    compiler would merge the kernels of several leaves, which take longer to compile.
    """
    return tuple(lax.optimization_barrier(jnp.stack(scalars)))
