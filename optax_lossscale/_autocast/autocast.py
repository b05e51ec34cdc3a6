"""`autocast`: runs a function's products in 16 bits and most else in float32.

A call of the returned function traces `fun` into a program, plans the program, and runs
the plan. `AutocastFunction.plan` does not run the plan but returns it for printing. The
`__init__.py` of this folder explains what a plan is.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

import jax
import jax.numpy as jnp

from optax_lossscale._arrays import checks
from optax_lossscale._autocast.classify import Kind, Kinds
from optax_lossscale._autocast.facts import Casting
from optax_lossscale._autocast.plan import Plan, plan_for
from optax_lossscale._autocast.products import SCOPE, why_none_is_narrowed
from optax_lossscale._autocast.run import run
from optax_lossscale._programs.call import Call, as_program
from optax_lossscale._step.gradient import _positions  # gone with argnums


class _Missing:
    """The default of `fun`. It is not None, so that `autocast(None)` is an error."""

    def __repr__(self) -> str:
        return "<none>"


_MISSING: Any = _Missing()


class AutocastFunction(Protocol):
    """The type of what `autocast` returns: a function with an attribute `plan`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with its products in 16 bits."""
        ...

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan of a call. Print it to see what runs in which dtype."""
        ...


@overload
def autocast(
    fun: Callable[..., Any],
    dtype: Any = jnp.float16,
    argnums: int | Sequence[int] = 0,
) -> AutocastFunction: ...


@overload
def autocast(
    *, dtype: Any = jnp.float16, argnums: int | Sequence[int] = 0
) -> Callable[[Callable[..., Any]], AutocastFunction]: ...


