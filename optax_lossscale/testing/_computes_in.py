"""That a training step computes in the dtype that is meant."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._diagnosis.dtypes import dtype_report, product_rows
from optax_lossscale._scales import validation


def assert_computes_in(
    step: Callable[..., Any], dtype: DTypeLike, /, *args: Any, **kwargs: Any
) -> None:
    """Raises if a training step computes matrix products or convolutions in another dtype.

    A model whose parameters are cast to float16 may compute in float32 all the same: one float32
    input is enough, and the loss does not show it. It runs and compiles nothing; `dtype_report`
    says what it looks at. Left out are products that say that they stay wide, with
    `precision=jax.lax.Precision.HIGHEST` or under `jax.default_matmul_precision("highest")`, those
    of integers, and those in Optax's own optimizers, such as Muon's.

    Args:
      step: the training step, compiled or not, or any function that JAX can trace, such as that
        of the model's gradients alone.
      dtype: the floating-point dtype to compute in, such as `jnp.float16`.
      *args: its arguments: arrays, or a `jax.ShapeDtypeStruct` in the place of each; trees and
        modules of them. What is no array is passed on as it is.
      **kwargs: its keyword arguments, likewise.

    Raises:
      AssertionError: if products or convolutions compute in another dtype. It names the lines
        of your source that made them, with their share of the multiplications.
      ValueError: if there are none to look at, or `dtype` is not one of floating-point numbers.
      TypeError: if `step` is no function.

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
      AssertionError: 2 of 2 matrix products and convolutions compute in another dtype than...
    """
    dtype = validation.floating_dtype("dtype", dtype)
    report = dtype_report(step, *args, **kwargs)
    is_meant = lambda p: p.by_choice and p.dtype != dtype
    products = [p for p in report.products if jnp.issubdtype(p.dtype, jnp.inexact)]
    judged = [p for p in products if not is_meant(p)]
    if not judged:
        raise ValueError(
            "there is no matrix product or convolution to judge: give the step that trains, or "
            f"its gradients' function. This one has\n{report}"
        )
    if wrong := [p for p in judged if p.dtype != dtype]:
        number, total = (sum(p.count for p in products) for products in (wrong, judged))
        title = f"{number} of {total} matrix products and convolutions compute in another dtype"
        rows = "\n".join(product_rows(wrong, report))
        where = f"The first of them in the program is at {wrong[0].source}."
        why = _WIDE.format(dtype=dtype)
        raise AssertionError(f"{title} than {dtype}:\n{rows}\n{where}\n{why}")


_WIDE = """\
A product is computed in the widest dtype that it is given. Call the loss function through
ols.autocast, which has the products of a float32 model in 16 bits. Or cast both operands to
{dtype}, or give the module dtype=jnp.{dtype}: where one was converted for it (as in
float16→float32), it is the other that is to be cast. One that is to stay wide says so, by
precision=jax.lax.Precision.HIGHEST or under jax.default_matmul_precision("highest")."""
