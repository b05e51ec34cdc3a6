"""Checks of a loss function and of the loss that it returns.

A loss function returns the loss, a real scalar, or with `has_aux=True` a pair
`(loss, aux)`. This file reports the usual mistakes: a loss that is still an array, a
pair without `has_aux`, or a float16 loss.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.checks import shown, warn
from optax_lossscale._arrays.precision import dtype_of, is_array_leaf
from optax_lossscale._scales.loss_scale import LossScale

# The largest float16 number is 65504. The next one would be 65536, and halfway between
# the two, at 65520, numbers begin to round to infinity.
_INFINITE_IN_FLOAT16 = 65520


def loss_of(returned: Any, has_aux: bool) -> Any:
    """Returns the loss from what a loss function returned, `loss` or `(loss, aux)`."""
    if not has_aux:
        return returned
    if not (isinstance(returned, tuple) and len(returned) == 2):
        what = "an array" if is_array_leaf(returned) else f"a {type(returned).__name__}"
        raise TypeError(
            f"with has_aux=True the function must return a pair (loss, aux), got {what}"
        )
    return returned[0]


def is_real(x: Any) -> bool:
    """Whether `x` is a real number or an array of them; bools do not count."""
    if not is_array_leaf(x):
        return False
    dtype = dtype_of(x)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return is_integer or jnp.issubdtype(dtype, jnp.floating)


def check_scalar(name: str, x: Any) -> None:
    """Raises a `TypeError` unless `x` is a real number of shape ()."""
    if not is_real(x):
        remedy = ""
        if isinstance(x, (tuple, list, dict)):
            remedy = (
                ". Instead of a pair (loss, aux), or of several losses in a dict, pass "
                "the loss alone. If a function returns the pair, set has_aux=True"
            )
        raise TypeError(f"{name} must be a real number, got {shown(x)}{remedy}")
    shape = np.shape(x)
    if shape:
        raise TypeError(
            f"{name} must be a scalar, got shape {shape}; reduce it, for example with "
            "jnp.mean"
        )


def warn_of_float16(loss: Any, loss_scale: LossScale) -> None:
    """Warns if the loss is float16, and the loss scale may be infinite in float16."""
    is_float16 = getattr(loss, "dtype", None) == jnp.float16
    if is_float16 and loss_scale._upper_bound() >= _INFINITE_IN_FLOAT16:
        warn(
            f"the loss is float16, where a loss scale of {_INFINITE_IN_FLOAT16} or "
            "more is infinite. Compute the loss in float32: "
            "jnp.mean((prediction - target).astype(jnp.float32) ** 2)"
        )
