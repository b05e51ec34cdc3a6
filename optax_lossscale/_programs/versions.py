"""What differs between the supported versions of JAX in the programs that they trace.

Jaxprs are internal to JAX, and their attributes change from release to release. If a
new release breaks the library, look here first: attributes of programs that are known
to differ between the supported releases are read only in this file. (An attribute of an
array's type differs as well; it is read in `_arrays/placement.py`. Internal attributes
that do not differ are read where they are needed, also in other files.) A comment
`since jax …` or `before jax …` names the release of a change where it is known. An
operation that only some releases have is listed in `operations.py` like any other.

A jaxpr is open (`jax.extend.core.Jaxpr`) or closed. A closed jaxpr also holds the
values of its constants. Equations may hold either, so functions accept either:
`AnyJaxpr`.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

AnyJaxpr = Jaxpr | ClosedJaxpr
"""A program: a jaxpr, open or closed."""


def open_jaxpr(jaxpr: AnyJaxpr) -> Any:
    """Returns the jaxpr that a closed jaxpr wraps, or an open one itself."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: AnyJaxpr) -> Sequence[Any]:
    """Returns the values of a closed jaxpr's `constvars`; () for an open one."""
    return getattr(jaxpr, "consts", ())


def is_program(x: Any) -> bool:
    """Whether `x` is a jaxpr, open or closed."""
    return hasattr(open_jaxpr(x), "eqns")


def is_ref(v: Any) -> bool:
    """Whether a variable is a `jax.Ref`, an array that equations write to in place."""
    return hasattr(v.aval, "inner_aval")


def argument_names(jaxpr: AnyJaxpr) -> Sequence[str]:
    """Returns the names of the arguments in the traced function; () if unknown."""
    jaxpr = open_jaxpr(jaxpr)
    names = jaxpr.debug_info.arg_names or ()
    # The lengths differ if JAX has turned constants into arguments.
    if len(names) != len(jaxpr.invars):
        return ()
    return tuple(name or "" for name in names)


def params_of(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the parameters of an equation's operation.

    Some operations, such as `custom_root` since jax 0.12, keep their parameters in an
    object, which is the equation's parameter `_prim`.
    """
    holder = eqn.params.get("_prim")
    return getattr(holder, "params", eqn.params)


def name_of(eqn: JaxprEqn) -> str:
    """Returns the name of an equation's operation, usually that of its primitive.

    Operations that keep their parameters in an object share one primitive, so they are
    named after the object's class. See `params_of`.
    """
    holder = eqn.params.get("_prim")
    return eqn.primitive.name if holder is None else type(holder).__name__


def scopes_of(eqn: JaxprEqn) -> list[str]:
    """Returns the names of the scopes around an equation, outermost first.

    The scopes are those of `jax.named_scope`. JAX stores transformations, such as
    `jvp`, in the same stack, but these are left out.
    """
    entries = eqn.source_info.name_stack.stack
    return [entry.name for entry in entries if type(entry).__name__ == "Scope"]


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether JAX made an equation by transposing others, as for a backward pass.

    JAX records this only in the text of the name stack, as in `transpose(jvp(f))`.
    """
    return "transpose(" in str(eqn.source_info.name_stack)


def bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Applies an equation's operation, with its parameters, to other operands.

    The settings under which the equation was traced, such as its mesh, apply again. The
    results are a list, even of an operation with one result.
    """
    primitive = eqn.primitive
    functions = ()
    params = primitive.get_bind_params(eqn.params)
    if isinstance(params, tuple):  # before jax 0.9
        functions, params = params
    with eqn.ctx.manager:
        results = primitive.bind(*functions, *operands, **params)
    return list(results) if primitive.multiple_results else [results]


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns how many operands of a `scan` are constants and how many are carried."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Since jax 0.12
    consts, carry, *_ = params["ft_in"].unpack()
    return len(consts), len(carry)


def mapped_axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Returns the mesh axes that a `shard_map` itself maps, not those of outer ones."""
    if "manual_axes" in eqn.params:  # before jax 0.10
        return tuple(eqn.params["manual_axes"])
    return tuple(eqn.params["newly_manual_axes"])
