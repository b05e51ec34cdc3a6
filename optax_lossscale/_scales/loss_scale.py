"""The abstract loss scale: why the loss is scaled, and how the scale adapts.

The positive numbers of float16 range from 2**-24 to 65504. Gradients of 2**-25 or less,
half of the smallest of these, are rounded to zero. By the chain rule, multiplying the
loss by a number also multiplies every gradient by that number. A training step makes
use of this:

1. It multiplies the loss by a *loss scale* before differentiating it
   (`LossScale.scale`), which moves small gradients into float16's range.
2. It converts the gradients to float32, where small numbers fit, and divides them by
   the loss scale (`LossScale.unscale`).

For example, a gradient of 2**-30 is zero in float16. With a loss scale of 2**15, the
backward pass computes 2**-15, and dividing that by 2**15 in float32 recovers 2**-30.

The larger the scale, the fewer gradients underflow, but beyond some scale the largest
ones overflow to infinity. The step is then skipped, and the scale lowered. A
`LossScale` is therefore a number together with the rule that adapts it. Without
`with_loss_scale`, a step begins like this::

    scaled_grads = jax.grad(lambda params: loss_scale.scale(loss_fn(params)))(params)
    grads = loss_scale.unscale(scaled_grads)
    loss_scale, should_apply = loss_scale.update(grads)

`update` reduces its check of the gradients to one flag and passes that to `adjust`,
which each subclass defines. A loss scale that measures the gradients overrides `update`
as well.
"""

import abc
import functools
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.finite import all_finite
from optax_lossscale._arrays.precision import T, map_inexact
from optax_lossscale._arrays.replicas import AxisName, on_all_replicas
from optax_lossscale._arrays.stateful import Stateful, state_field

SMALLEST_SCALE = 2.0**-60
LARGEST_SCALE = 2.0**60
"""Every scale lies between these, so that a step can use it.

Neither its reciprocal nor the square of that leaves float32's normal numbers.
"""


class LossScale(Stateful):
    """A number that multiplies the loss, and the rule that adapts it to the gradients.

    To write a rule of your own, subclass this class and define `adjust`. Subclassing
    alone makes your class a frozen dataclass and a pytree. Its fields are of two kinds:

    - *Configuration*: hashable arguments of the constructor, which are static under
      `jit` and saved by `get_config`. Any plain field is configuration.
    - *State*: array leaves, which `replace` changes. Declare these fields with
      `state_field`.

    A loss scale is immutable: `update` and `adjust` return a new one. If you define
    `__post_init__`, call `super().__post_init__()` in it. A scale beyond 2**-60 or
    2**60 is brought back to that bound after each step, and a NaN to the old scale.

    Args:
      initial_scale: the loss scale before the first step, from 2**-60 to 2**60.

    Attributes:
      loss_scale: the current loss scale; float32, shape ().

    Raises:
      ValueError: if `initial_scale` is not a number in this range.

    Example:
      A scale that halves on overflow and grows by 1% on any other step:

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
    initial_scale: float = 2.0**15
    loss_scale: jax.Array = state_field()

    def __post_init__(self):
        super().__post_init__()
        self._check("initial_scale", checks.number, SMALLEST_SCALE, LARGEST_SCALE)
        self._set(loss_scale=np.float32(self.initial_scale))

    def __call__(self) -> jax.Array:
        """Returns the current loss scale as a JAX array, float32, shape ().

        Prefer this call to the field `loss_scale`, which is a NumPy number in a loss
        scale that you have just made and in every `FixedLossScale`.
        """
        return jnp.asarray(self.loss_scale, jnp.float32)

    def replace(self, **state: ArrayLike) -> Self:
        scale = state.get("loss_scale")
        if isinstance(scale, int | float):  # The host cannot read an array.
            checks.number("loss_scale", scale, SMALLEST_SCALE, LARGEST_SCALE)
        return super().replace(**state)

    @abc.abstractmethod
    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Adapts the scale to one step, given only whether its gradients are finite.

        In a compiled step, `grads_finite` is traced, so compute the scale for both
        cases and select with `jnp.where`.

        Args:
          grads_finite: whether the step's gradients were finite; bool, shape ().

        Returns:
          The new loss scale, with the same structure, shapes and dtypes as this one, as
          `self.replace(…)` returns it.
        """

    def update(
        self, grads: Any, axis_name: AxisName | None = None
    ) -> tuple[Self, jax.Array | bool]:
        """Checks the gradients and adapts the scale.

        Args:
          grads: the unscaled gradients, any pytree; `None` leaves are ignored. If
            `with_loss_scale` has a `mask`, it passes a flat list of gradients, with
            None in place of each gradient that the mask excludes.
          axis_name: under `pmap` or `shard_map`, the axis or axes over which all
            replicas decide together, at the cost of communicating one scalar. Without
            it, one replica might skip a step that others apply, and their parameters
            would diverge.

        Returns:
          The new loss scale, and `should_apply`: a bool array of shape (), or Python's
          `True` if nothing was checked.

        Raises:
          ValueError: if `axis_name` names no axis of an enclosing `pmap` or
            `shard_map`.
        """
        finite = on_all_replicas(all_finite(grads), axis_name)
        return self._succeeded_by(self.adjust(finite), "adjust"), finite

    def exhausted(self) -> jax.Array:
        """Whether gradients overflowed at a scale that could not be lowered.

        If so, the rule has no remedy left, and `raise_if_stuck` raises an error. The
        result is about the last step that the scale adapted to. A step that is skipped
        because of its loss, or by a skip rule, does not change the result.

        Returns:
          A bool, shape (). The base class always returns False.
        """
        return jnp.asarray(False)

    def scale(self, tree: T) -> T:
        """Multiplies a loss, or the leaves of any pytree, by the scale.

        Args:
          tree: the loss, or any pytree.

        Returns:
          The tree with its floating-point and complex leaves multiplied by the scale.
          Floats of 16 bits or fewer become float32, because the product may be outside
          their range. Wider ones keep their dtype. All other leaves are unchanged.
        """
        scale = self()
        return map_inexact(lambda x: x * scale.astype(x.dtype), tree)

    def unscale(self, tree: T) -> T:
        """Divides gradients, or the leaves of any pytree, by the scale.

        Args:
          tree: the scaled gradients, or any pytree.

        Returns:
          The tree with its floating-point and complex leaves divided by the scale, in
          the dtypes that `scale` returns. Quotients below the normal numbers of their
          dtype may become 0, and those above become infinite. All others are exact if
          the scale is a power of two, and within two ulps otherwise.
        """

        @functools.cache
        def reciprocal(dtype):
            return 1 / self().astype(dtype)

        def unscale_leaf(x):
            # The cast matters for complex leaves alone.
            return x * reciprocal(jnp.finfo(x.dtype).dtype).astype(x.dtype)

        return map_inexact(unscale_leaf, tree)

    def _upper_bound(self) -> float:
        """Returns a number that the scale never exceeds; infinity if none is known."""
        return math.inf

    def _succeeded_by(self, new: Self, method: str) -> Self:
        """Returns what `method` has returned, checked, with a scale within the bounds.

        A scale that is NaN would stay NaN, so the old one is kept.
        """
        checks.check_successor(new, self, method)
        scale = jnp.where(jnp.isnan(new.loss_scale), self.loss_scale, new.loss_scale)
        return new.replace(loss_scale=jnp.clip(scale, SMALLEST_SCALE, LARGEST_SCALE))
