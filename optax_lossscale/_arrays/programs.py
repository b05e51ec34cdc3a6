"""What JAX traced: the equations of a program, and the programs in them, in each version of JAX.

What differs between the supported versions is known here and nowhere else.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def open_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """What a jaxpr closes over, in the order of its `constvars`."""
    return getattr(jaxpr, "consts", ())


def function_name(jaxpr: Any) -> str:
    """The name of the function that a jaxpr was traced from, if it says so."""
    return getattr(getattr(open_jaxpr(jaxpr), "debug_info", None), "func_name", "function")


def is_program(x: Any) -> bool:
    """Whether this is a jaxpr, open or closed."""
    return hasattr(open_jaxpr(x), "eqns")


def programs_in(eqn: Any) -> list[Any]:
    """The jaxprs in an equation's parameters, closed or without constants, as they are."""
    found = jax.tree.leaves(list(params_of(eqn).values()), is_leaf=is_program)
    return [x for x in found if is_program(x)]


def params_of(eqn: Any) -> dict[str, Any]:
    """An equation's parameters; since jax 0.12 an object may hold them, as a `custom_root`'s."""
    return getattr(eqn.params.get("_prim"), "params", eqn.params)


def name_of(eqn: Any) -> str:
    """What JAX calls an equation's operation, or the object that holds its parameters."""
    held = eqn.params.get("_prim")
    return eqn.primitive.name if held is None else type(held).__name__


def is_float(v: Any) -> bool:
    """Whether a variable is a floating-point or complex array."""
    return hasattr(v.aval, "dtype") and jnp.issubdtype(v.aval.dtype, jnp.inexact)


def dtype_of(x: Any) -> Any:
    """The dtype of an array or a type; None for what has none, such as a Python number."""
    return getattr(x, "dtype", None)


def in_dtype(dtype: Any, x: Any) -> Any:
    """An array in another dtype; what has none, or is to have none, as it came."""
    if dtype is None or dtype_of(x) in (None, dtype):
        return x
    return lax.convert_element_type(x, dtype)


def as_traced(variables: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """Arrays in the dtypes of the variables that stood for them when the program was traced."""
    return [in_dtype(dtype_of(v.aval), x) for v, x in zip(variables, xs, strict=True)]


def bind(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation for other operands of the same types."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # before jax 0.9
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*functions, *ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many of a scan's operands are the same in each round, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    n_consts, n_carry = (len(part) for part in eqn.params["ft_in"].unpack()[:2])  # since jax 0.12
    return n_consts, n_carry


def mapped_axes(eqn: Any) -> tuple[Any, ...]:
    """The axes of the mesh that a `shard_map` maps over, beside those around it."""
    was = "manual_axes"  # before jax 0.10
    return tuple(eqn.params[was] if was in eqn.params else eqn.params["newly_manual_axes"])


def placed(shardings: Sequence[Any] | None, xs: Sequence[Any]) -> list[Any]:
    """Arrays where `jit` was told to have them; None for nowhere in particular."""
    is_told = lambda s: isinstance(s, jax.sharding.Sharding)
    if shardings is None:
        return list(xs)
    pairs = zip(shardings, xs, strict=True)
    return [lax.with_sharding_constraint(x, s) if is_told(s) else x for s, x in pairs]


def is_placed(eqn: Any) -> bool:
    """Whether a `jit` was told where to have what it takes or gives."""
    told = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(s, jax.sharding.Sharding) for s in told)


def is_product(eqn: Any) -> bool:
    """Whether this is a matrix product or a convolution.

    Not an outer product, which sums nothing, nor a sum of products to single numbers.
    """
    if eqn.primitive.name not in PRODUCTS:
        return False
    if eqn.primitive.name != "dot_general":
        return True
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left = [len(v.aval.shape) - len(contracted) - len(batch) for v in eqn.invars]
    return bool(contracted) and any(left)


PRODUCTS = {
    "conv_general_dilated",
    "dot_general",
    "ragged_dot_general",
    "scaled_dot",
    "scaled_matmul_wrapper",
}


def asks_for_precision(eqn: Any) -> bool:
    """Whether a product is by choice as precise as it is.

    By `precision=jax.lax.Precision.HIGHEST` or by an algorithm, its own or that of
    `jax.default_matmul_precision` around it.
    """
    precision = eqn.params.get("precision")
    if precision is None:
        return False
    return not isinstance(precision, tuple) or lax.Precision.HIGHEST in precision
