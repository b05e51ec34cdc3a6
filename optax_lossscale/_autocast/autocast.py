"""`autocast`: any function, with matrix products in 16 bits and the rest in float32."""

import functools
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp

from optax_lossscale._autocast.arrays import as_program
from optax_lossscale._autocast.kinds import Kind
from optax_lossscale._autocast.plan import Casting
from optax_lossscale._autocast.products import SCOPE, reasons_left, remedy
from optax_lossscale._autocast.run import narrowed
from optax_lossscale._programs.values import dtypes_in, in_dtypes
from optax_lossscale._programs.versions import open_jaxpr
from optax_lossscale._scales import validation


def autocast(
    fun: Callable[..., Any] | EllipsisType = ...,
    dtype: Any = jnp.float16,
    argnums: int | Sequence[int] = 0,
) -> Callable[..., Any]:
    """`fun` with its matrix products and convolutions in 16 bits, and all else in float32.

    A model whose parameters and inputs are float32 trains in float16 without a cast: products take
    and return `dtype`, and the operations between two products compute in float32, whose result is
    rounded for the second. So exponentials, logarithms, powers, sums, norms, losses and quotients
    have float32's range and digits, and a mask of -1e9 or an epsilon of 1e-8 keeps its value. A
    product too large for `dtype` still overflows, for the loss scale to see.

    The backward pass recomputes the intermediates between two products instead of keeping them;
    activations that go from product to product, such as the residual stream of a transformer, are
    kept in 16 bits. That takes about as much memory as a model written in float16 by hand.

    A product with `precision=jax.lax.Precision.HIGHEST`, or under
    `jax.default_matmul_precision("highest")`, stays as it is; so does everything that is float64,
    bfloat16 or float16 in `fun` itself, and everything that no jaxpr shows, as in Pallas kernels.
    `dtype_report` says which products run in which dtype. `autocast` goes through `jit`, `scan`,
    `cond`, `jax.checkpoint`, `shard_map`, custom derivatives and each `while_loop` whose condition
    reads only integers. It works for training, evaluation and derivatives of any order.

    Args:
      fun: a function that JAX can trace. It may take arrays, trees and modules of them, and
        anything else; Flax NNX modules and variables among its arguments may change inside.
        Without `fun`, this is a decorator: `@autocast(dtype=jnp.bfloat16)`.
      dtype: `jnp.float16` or `jnp.bfloat16`.
      argnums: which positional arguments hold the parameters, if any. The result of a product and
        a parameter, as when a bias is added, is kept in 16 bits between products. Sums with other
        float32 arguments, or with parameters passed by keyword, stay in float32. So name the
        parameters alone: a state to which products are added loses digits in 16 bits.

    Returns:
      A function of the same arguments. If some of these are in `dtype`, its results have the
      dtypes that `fun` would give them in float32.

    Raises:
      TypeError: if `fun` is not a function or `argnums` are not ints.
      ValueError: if `dtype` is neither of the two; when called, if there are fewer
        arguments than `argnums` says.

    Source: `torch.autocast` and TensorFlow's mixed precision graph rewrite, which list operations
    that need float32. Here all operations between two products get it, as a compiler fuses them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> def loss_fn(weights, x):
      ...     return jnp.mean(jnp.exp(x @ weights))
      >>> weights, x = jnp.ones((4, 2)), 3 * jnp.ones((8, 4))
      >>> loss = jax.jit(ols.autocast(loss_fn))(weights, x)  # exp(12) is infinite in float16
      >>> print(f"{loss:.0f}")
      162755
      >>> ols.dtype_report(ols.autocast(loss_fn), weights, x).shares
      {dtype('float16'): 1.0}
    """
    if isinstance(fun, EllipsisType):
        return functools.partial(autocast, dtype=dtype, argnums=argnums)
    validation.function("fun", fun)
    low = validation.floating_dtype("dtype", dtype)
    validation.one_of("dtype", str(low), ("float16", "bfloat16"))
    positions = validation.argnums(argnums)

    @functools.wraps(fun)
    def autocasted(*args, **kwargs):
        parameters = {range(len(args))[n] for n in positions if -len(args) <= n < len(args)}
        if len(parameters) < len(positions) and not kwargs:
            raise ValueError(
                f"autocast was given argnums={argnums!r}, but there are {len(args)} positional "
                "arguments: pass the parameters by position, or argnums=() if there are none"
            )
        with as_program(fun, args, kwargs, parameters, low) as call:
            _warn_of_nothing_narrowed(call.program)
            kinds = [Kind.PARAMETER if is_it else Kind.FLOAT32 for is_it in call.is_parameter]
            # A TPU's compiler recomputes by itself what it lacks the memory for.
            how = Casting(low, prevent_cse=jax.default_backend() != "tpu")
            with jax.named_scope(SCOPE):
                outs = narrowed(call.program, call.arrays, kinds, how)
            dtypes = dtypes_in(open_jaxpr(call.program).outvars)
            return call.result(in_dtypes(dtypes, list(map(jnp.asarray, outs))))

    return autocasted


def _warn_of_nothing_narrowed(program: Any) -> None:
    """Warns if all products are left in float32, apart from those that ask for it."""
    reasons = dict.fromkeys(reasons_left(open_jaxpr(program).eqns))
    if reasons and "" not in reasons:
        said = "; ".join(f"{why} ({remedy(why)})" for why in reasons)
        validation.warn(f"autocast leaves every matrix product in float32: {said}")
