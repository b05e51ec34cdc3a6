"""`cast_inputs`: calls a kernel that needs 16 bits from a model in float32.

While `autocast` traces a model, `AUTOCAST_DTYPE`, a user context of JAX, holds the
dtype of its products. A function wrapped by `cast_inputs` reads this dtype at each
call. If it is float16, the function casts its float32 arguments to float16 and its
float16 results back to float32. Outside `autocast` it is None, and the function casts
nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from optax_lossscale._arrays import checks
from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._arrays.variables import find_nodes, is_variable, map_leaves
from optax_lossscale._programs.values import FLOAT32, astype, dtype_in


def cast_inputs(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `autocast` cast inputs of `fun` to 16 bits, for kernels that need them.

    `autocast` cannot look into a kernel, such as one written in Pallas or cuDNN's
    attention, and would pass it float32. Wrap such a kernel with `cast_inputs`: while
    `autocast` traces a model, float32 arrays among the arguments of `fun` are cast to
    `autocast`'s dtype, and results in that dtype are cast back to float32. In any other
    context `fun` is called unchanged.

    A large negative bias becomes -inf in float16: pass the kernel a mask instead. If a
    function has a custom derivative, wrap that function, not the kernels in its rules.
    Flax NNX modules are allowed among the arguments, and variables that `fun` sets in
    them stay set.

    Args:
      fun: a function of arrays, trees of arrays and anything else.

    Returns:
      A function of the same arguments.

    Raises:
      TypeError: if `fun` is not a function.

    Source: the argument `cast_inputs` of `torch.amp.custom_fwd`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax_lossscale as ols
      >>> @ols.cast_inputs
      ... def kernel(x):
      ...     print(x.dtype)
      ...     return x
      >>> ols.autocast(kernel)(jnp.ones(3)).dtype
      float16
      dtype('float32')
    """
    checks.check_function("fun", fun)
    AUTOCAST_DTYPE.create()

    @functools.wraps(fun)
    def with_cast_inputs(*args, **kwargs):
        low = AUTOCAST_DTYPE.value
        if low is None:
            return fun(*args, **kwargs)
        inputs = args, kwargs
        cast = _cast(FLOAT32, low, inputs)
        cast_args, cast_kwargs = cast
        variables = find_nodes(is_variable, inputs)
        copies = find_nodes(is_variable, cast)
        leaves_before = [jax.tree.leaves(copy) for copy in copies]
        results = fun(*cast_args, **cast_kwargs)
        # `fun` was given copies of the variables. What it has changed in a copy is
        # written to the variable.
        triples = zip(variables, copies, leaves_before, strict=True)
        for variable, copy, leaves in triples:
            if _has_changed(copy, leaves):
                new_value = _cast(low, FLOAT32, copy)
                variable.copy_from(new_value)
        return _cast(low, FLOAT32, results)

    return with_cast_inputs


def _cast(old: Any, new: Any, tree: Any) -> Any:
    """Copies a tree, with each array of dtype `old` cast to dtype `new`."""

    def cast(x):
        if dtype_in(x) == old:
            return astype(x, new)
        return x

    return map_leaves(cast, tree)


def _has_changed(variable: Any, leaves_before: list[Any]) -> bool:
    """Whether a Flax NNX variable no longer holds the arrays that it held before."""
    leaves = jax.tree.leaves(variable)
    return list(map(id, leaves)) != list(map(id, leaves_before))
