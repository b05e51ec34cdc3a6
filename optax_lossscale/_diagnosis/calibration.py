"""The initial scale that a model needs, found before training starts."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._arrays.finite import all_finite
from optax_lossscale._arrays.names import scale_name
from optax_lossscale._scales import validation
from optax_lossscale._step.gradient import loss_of, scale_gradient
from optax_lossscale._step.inputs import refuse_other_leaves

_LOWEST, _HIGHEST = -126, 126  # the powers of two to search


class InitialScale(NamedTuple):
    """What `find_initial_scale` found.

    Attributes:
      scale: the scale to start with.
      largest: the largest power of two at which no gradient overflowed.
    """

    scale: float
    largest: float

    @property
    def headroom(self) -> float:
        """How many bits the scale is below the largest."""
        return math.log2(self.largest / self.scale)

    def __str__(self) -> str:
        scale = scale_name(self.scale)
        if self.largest == 2.0**_HIGHEST:
            return f"{scale}: nothing overflows up to 2**{_HIGHEST}; is float16 in use?"
        return f"{scale}, with {self.headroom:.0f} bits to spare before gradients overflow"


def find_initial_scale(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    margin: int = 2,
    others: Iterable[tuple] = (),
    **kwargs: Any,
) -> InitialScale:
    """Searches for the largest power of two at which no gradient overflows.

    From a start too large, the first steps are skipped; from one too small, gradients
    underflow for thousands of steps until it has grown. This is one compiled bisection, of
    eight passes over the gradients; call it before training, on the host, with a `loss_fn`
    that names no axis of `pmap` or `shard_map`.

    Args:
      loss_fn: called as `loss_fn(params, *args, **kwargs)`, as by `value_and_grad`.
      params: the initial parameters.
      *args: the first batch. Arrays; bind what else there is with `functools.partial`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      margin: how many bits to stay below the largest, at least 1: gradients grow.
      others: the `args` of further batches, of the same shapes, at none of which gradients
        overflow either. All share one compilation.
      **kwargs: further keyword arguments of `loss_fn`, arrays.

    Returns:
      An `InitialScale`, with the `scale` to give a loss scale as its `initial_scale`; one
      below 1 needs a `min_scale` as low.

    Raises:
      ValueError: if gradients are not finite at any scale, or `margin` is not a
        positive int.
      TypeError: if the loss is not a real floating-point scalar, or an argument not what is
        said above.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(w, x):
      ...     y = (w * x).astype(jnp.float16) ** 2
      ...     return jnp.mean(y.astype(jnp.float32))
      >>> found = ols.find_initial_scale(loss_fn, jnp.float32(1.0), jnp.ones(256))
      >>> print(found)
      2**20, with 2 bits to spare before gradients overflow
      >>> ls = ols.DynamicLossScale(initial_scale=found.scale)
    """
    margin = validation.count("margin", margin)
    validation.function("loss_fn", loss_fn)
    batches = [args, *others]
    if not all(isinstance(batch, (tuple, list)) for batch in batches):
        raise TypeError("others must hold tuples, of the args of one further batch each")
    refuse_other_leaves("params", params)
    refuse_other_leaves("what loss_fn takes", (batches, kwargs))
    validation.at_hand("find_initial_scale", (params, batches, kwargs))
    search = jax.jit(functools.partial(_search, loss_fn, has_aux))
    exponent = min(int(search(params, batch, kwargs)) for batch in batches)
    if exponent < _LOWEST:
        raise ValueError(
            f"gradients are not finite at any loss scale from 2**{_LOWEST} on: look for NaN or "
            "inf in the loss and the model; explain(nonfinite_leaves(grads)) says where"
        )
    return InitialScale(2.0 ** max(exponent - margin, _LOWEST), 2.0**exponent)


def _search(loss_fn, has_aux, params, args, kwargs):
    """The exponent of the largest scale; one less than the lowest if there is none."""

    def is_finite(exponent):
        loss_scale = jnp.ldexp(jnp.float32(1), exponent)

        def scaled_fn(params):  # not value_and_grad, which refuses modules
            value = loss_fn(params, *args, **kwargs)
            return scale_gradient(loss_of(value, has_aux), loss_scale)

        return all_finite(jax.grad(scaled_fn, allow_int=True)(params))

    def bisect(bounds):
        good, bad = bounds
        middle = (good + bad) // 2
        finite = is_finite(middle)
        return jnp.where(finite, middle, good), jnp.where(finite, bad, middle)

    bounds = (jnp.int32(_LOWEST - 1), jnp.int32(_HIGHEST + 1))
    good, _ = lax.while_loop(lambda bounds: bounds[1] - bounds[0] > 1, bisect, bounds)
    return good
