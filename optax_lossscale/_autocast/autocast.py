"""`autocast`: any function with products in 16 bits, and most else in float32."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

import jax
import jax.numpy as jnp

from optax_lossscale._arrays import messages, validation
from optax_lossscale._autocast.arrays import Call, as_program
from optax_lossscale._autocast.classify import Kind
from optax_lossscale._autocast.facts import Casting
from optax_lossscale._autocast.plan import Plan, plan_for
from optax_lossscale._autocast.products import SCOPE, reasons_left
from optax_lossscale._autocast.run import run
from optax_lossscale._programs.values import astypes, dtypes_in
from optax_lossscale._programs.versions import open_jaxpr

_MISSING: Any = object()
"""The default of `fun`: it is not None, so that `autocast(None)` is an error."""


class Autocasted(Protocol):
    """What `autocast` returns: a function, and its plans."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the function, with its products narrowed."""
        ...

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan of a call; print it to see what runs, and is stored, in which dtype."""
        ...


@overload
def autocast(
    fun: Callable[..., Any],
    dtype: Any = jnp.float16,
    argnums: int | Sequence[int] = 0,
) -> Autocasted: ...


@overload
def autocast(
    *, dtype: Any = jnp.float16, argnums: int | Sequence[int] = 0
) -> Callable[[Callable[..., Any]], Autocasted]: ...


def autocast(
    fun: Callable[..., Any] = _MISSING,
    dtype: Any = jnp.float16,
    argnums: int | Sequence[int] = 0,
) -> Any:
    """`fun` with matrix products and convolutions in 16 bits, and most else in float32.

    A model whose parameters and inputs are float32 trains in float16 without a cast in
    the model: products take and return `dtype`, and the operations between two products
    compute in float32 and round their result for the second product. So exponentials,
    logarithms, powers, reductions, norms, losses and quotients have float32's range and
    digits, and a mask of -1e9 or an epsilon of 1e-8 keeps its value. A product too
    large for `dtype` still overflows, for the loss scale to see.

    Two other kinds of operations run in 16 bits. Sums that go from product to product,
    such as the residual stream of a transformer, are added and stored in 16 bits. And
    what moves the result of a product moves 16 bits, between devices as well: so
    `jax.lax.psum` adds such results in `dtype`, and may overflow. The backward pass
    recomputes the intermediates between two products instead of keeping them. All this
    takes about as much memory as a model written in float16 by hand.

    A product with `precision=jax.lax.Precision.HIGHEST` (`HIGH` is not enough), or
    under `jax.default_matmul_precision("highest")`, stays as it is; so does everything
    that is float64, bfloat16 or float16 in `fun` itself, and everything that no jaxpr
    shows, as in Pallas kernels. `dtype_report` says which products run in which dtype.

    `autocast` goes through `jit`, `scan`, `cond`, `jax.checkpoint`, `shard_map`,
    `custom_vjp`, and `custom_jvp`, whose rule is left alone if its function has no
    product. It goes through each `while_loop` whose condition follows from integers
    alone and is one flag, not one for each example of a `vmap`. It works for training,
    evaluation and derivatives of any order. Call it under `jit`: without, each call is
    traced and planned anew.

    Args:
      fun: a function that JAX can trace. It may take arrays, trees and modules of them,
        and anything else; Flax NNX modules and variables among its arguments may change
        inside. Without `fun`, this is a decorator: `@autocast(dtype=jnp.bfloat16)`.
      dtype: `jnp.float16` or `jnp.bfloat16`.
      argnums: which positional arguments hold the parameters, if any. The sum of a
        product's result and a parameter, such as a bias, is stored in 16 bits between
        products. Sums with other float32 arguments, with parameters passed by keyword,
        or with what is multiplied by a parameter of shape (), such as a step size, stay
        in float32. So list only parameters, and those whose numbers are of ordinary
        magnitude. A recurrent state, or weights that inner steps update, would lose
        digits in 16 bits; a mask of -1e9 or statistics of 1e5 would become infinite
        there. In Flax NNX, the `nnx.Param`s among the arguments are the parameters,
        whatever `argnums` says, and no other variables are. Of other modules, every
        array counts.

    Returns:
      A function of the same arguments. An argument in `dtype` is taken for one in
      float32: the results have the dtypes that `fun` gives for float32. The attribute
      `plan`, another function of the same arguments, returns what would run in which
      dtype, at which line, to be printed.

    Raises:
      TypeError: if `fun` is not a function or `argnums` are not ints.
      ValueError: if `dtype` is neither of the two or `argnums` repeat a number; when
        called, if `argnums` count beyond the arguments. One that is passed by keyword
        counts, but is not taken for a parameter.

    Source: `torch.autocast` and TensorFlow's mixed precision graph rewrite, which list
    operations that need float32. Here all operations between two products get it, as a
    compiler fuses them.

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
      >>> print(ols.autocast(loss_fn).plan(weights, x))  # doctest: +ELLIPSIS
      takes weights:f32, x:f32
      run: dot_general (x:f16, weights:f16) -> 2:f16  # ... (loss_fn)
      island: exp reduce_sum div (2:f16) -> 5:f32  # ... (loss_fn)
      gives 5:f32
    """
    if fun is _MISSING:
        return functools.partial(autocast, dtype=dtype, argnums=argnums)
    validation.check_function("fun", fun)
    low = validation.floating_dtype("dtype", dtype)
    validation.one_of("dtype", str(low), ("float16", "bfloat16"))
    positions = validation.argnums_tuple(argnums)

    @contextlib.contextmanager
    def planned(args, kwargs):
        """Traces a call, and plans the program."""
        parameters = _parameters(argnums, positions, len(args), len(kwargs))
        with as_program(fun, args, kwargs, parameters, low) as call:
            # On a TPU the compiler may merge the recomputation with the forward pass,
            # as it recomputes by itself where memory is short.
            casting = Casting(low, prevent_cse=jax.default_backend() != "tpu")
            yield call, plan_for(call.program, call.arrays, _kinds(call), casting)

    @functools.wraps(fun)
    def results_of_call(*args, **kwargs):
        with planned(args, kwargs) as (call, plan):
            reasons = reasons_left(call.program)
            if reasons:
                said = "; ".join(reasons)
                messages.warn(f"autocast leaves every matrix product as it is: {said}")
            with jax.named_scope(SCOPE):
                results = run(plan, call.arrays)
            dtypes = dtypes_in(open_jaxpr(call.program).outvars)
            return call.result(astypes(list(map(jnp.asarray, results)), dtypes))

    def plan_of_call(*args, **kwargs):
        with planned(args, kwargs) as (_, plan):
            return plan

    autocasted: Any = results_of_call
    autocasted.plan = plan_of_call
    return autocasted


def _parameters(
    argnums: int | Sequence[int], positions: Sequence[int], n_args: int, n_kwargs: int
) -> set[int]:
    """Which positional arguments of a call are parameters.

    `argnums` is what the user gave, for the error; `positions` has the same numbers as
    a sequence.
    """
    for n in positions:
        if not -n_args <= n < n_args + n_kwargs:
            raise ValueError(
                f"autocast was given argnums={argnums!r}, but the call has {n_args} "
                "positional arguments: pass the parameters by position, or argnums=() "
                "if there are none"
            )
    # A number may count on into the keyword arguments, which hold no parameters.
    return {range(n_args)[n] for n in positions if n < n_args}


def _kinds(call: Call) -> list[Kind]:
    """The kinds of the arrays in the arguments of a call."""
    # A single number may be a step size or a statistic, and of any size.
    return [
        Kind.PARAMETER if is_parameter and x.shape else Kind.FLOAT32
        for x, is_parameter in zip(call.arrays, call.is_parameter, strict=True)
    ]
