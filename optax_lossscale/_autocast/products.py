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
_WITH_FLOAT64 = "a product with float64"
SCOPE = "ols.autocast"
"""The scope of all that `autocast` runs, and of derivatives that are made from it later."""


def is_narrowed(eqn: Any) -> bool:
    """Whether this is a product to compute in 16 bits."""
    return is_product(eqn) and not asks_for_precision(eqn) and _multiplies_float32(eqn)


def is_outer_product(eqn: Any) -> bool:
    """Whether this multiplies single numbers, sums nothing, and may be rewritten."""
    # It is not a product, but the derivatives of a `dot_general` would be: in float32.
    if Is.OUTER not in traits(eqn):
        return False
    if not multiplies_once(eqn) or asks_for_precision(eqn):
        return False
    is_placed = eqn.params.get("out_sharding") is not None
    return not is_placed and _multiplies_float32(eqn)


def holds_products(eqn: Any) -> bool:
    """Whether an equation holds products, or what has such derivatives, to have in 16 bits."""
    return not _why_not_rewritten(eqn) and any(map(_has_products, programs_in(eqn)))


@remembered
def _has_products(program: Any) -> bool:
    """Whether a program has products, or what has such derivatives, to have in 16 bits."""
    # The backward pass of a `custom_vjp` may have products where its forward pass has
    # none.
    return any(
        is_narrowed(eqn)
        or is_outer_product(eqn)
        or Is.VJP in traits(eqn)
        or holds_products(eqn)
        for eqn in open_jaxpr(program).eqns
    )


def is_rewritten(eqn: Any) -> bool:
    """Whether the programs in an equation are rewritten, if there is something to narrow."""
    return not _why_not_rewritten(eqn)


def has_new_passes(eqn: Any) -> bool:
    """Whether this is a `custom_vjp` whose passes are rewritten."""
    return Is.VJP in traits(eqn) and is_rewritten(eqn)


def why_left(eqn: Any) -> str:
    """Why products in an equation, or the equation itself, are not narrowed; "" if they are."""
    if not is_product(eqn):
        has_products = any(map(_has_products, programs_in(eqn)))
        return _why_not_rewritten(eqn) if has_products else ""
    if is_narrowed(eqn) or asks_for_precision(eqn):
        return ""
    dtypes = dtypes_in(eqn.invars[:2])
    if FLOAT64 in dtypes:
        return _WITH_FLOAT64
    integers = [d for d in dtypes if jnp.issubdtype(d, jnp.integer)]  # maybe large ones
    return f"a product with {integers[0]}" if integers and FLOAT32 in dtypes else ""


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
    if why == _WITH_FLOAT64:
        return (
            "cast the batch and the parameters to float32: NumPy's arrays are float64 "
            "by default"
        )
    if why.startswith("a product with"):
        return "cast the integers to float32"
    if why == "a product that only a derivative has":
        return "cast in the derivative's rule"
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


def _multiplies_float32(eqn: Any) -> bool:
    """Whether this is a float32 product, of float32 or with integers that 16 bits hold."""
    operands = set(dtypes_in(eqn.invars[:2]))
    if FLOAT32 not in operands or dtype_in(eqn.outvars[0]) != FLOAT32:
        return False
    others = operands - {FLOAT32}
    # Of 8 bits and fewer, and masks
    return all(d.itemsize == 1 and not jnp.issubdtype(d, jnp.inexact) for d in others)