def autocast(
    fun: Callable[..., Any] = _MISSING,
    dtype: Any = jnp.float16,
    argnums: int | Sequence[int] = 0,
) -> Any:
    """Makes `fun` run its matrix products in 16 bits and most else in float32.

    A model with float32 parameters and inputs trains in float16 without a cast in the
    model. Wrap the loss function and call the result under `jit`: otherwise every call
    traces and plans the function again. `autocast` works for training, evaluation and
    higher derivatives.

    Matrix products and convolutions, called products below, read and return `dtype`.
    The operations between two products compute in float32 and round their result for
    the second product. Therefore, exponentials, logarithms, powers, reductions, norms,
    losses and quotients have the range and the digits of float32, and a mask of -1e9 or
    an epsilon of 1e-8 keeps its value. A product too large for `dtype` still overflows,
    and `with_loss_scale` then skips the step.

    Two other kinds of operations run in 16 bits. First, sums that are carried from
    product to product, such as the residual stream of a transformer, are added and
    stored in 16 bits. Second, operations that move the result of a product move 16
    bits, also between devices: `jax.lax.psum` adds such results in `dtype` and may
    overflow.

    The choice of the sums rests on two assumptions, which are not checked: all
    parameters are of order 1, and no value is multiplied so often that its range
    changes.

    The backward pass recomputes the intermediates between two products instead of
    saving them. In the repository, `docs/benchmarks/autocast.md` compares the memory
    that models take with that of the same models cast to float16 by hand.

    To leave a product in float32, give it `precision=jax.lax.Precision.HIGHEST` (`HIGH`
    is not enough), or compute it under `jax.default_matmul_precision("highest")`.
    Values that are float64, bfloat16 or float16 in `fun` itself are left unchanged as
    well, and so is all code that no jaxpr shows, such as the inside of a Pallas kernel.
    If a kernel needs 16 bits, wrap it with `cast_inputs`. `dtype_report` tells which
    products run in which dtype.

    Products inside `jit`, `scan`, `cond`, `jax.checkpoint`, `shard_map`, `custom_vjp`
    and `custom_jvp` also run in 16 bits. But a `jit` inside `fun` is left unchanged if
    it has shardings for its arguments or results, and so is a custom derivative with
    `symbolic_zeros=True`. The rule of a `custom_jvp` is left unchanged if the function
    itself has no product. A `while_loop` is changed only if its condition depends on
    integers and booleans alone, and never if `vmap` gives it a condition for each
    example.

    Args:
      fun: a function that JAX can trace. Its arguments may be arrays, trees and modules
        of arrays, and anything else. It may change Flax NNX modules and variables among
        its arguments. Without `fun`, `autocast` returns a decorator, as in
        `@autocast(dtype=jnp.bfloat16)`.
      dtype: `jnp.float16` or `jnp.bfloat16`.
      argnums: which positional arguments hold the parameters; `()` if none do. This
        decides which sums may be stored in 16 bits between products: a product's result
        plus a parameter, such as a bias, may be, but a product's result plus any other
        float32 argument stays in float32. List only parameters, and only those of
        ordinary magnitude: not a mask of -1e9 or statistics of 1e5, which float16 would
        make infinite in such a sum, nor a recurrent state or weights that inner steps
        update, which would lose digits.

        Three things do not count as parameters: arguments passed by keyword, arrays of
        shape (), such as a step size, and values multiplied by such an array. In Flax
        NNX, the parameters are the `nnx.Param`s among the arguments, whatever `argnums`
        says. In any other listed module, every array counts.

    Returns:
      A function of the same arguments. It treats an argument in `dtype` as float32, so
      its results have the dtypes that `fun` returns for float32. Its attribute `plan`
      is another function of the same arguments, which returns a printable plan: what
      would run in which dtype, at which line. The `plan` of a method needs `self`, too,
      as in `model.loss.plan(model, x)`.

    Raises:
      TypeError: if `fun` is not a function.
      TypeError: if `argnums` is not an int or a sequence of ints.
      ValueError: if `dtype` is neither float16 nor bfloat16.
      ValueError: if `argnums` repeats a number.
      ValueError: when the result is called, if a number in `argnums` is out of range.
        Keyword arguments are counted after the positional ones.

    Warns:
      UserWarning: when the result is called, if no product runs in 16 bits, for reasons
        that may be mistakes, such as float64 arguments. The warning names the reasons
        with advice. It leaves out products that `fun` itself gives HIGHEST precision or
        an algorithm and products that have no operand in float32 or float64.

    Source: `torch.autocast` and TensorFlow's mixed precision graph rewrite, which list
    the operations that need float32. Here all operations between two products run in
    float32, because a compiler can fuse them.

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
    checks.check_function("fun", fun)
    low = checks.floating_dtype("dtype", dtype)
    checks.one_of("dtype", str(low), ("float16", "bfloat16"))
    positions = _positions(argnums)

    @contextlib.contextmanager
    def planned(args, kwargs):
        """Traces a call and plans its program; `call.to_result` works only inside."""
        parameters = _parameters(argnums, positions, len(args), len(kwargs))
        # On a TPU, the compiler is allowed to merge the recomputation with the forward
        # pass: as compiled programs show (not timed), it recomputes by itself where
        # memory is short. JAX does not tell for which platform it traces, so the
        # default backend is assumed.
        prevent_cse = jax.default_backend() != "tpu"
        casting = Casting(low, prevent_cse=prevent_cse)
        with as_program(fun, args, kwargs, parameters, low) as call:
            plan = plan_for(call.program, call.arrays, _kinds(call), casting)
            yield call, plan

    @functools.wraps(fun)
    def autocasted_fun(*args, **kwargs):
        with planned(args, kwargs) as (call, plan):
            reasons = why_none_is_narrowed(call.program)
            if reasons:
                why = "; ".join(reasons)
                checks.warn(
                    f"autocast leaves every matrix product as it is, because of {why}"
                )
            with jax.named_scope(SCOPE):
                results = run(plan, call.arrays)
            # A literal, or an argument returned unchanged, may not be a JAX array.
            return call.to_result(map(jnp.asarray, results))

    def plan_of_call(*args, **kwargs):
        with planned(args, kwargs) as (_, plan):
            return plan

    autocasted: Any = autocasted_fun
    autocasted.plan = plan_of_call
    return autocasted


def _parameters(
    argnums: int | Sequence[int],
    positions: Sequence[int],
    n_positional: int,
    n_keyword: int,
) -> set[int]:
    """Returns the positions of the arguments that hold parameters, counted from 0.

    Args:
      argnums: what the user passed, for the error message.
      positions: the same numbers as a sequence. Those below 0 count from the last
        positional argument.
      n_positional: the number of positional arguments of the call.
      n_keyword: the number of its keyword arguments.
    """
    for n in positions:
        if not -n_positional <= n < n_positional + n_keyword:
            raise ValueError(
                f"autocast got argnums={argnums!r}, but the number of positional "
                f"arguments in the call is {n_positional}: pass the parameters by "
                "position, or argnums=() if there are none"
            )
    # Positions after the last positional argument stand for keyword arguments, which
    # are never treated as parameters.
    return {n % n_positional for n in positions if n < n_positional}


def _kinds(call: Call) -> Kinds:
    """Returns the kind of each array in the arguments of a call."""
    # A single number may be a step size or a statistic, of any magnitude.
    return tuple(
        Kind.PARAMETER if is_parameter and x.shape else Kind.FLOAT32
        for x, is_parameter in zip(call.arrays, call.is_parameter, strict=True)
    )
