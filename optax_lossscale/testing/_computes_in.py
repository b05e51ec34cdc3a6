"""`assert_computes_in`: matrix products and convolutions compute in the intended dtype.

The assertion reads the products in the `dtype_report` of the step. A product like

    float16→float32 × float32  50.0%  1 dot_general  model.py:12 (Block.__call__)

computes in float32, because one of its operands is float32. If `dtype` is float16, the
error lists this product.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.precision import is_array_leaf
from optax_lossscale._diagnosis.dtypes import Product, dtype_report


def assert_computes_in(
    step: Callable[..., Any], dtype: DTypeLike, /, *args: Any, **kwargs: Any
) -> None:
    """Raises if matrix products or convolutions do not compute in a given dtype.

    A model whose parameters are cast to float16 may still compute in float32: a single
    float32 input is enough, and only the time that a step takes reveals it. Put this
    assertion into your tests, so that they fail when a new layer or input widens the
    products that follow. The step is traced, but neither compiled nor run, so shapes
    are enough.

    The assertion checks every product that `dtype_report` lists, except:

    - products of integers,
    - products in Optax's own optimizers, such as Muon, and
    - products that are meant to stay wide, because their `precision` is
      `jax.lax.Precision.HIGHEST` or an algorithm, or because your code computes them
      under `jax.default_matmul_precision("highest")`. Such a default does not count if
      you call the assertion itself under it, because it would exempt every product.

    Args:
      step: the training step, compiled or not, or any other function that JAX can
        trace, such as one that only computes the model's gradients.
      dtype: the floating-point dtype to compute in, such as `jnp.float16`.
      *args: the step's arguments: arrays, a `jax.ShapeDtypeStruct` in place of any
        array, or trees and modules of these. Other objects are passed on unchanged.
      **kwargs: the step's keyword arguments, likewise.

    Raises:
      AssertionError: if products or convolutions do not compute in `dtype`. The error
        names the lines of your code that compute them, with the share of the
        multiplications that each computes.
      ValueError: if there are no products to check.
      ValueError: if `dtype` is not a floating-point dtype.
      TypeError: if `step` is not a function, or `dtype` was left out.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> half = jnp.ones((4, 2), jnp.float16)
      >>> x = jnp.ones((8, 4))
      >>> def step(weights, x):
      ...     return jax.grad(lambda weights: jnp.sum(x @ weights))(weights)
      >>> ols.testing.assert_computes_in(step, jnp.float16, half, x.astype(jnp.float16))
      >>> ols.testing.assert_computes_in(step, jnp.float16, half, x)
      Traceback (most recent call last):
          ...
      AssertionError: 2 of 2 matrix products and convolutions do not compute in...
    """
    checks.check_function("step", step)
    # An array has a dtype, but is an argument of the step.
    if isinstance(dtype, (dict, tuple, list)) or is_array_leaf(dtype):
        raise TypeError(
            "the second argument is the dtype to compute in, got "
            f"{checks.shown(dtype)}. Write "
            "assert_computes_in(train_step, jnp.float16, params, state, batch)"
        )
    dtype = checks.floating_dtype("dtype", dtype)
    report = dtype_report(step, *args, **kwargs)
    checked = [product for product in report.products if _is_checked(product, dtype)]
    if not checked:
        raise ValueError(
            "there is no matrix product or convolution to check: pass the training "
            "step, or the function that computes its gradients. dtype_report says\n"
            f"{report}"
        )
    wrong = [product for product in checked if product.dtype != dtype]
    if wrong:
        message = _WRONG.format(
            number=sum(product.count for product in wrong),
            total=sum(product.count for product in checked),
            dtype=dtype,
            rows="\n".join(report.rows_of(wrong)),
            source=wrong[0].source,
        )
        raise AssertionError(message)


def _is_checked(product: Product, dtype: np.dtype) -> bool:
    """Whether the assertion requires a product to compute in `dtype`.

    It requires this neither of products of integers nor of those that have another
    dtype by choice.
    """
    if product.by_choice:
        return product.dtype == dtype
    return jnp.issubdtype(product.dtype, jnp.inexact)


_WRONG = """\
{number} of {total} matrix products and convolutions do not compute in {dtype}:
{rows}
The first of them in the program is at {source}.
A product computes in the wider dtype of its two operands, or in float32 if one operand
is float16 and the other is bfloat16.
- Call the loss function through ols.autocast, which computes the products of a float32
  model in 16 bits.
- Or cast both operands to {dtype}, or give the module dtype=jnp.{dtype}.
- To keep a product wide, compute it with precision=jax.lax.Precision.HIGHEST or under
  jax.default_matmul_precision("highest")."""
