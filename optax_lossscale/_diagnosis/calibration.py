"""The initial scale that a model needs, found before training starts."""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lossscale._arrays.finite import all_finite
from optax_lossscale._arrays.names import scale_name
from optax_lossscale._diagnosis.program import gradients
from optax_lossscale._scales import validation
from optax_lossscale._step.gradient import refuse_shared_names
from optax_lossscale._step.inputs import refuse_other_leaves

LOWEST, HIGHEST = -126, 126  # the powers of two to search
MARGIN = 2
NEAR = 15  # where to begin: most searches end within a few bits of it


class InitialScale(NamedTuple):
    """The result of `find_initial_scale`.

    Attributes:
      scale: the scale to start with.
      largest: the largest power of two at which no gradient overflowed.
    """

    scale: float
    largest: float

    @property
    def spare_bits(self) -> float:
        """By how many bits the scale is below the largest."""
        return math.log2(self.largest / self.scale)

    def __str__(self) -> str:
        scale = scale_name(self.scale)
        if self.largest == 2.0**HIGHEST:
            return f"{scale}: nothing overflows up to 2**{HIGHEST}; is float16 in use?"
        return f"{scale}, with {self.spare_bits:.0f} bits to spare before gradients overflow"


def find_initial_scale(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    margin: int = MARGIN,
    others: Iterable[tuple] = (),
    **kwargs: Any,
) -> InitialScale:
    """Searches for the largest power of two at which no gradient overflows.

    The search takes ten or so passes of one compiled program; run it before training, on the host,
    with a `loss_fn` that names no axis of `pmap` or `shard_map`.

    Args:
      loss_fn: called as `loss_fn(params, *args, **kwargs)`, as by `value_and_scaled_grad`.
      params: the initial parameters.
      *args: the first batch, of arrays; bind anything else with `functools.partial`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      margin: how many bits to stay below the largest, at least 1, as gradients may grow; fewer,
        if gradients are not finite that far below.
      others: the `args` of further batches of the same shapes, which must all be finite too.
      **kwargs: further keyword arguments of `loss_fn`, arrays.

    Returns:
      An `InitialScale`. Use its `scale` as `initial_scale`; if below 1, lower `min_scale` too.

    Raises:
      ValueError: if the loss is not finite, gradients are finite at no scale, or `margin` < 1.
      TypeError: if the loss is not a real floating-point scalar, or an argument has a wrong type.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(w, x):
      ...     y = (w * x).astype(jnp.float16) ** 2
      ...     return jnp.mean(y.astype(jnp.float32))
      >>> found = ols.diagnosis.find_initial_scale(loss_fn, jnp.float32(1.0), jnp.ones(256))
      >>> print(found)
      2**20, with 2 bits to spare before gradients overflow
      >>> ls = ols.DynamicLossScale(initial_scale=found.scale)
    """
    margin = validation.count("margin", margin)
    validation.function("loss_fn", loss_fn)
    batches = [args, *others]
    if not all(isinstance(batch, (tuple, list)) for batch in batches):
        raise TypeError("others must hold tuples, each with the args of one further batch")
    refuse_shared_names(loss_fn, ["has_aux", "margin", "others"], (params, *args))
    refuse_other_leaves("params", params)
    refuse_other_leaves("what loss_fn takes", (batches, kwargs))
    validation.at_hand("find_initial_scale", (params, batches, kwargs))

    @jax.jit
    def evaluated(exponent, params, args, kwargs):
        evidence = gradients(loss_fn, has_aux, exponent, params, None, args, kwargs)
        return evidence.loss, all_finite(evidence.grads)

    @functools.cache
    def is_finite(exponent: int) -> bool:
        of_all = [evaluated(jnp.int32(exponent), params, batch, kwargs) for batch in batches]
        if bad := [loss for loss, _ in of_all if not jnp.isfinite(loss)]:
            raise ValueError(
                f"the loss is {bad[0]}, and no loss scale can change that, as it multiplies only "
                "the gradients: look for NaN or inf in the loss and the model; "
                "explain(nonfinite_leaves(grads), taps=…, loss=loss) says where"
            )
        return all(bool(finite) for _, finite in of_all)

    if found := search(is_finite, margin):
        return found
    raise ValueError(
        f"gradients are not finite at any loss scale from 2**{LOWEST} to 2**{HIGHEST}: look "
        "for NaN or inf in the loss and the model; explain(nonfinite_leaves(grads)) says where"
    )


def search(
    is_finite: Callable[[int], bool], margin: int = MARGIN, near: int = NEAR
) -> InitialScale | None:
    """The scale some bits below the largest at which gradients are finite, if there is one."""
    near = min(max(near, LOWEST), HIGHEST)
    # If not near, then anywhere below or above, at ever smaller distances.
    grids = (range(HIGHEST, LOWEST - 1, -distance) for distance in (64, 32, 16, 8, 4, 2, 1))
    good = next(filter(is_finite, itertools.chain([near], *grids)), None)
    if good is None:
        return None
    above = range(good + 1, near if good < near else HIGHEST + 1)
    largest = good + bisect.bisect_left(above, True, key=lambda e: not is_finite(e))
    below = range(max(largest - margin, LOWEST), largest + 1)
    return InitialScale(2.0 ** next(filter(is_finite, below)), 2.0**largest)
