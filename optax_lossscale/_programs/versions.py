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


def function_name(jaxpr: Any) -> str:
    """The name of the function that a jaxpr was traced from, if it says so."""
    return getattr(
        getattr(open_jaxpr(jaxpr), "debug_info", None), "func_name", "function"
    )


def argument_names(jaxpr: Any) -> Sequence[str]:
    """What the function that a jaxpr was traced from calls each argument; empty if unknown."""
    names = (
        getattr(getattr(open_jaxpr(jaxpr), "debug_info", None), "arg_names", None) or ()
    )
    # Not where constants were added
    is_of_each = len(names) == len(open_jaxpr(jaxpr).invars)
    return tuple(name or "" for name in names) if is_of_each else ()


def params_of(eqn: Any) -> dict[str, Any]:
    """An equation's parameters; since jax 0.12 an object may hold them, as in `custom_root`."""
    return getattr(eqn.params.get("_prim"), "params", eqn.params)


def name_of(eqn: Any) -> str:
    """What JAX calls an equation's operation, or the object that holds its parameters."""
    held = eqn.params.get("_prim")
    return eqn.primitive.name if held is None else type(held).__name__


def bind(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """The results of an equation for other operands of the same types."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Before jax 0.9
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*functions, *ins, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """How many of a scan's operands are the same in each round, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # Since jax 0.12
    n_consts, n_carry = (len(part) for part in eqn.params["ft_in"].unpack()[:2])
    return n_consts, n_carry


def mapped_axes(eqn: Any) -> tuple[Any, ...]:
    """The axes of the mesh that a `shard_map` maps over, besides those mapped around it."""
    was = "manual_axes"  # before jax 0.10
    return tuple(
        eqn.params[was] if was in eqn.params else eqn.params["newly_manual_axes"]
    )
