"""Checks of a loss function and of the loss that it returns.

A loss function returns the loss, a real scalar, or with `has_aux=True` a pair
`(loss, aux)`. This file reports the usual mistakes: a loss that is still an array, a
pair without `has_aux`, a float16 loss, or a keyword that never reaches the loss
function. JAX reports some of these mistakes in terms of its own, and others not at all.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays.messages import shown, warn
from optax_lossscale._arrays.validation import is_real
from optax_lossscale._scales.loss_scale import LossScale

# The largest float16 number is 65504. The next one would be 65536, and halfway between
# the two, at 65520, numbers begin to round to infinity.
_INFINITE_IN_FLOAT16 = 65520


def loss_of(returned: Any, has_aux: bool) -> Any:
    """Returns the loss from what a loss function returned, `loss` or `(loss, aux)`."""
    if not has_aux:
        return returned
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            "with has_aux=True the function must return a pair (loss, aux), got a "
            f"{type(returned).__name__}"
        )
    return returned[0]


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


def check_keywords(
    fun: Callable[..., Any], reserved: Sequence[str], args: tuple
) -> None:
    """Raises a `TypeError` if a parameter of `fun` has a reserved name.

    The `reserved` names are keywords that the caller of `fun`, such as `minimize`,
    consumes: `minimize(loss_fn, …, has_aux=True)` never passes `has_aux` to `loss_fn`.
    If `loss_fn` has a parameter of that name, the user may have meant that parameter,
    which would silently keep its default.

    No error is raised if the parameter already has a value: from `args`, the positional
    arguments that `fun` will be called with, or from a `functools.partial`. Nor is one
    raised for a `*` or `**` parameter such as `**extra_args`, which only collects other
    arguments.
    """
    try:
        signature = inspect.signature(fun)
        bound = set(signature.bind_partial(*args).arguments)
    except (TypeError, ValueError):  # no signature, or args do not fit: the call fails
        return
    bound.update(getattr(inspect.unwrap(fun), "keywords", {}))  # of a functools.partial
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {n for n, p in signature.parameters.items() if p.kind not in variadic}
    for name in reserved:
        if name in named - bound:
            raise TypeError(
                f"{name} is an argument of this call, so it would not reach the "
                "function's own argument of that name. Bind the latter: "
                f"functools.partial(function, {name}=…)"
            )
