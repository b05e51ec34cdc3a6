"""`cast_inputs`: a kernel that takes 16 bits, called from a model in float32."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from optax_lossscale._arrays import validation
from optax_lossscale._arrays.contexts import AUTOCAST_DTYPE
from optax_lossscale._arrays.variables import find_nodes, is_variable, map_leaves
from optax_lossscale._programs.values import FLOAT32, astype, dtype_in


def cast_inputs(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `autocast` cast the inputs of `fun` to 16 bits, for a kernel that needs it.

    While `autocast` traces a model, the float32 arrays among the arguments of `fun` are
    cast to `autocast`'s dtype, and results in that dtype are cast to float32. Elsewhere
    `fun` is called as it is. So a model in float32 can call cuDNN's attention or a
    Pallas kernel, which `autocast` cannot look into. A large negative bias becomes -inf
    in float16: give the kernel a mask instead. Wrap a function with a custom derivative
    as a whole, not the kernels in its rules. Modules of Flax NNX may be among the
    arguments; what `fun` sets in their variables is kept.

    Args:
      fun: a function of arrays, trees of them and of anything else.

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
    validation.check_function("fun", fun)

    @functools.wraps(fun)
    def of_cast(*args, **kwargs):
        low = AUTOCAST_DTYPE.value
        if low is None:
            return fun(*args, **kwargs)
        cast_args, cast_kwargs = _cast(FLOAT32, low, (args, kwargs))
        variables = find_nodes(is_variable, (args, kwargs))
        copies = find_nodes(is_variable, (cast_args, cast_kwargs))
        before = list(map(jax.tree.leaves, copies))
        results = fun(*cast_args, **cast_kwargs)
        # What `fun` has set in the copy of a variable is set in the variable.
        for variable, copy, arrays in zip(variables, copies, before, strict=True):
            if _is_set(copy, arrays):
                variable.copy_from(_cast(low, FLOAT32, copy))
        return _cast(low, FLOAT32, results)

    return of_cast


def _cast(old: Any, new: Any, tree: Any) -> Any:
    """A copy of a tree, whose arrays of dtype `old` are cast to the dtype `new`."""

    def cast(x):
        return astype(x, new) if dtype_in(x) == old else x

    return map_leaves(cast, tree)


def _is_set(variable: Any, before: list[Any]) -> bool:
    """Whether a variable of Flax NNX holds other arrays than `before`."""
    return list(map(id, jax.tree.leaves(variable))) != list(map(id, before))
