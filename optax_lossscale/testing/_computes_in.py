"""The assertion that matrix products and convolutions are in the intended dtype."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_lossscale._arrays import validation
from optax_lossscale._diagnosis.dtypes import dtype_report, rows_of


def assert_computes_in(
    step: Callable[..., Any], dtype: DTypeLike, /, *args: Any, **kwargs: Any
) -> None:
    """Raises if a training step has matrix products or convolutions in another dtype.

    A model whose parameters are cast to float16 may compute in float32 all the same:
    one float32 input is enough, and the loss does not show it.

    The step is traced, but neither compiled nor run. All products that `dtype_report`
    lists are looked at, except products of integers, products in Optax's own
    optimizers, such as Muon's, and products that are meant to stay wide: with
    `precision=jax.lax.Precision.HIGHEST`, or under
    `jax.default_matmul_precision("highest")`.

    Args:
      step: the training step, compiled or not, or any function that JAX can trace, such
        as one that only returns the model's gradients.
      dtype: the floating-point dtype to compute in, such as `jnp.float16`.
      *args: its arguments: arrays, or a `jax.ShapeDtypeStruct` in place of each; trees
        and modules of them. Anything else is passed on as it is.
      **kwargs: its keyword arguments, likewise.

    Raises:
      AssertionError: if products or convolutions compute in another dtype. It names the
        lines of your source that made them, with their share of the multiplications.
      ValueError: if there are no products to look at, or if `dtype` is not a
        floating-point dtype.
      TypeError: if `step` is not a function.

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
    validation.check_function("step", step)
    dtype = validation.floating_dtype("dtype", dtype)
    report = dtype_report(step, *args, **kwargs)
    products = [p for p in report.products if jnp.issubdtype(p.dtype, jnp.inexact)]
    judged = [p for p in products if p.dtype == dtype or not p.by_choice]
    if not judged:
        raise ValueError(
            "there is no matrix product or convolution to judge: pass the training "
            f"step, or the function that computes its gradients. This one has\n{report}"
        )
    wrong = [p for p in judged if p.dtype != dtype]
    if wrong:
        text = _WRONG.format(
            number=sum(p.count for p in wrong),
            total=sum(p.count for p in judged),
            dtype=dtype,
            rows="\n".join(rows_of(wrong, report)),
            source=wrong[0].source,
        )
        raise AssertionError(text)


_WRONG = """\
{number} of {total} matrix products and convolutions compute in another dtype than {dtype}:
{rows}
The first of them in the program is at {source}.
A product is computed in the widest dtype that it is given, one of float16 with bfloat16 in
float32. Call the loss function through
ols.autocast, which computes the products of a float32 model in 16 bits. Or cast both operands to
{dtype}, or give the module dtype=jnp.{dtype}: if the list shows float16→float32 for
one operand, cast the other. To keep a product wide, compute it with
precision=jax.lax.Precision.HIGHEST or under jax.default_matmul_precision("highest")."""
