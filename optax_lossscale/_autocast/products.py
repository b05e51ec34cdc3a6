"""Which products are computed in 16 bits, and why others are left."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from optax_lossscale._programs.enter import is_entered, is_placed
from optax_lossscale._programs.operations import Is, traits
from optax_lossscale._programs.remembered import remembered
from optax_lossscale._programs.values import (
    FLOAT32,
    FLOAT64,
    asks_for_precision,
    dtype_in,
    dtypes_in,
    is_product,
    multiplies_once,
)
from optax_lossscale._programs.versions import is_ref, name_of, open_jaxpr
from optax_lossscale._programs.walk import programs_in

AT_DEFAULT = "products at this jax_default_matmul_precision"
SCOPE = "ols.autocast"
"""The scope of all that `autocast` runs, and of derivatives that are made from it later."""


def is_narrowed(eqn: Any) -> bool:
    """Whether this is a product to compute in 16 bits."""
    return is_product(eqn) and not asks_for_precision(eqn) and _is_float32(eqn)


def is_outer_product(eqn: Any) -> bool:
    """Whether this multiplies single numbers, sums nothing, and may be rewritten."""
    # It is not a product, but the derivatives of a `dot_general` would be: in float32.
    if Is.OUTER not in traits(eqn) or eqn.params.get("out_sharding") is not None:
        return False
    return multiplies_once(eqn) and not asks_for_precision(eqn) and _is_float32(eqn)


def _is_float32(eqn: Any) -> bool:
    dtypes = dtypes_in([*eqn.invars[:2], eqn.outvars[0]])
    return set(dtypes) == {FLOAT32}


def is_rewritten(eqn: Any) -> bool:
    """Whether the programs in an equation are rewritten, if there is something to narrow."""
    return not _why_not_rewritten(eqn)


def holds_products(eqn: Any) -> bool:
    """Whether an equation holds products to have in 16 bits, or may in its derivatives."""
    if not is_rewritten(eqn):
        return False
    # The backward pass of a `custom_vjp` may have products where its forward pass has
    # none.
    return Is.VJP in traits(eqn) or any(map(_has_products, programs_in(eqn)))


@remembered
def _has_products(program: Any) -> bool:
    """Whether a program has products to have in 16 bits, or may in its derivatives."""
    return any(
        is_narrowed(eqn) or is_outer_product(eqn) or holds_products(eqn)
        for eqn in open_jaxpr(program).eqns
    )


def why_left(eqn: Any) -> str:
    """Why products in an equation, or the equation itself, are not narrowed; "" if they are."""
    if not is_product(eqn):
        has_products = any(map(_has_products, programs_in(eqn)))
        return _why_not_rewritten(eqn) if has_products else ""
    if is_narrowed(eqn) or asks_for_precision(eqn):
        return ""
    dtypes = dtypes_in(eqn.invars[:2])
    if FLOAT64 in dtypes:
        return "a product with float64"
    others = [dtype for dtype in dtypes if not jnp.issubdtype(dtype, jnp.inexact)]
    return f"a product with {others[0]}" if FLOAT32 in dtypes and others else ""


def usual_product() -> Any:
    """A product of float32 that asks for no precision, with that which JAX gives it."""
    vector = jax.ShapeDtypeStruct((1,), FLOAT32)
    (eqn,) = jax.make_jaxpr(lax.dot)(vector, vector).eqns
    return eqn


def reasons_left(program: Any) -> tuple[str, ...]:
    """Why autocast leaves products of a program, each reason once; "" for any that it narrows."""
    if asks_for_precision(usual_product()):  # as `jax_default_matmul_precision` says
        return (AT_DEFAULT,)
    return _reasons_left(program)


@remembered
def _reasons_left(program: Any) -> tuple[str, ...]:
    reasons: dict[str, None] = {}
    for eqn in open_jaxpr(program).eqns:
        why = why_left(eqn)
        if why or is_narrowed(eqn):
            reasons[why] = None
            continue
        for inner in programs_in(eqn):
            reasons |= dict.fromkeys(_reasons_left(inner))
    return tuple(reasons)


def remedy(why: str) -> str:
    """What to do about a product that is left in float32 for this reason."""
    if why == AT_DEFAULT:
        return "set it to 'default', and use precision='highest' for the products that need it"
    if why.startswith("a product with"):
        return "cast the batch and the parameters to float32"
    return "use autocast inside of it, as on the function that is passed to a solver"


def _why_not_rewritten(eqn: Any) -> str:
    if not is_entered(eqn):
        return f"a {name_of(eqn)}"
    if is_placed(eqn):
        return "a jit with shardings"
    if eqn.params.get("symbolic_zeros"):  # which would see other perturbations
        return "a derivative with symbolic zeros"
    if Is.VJP in traits(eqn) and any(map(is_ref, eqn.invars)):
        return "a derivative that writes to a Ref"
    if Is.WAITS in traits(eqn) and _waits(open_jaxpr(eqn.params["cond_jaxpr"])):
        return "a loop that waits for a number"
    return ""


def _waits(condition: Any) -> bool:
    """Whether a `while` goes on by anything but one count: in 16 bits, it might never end."""
    if condition.outvars[0].aval.shape:  # by one for each example, under `vmap`
        return True
    operands = [*condition.outvars, *(v for eqn in condition.eqns for v in eqn.invars)]
    read = {v for v in operands if not isinstance(v, Literal)}
    return not all(
        jnp.issubdtype(dtype_in(v), jnp.integer) for v in condition.invars if v in read
    )
