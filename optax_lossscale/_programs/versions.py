"""What differs between the supported versions of JAX in the programs that they trace."""

from collections.abc import Sequence
from typing import Any


def open_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """What a jaxpr closes over, in the order of its `constvars`."""
    return getattr(jaxpr, "consts", ())


def is_program(x: Any) -> bool:
    """Whether this is a jaxpr, open or closed."""
    return hasattr(open_jaxpr(x), "eqns")


def is_ref(v: Any) -> bool:
    """Whether a variable is a `jax.Ref`, an array that is changed in place."""
    return hasattr(v.aval, "inner_aval")


def argument_names(jaxpr: Any) -> Sequence[str]:
    """What the function that a jaxpr was traced from calls each argument; empty if unknown."""
    names = open_jaxpr(jaxpr).debug_info.arg_names or ()
    if len(names) != len(open_jaxpr(jaxpr).invars):  # where constants were added
        return ()
    return tuple(name or "" for name in names)


def params_of(eqn: Any) -> dict[str, Any]:
    """An equation's parameters; since jax 0.12 an object may hold them, as in `custom_root`."""
    return getattr(eqn.params.get("_prim"), "params", eqn.params)


def name_of(eqn: Any) -> str:
    """What JAX calls an equation's operation, or the object that holds its parameters."""
    holder = eqn.params.get("_prim")
    return eqn.primitive.name if holder is None else type(holder).__name__


def bind(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation for other operands of the same types."""
    functions = ()
    params = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # before jax 0.9
        functions, params = params
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many of a scan's operands are the same in each round, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # Since jax 0.12
    consts, carry, *_ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def mapped_axes(eqn: Any) -> tuple[Any, ...]:
    """The axes of the mesh that a `shard_map` maps over, besides those mapped around it."""
    if "manual_axes" in eqn.params:  # before jax 0.10
        return tuple(eqn.params["manual_axes"])
    return tuple(eqn.params["newly_manual_axes"])
