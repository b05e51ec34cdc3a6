"""`autocast`: runs a function's products in 16 bits and everything else as traced.

A call of the returned function traces `fun` into a program and runs it after two passes
that know nothing of each other: `narrow` puts in the casts, and `recompute` decides what
the backward pass keeps.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._arrays import checks
from optax_lossscale._autocast.narrow import narrow
from optax_lossscale._autocast.products import why_none_is_narrowed
from optax_lossscale._autocast.recompute import recompute
from optax_lossscale._programs.call import as_program
from optax_lossscale._programs.values import HALVES

SCOPE = "ols.autocast"
"""The `jax.named_scope` in which `autocast` runs programs."""


class _Missing:
    """The default of `fun`. It is not None, so that `autocast(None)` is an error."""

    def __repr__(self) -> str:
        return "<none>"


_MISSING: Any = _Missing()


class _Decorator:
    """What `autocast` returns without a function; no context, unlike torch.autocast."""

    def __init__(self, dtype: Any):
        self._dtype = dtype

    def __call__(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        return autocast(fun, self._dtype)

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "autocast wraps a function and is no context: write "
            "loss = ols.autocast(loss_fn)(params, batch) instead of "
            "with ols.autocast(): loss = loss_fn(params, batch)"
        )

    def __exit__(self, *args: object) -> None: ...


@overload
def autocast(
    fun: Callable[..., Any], dtype: Any = jnp.float16
) -> Callable[..., Any]: ...


@overload
def autocast(
    *, dtype: Any = jnp.float16
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def autocast(fun: Callable[..., Any] = _MISSING, dtype: Any = jnp.float16) -> Any:
    """Makes `fun` run its matrix products in 16 bits and everything else as traced.

    A model with float32 parameters and inputs trains in float16 without a cast in the
    model. Wrap the loss function and call the result under `jit`: otherwise every call
    traces the function again. `autocast` works for training, evaluation and higher
    derivatives. Three rules say what is computed in 16 bits:

    1. A matrix product or convolution takes and gives `dtype`. Everything else is
       computed in the dtype in which it was traced. So a norm, a softmax, a loss or a
       mask of -1e9 is as in float32.
    2. Rounding commutes with moving and sending, so what goes to a product, directly or
       moved, is moved, and sent to other devices, in 16 bits.
    3. A residual sum reads what the product reads: a value that depends on a product,
       and that products read and besides only sums, is rounded once for all of them.

    Nothing is assumed of the range of any value. A product too large for `dtype`
    overflows, and `with_loss_scale` then skips the step. `jax.make_jaxpr` of the result
    shows each cast. `docs/mixed_precision.md` has an example.

    The backward pass computes what lies between two products again, instead of saving
    it. This changes no number. A `jax.checkpoint` of your own is left as it is.

    What stays as it is in `fun`: a product with `precision=jax.lax.Precision.HIGHEST`
    (`HIGH` is not enough); one that sums nothing; values that are float64, bfloat16 or
    float16 in `fun` itself; the inside of a Pallas kernel and of other code that no
    jaxpr shows, for which there is `cast_inputs`; a `jit` with shardings for its
    arguments or results; a custom derivative with `symbolic_zeros=True`; the rule of a
    `custom_jvp` of a function without products; and a `while_loop` whose condition
    depends on floats, or to which `vmap` gives a condition for each example.

    Args:
      fun: a function that JAX can trace. Its arguments may be arrays, trees and modules
        of arrays, and anything else. It may change Flax NNX modules and variables among
        its arguments. Without `fun`, `autocast` returns a decorator, as in
        `@autocast(dtype=jnp.bfloat16)`.
      dtype: `jnp.float16` or `jnp.bfloat16`.

    Returns:
      A function of the same arguments. It treats an argument in `dtype` as float32, so
      its results have the dtypes that `fun` returns for float32.

    Raises:
      TypeError: if `fun` is not a function.
      ValueError: if `dtype` is neither float16 nor bfloat16.

    Warns:
      UserWarning: when the result is called, if no product runs in 16 bits, for reasons
        that may be mistakes, such as float64 arguments. The warning names the reasons
        with advice.

    Source: `torch.autocast` and TensorFlow's mixed precision graph rewrite, which list
    the operations that need float32. Here all but products run in float32, because a
    compiler can fuse them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(weights, x):
      ...     return jnp.mean(jnp.exp(x @ weights))
      >>> weights, x = jnp.ones((4, 2)), 3 * jnp.ones((8, 4))
      >>> loss = jax.jit(ols.autocast(loss_fn))(weights, x)  # exp(12) is inf in float16
      >>> print(f"{loss:.0f}")
      162755
      >>> ols.dtype_report(ols.autocast(loss_fn), weights, x).shares
      {dtype('float16'): 1.0}
    """
    if fun is _MISSING:
        return _Decorator(dtype)
    checks.check_function("fun", fun)
    low = _low_dtype(dtype)

    @functools.wraps(fun)
    def autocasted_fun(*args, **kwargs):
        # On a TPU the compiler itself computes again what it lacks the memory for, and
        # a barrier costs both memory and traffic. JAX does not tell for which platform
        # it traces.
        prevent_cse = jax.default_backend() != "tpu"
        with as_program(fun, args, kwargs, low) as call:
            reasons = why_none_is_narrowed(call.program)
            if reasons:
                why = "; ".join(reasons)
                checks.warn(
                    f"autocast leaves every matrix product as it is, because of {why}"
                )
            narrowed = jax.make_jaxpr(narrow(call.program, low))(call.arrays)
            with jax.named_scope(SCOPE):
                results = recompute(narrowed, prevent_cse)(call.arrays)
            # A literal, or an argument returned unchanged, may not be a JAX array.
            return call.to_result(map(jnp.asarray, results))

    return autocasted_fun


def _low_dtype(dtype: Any) -> np.dtype:
    try:
        low = np.dtype(dtype)
    except TypeError:  # no dtype at all
        low = None
    if low not in HALVES:
        checks.refuse("dtype", dtype, "float16 or bfloat16")
    return low
