"""What differs between the supported versions of JAX in the programs that they trace.

JAX's jaxprs are internal, and change from release to release. What differs between the
supported releases is read in this file. Where the release is known, a comment names it,
after `since jax` or `before jax`. An operation that
only some releases have is in the table of `operations.py` like any other. A function
with an argument `jaxpr` takes an open one (`jax.extend.core.Jaxpr`), or a closed one,
which has the values of its constants: equations hold either.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr that a closed jaxpr wraps; an open one as it is."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """The values of a closed jaxpr's `constvars`, in order; none for an open one."""
    return getattr(jaxpr, "consts", ())


def is_program(x: Any) -> bool:
    """Whether `x` is a jaxpr, open or closed."""
    return hasattr(open_jaxpr(x), "eqns")


def is_ref(v: Any) -> bool:
    """Whether a variable is a `jax.Ref`, an array that equations change in place."""
    return hasattr(v.aval, "inner_aval")


def argument_names(jaxpr: Any) -> Sequence[str]:
    """The names of a jaxpr's arguments in the traced function; empty if unknown."""
    names = open_jaxpr(jaxpr).debug_info.arg_names or ()
    # The lengths differ where JAX has turned constants into arguments.
    if len(names) != len(open_jaxpr(jaxpr).invars):
        return ()
    return tuple(name or "" for name in names)


def params_of(eqn: JaxprEqn) -> dict[str, Any]:
    """An equation's parameters, or those of the object that holds them.

    Some operations have such an object as their parameter `_prim`; `custom_root` has
    one since jax 0.12.
    """
    return getattr(eqn.params.get("_prim"), "params", eqn.params)


def name_of(eqn: JaxprEqn) -> str:
    """The name of an equation's operation, which is that of its primitive.

    Operations whose parameters are in an object share one primitive; their name is that
    of the object's class. See `params_of`.
    """
    holder = eqn.params.get("_prim")
    return eqn.primitive.name if holder is None else type(holder).__name__


def scopes_of(eqn: JaxprEqn) -> list[str]:
    """The names of the scopes that an equation is in, without JAX's transformations."""
    stack = eqn.source_info.name_stack.stack
    return [entry.name for entry in stack if type(entry).__name__ == "Scope"]


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Applies an equation's operation, with its parameters, to other operands."""
    functions = ()
    params = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # before jax 0.9
        functions, params = params
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are its carry."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    # Since jax 0.12
    consts, carry, *_ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def mapped_axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The mesh axes that this `shard_map` maps over, without those mapped around it."""
    if "manual_axes" in eqn.params:  # before jax 0.10
        return tuple(eqn.params["manual_axes"])
    return tuple(eqn.params["newly_manual_axes"])
