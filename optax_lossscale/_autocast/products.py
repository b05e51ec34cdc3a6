"""Decides which products are narrowed, and into which equations `narrow` looks for them.

A product is *narrowed*, that is, computed in 16 bits, if its operands and its result are
float32 and if it has neither HIGHEST precision nor an algorithm. Products inside of an
equation, such as a `scan`, are narrowed unless something forbids it. For example, a
`while` that waits for a number to converge is left as it is.

If `autocast` narrows nothing, it warns with the reasons from `why_none_is_narrowed`.
"""

from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.enter import is_entered
from optax_lossscale._programs.products import asks_for_highest, is_product
from optax_lossscale._programs.values import (
    FLOAT32,
    FLOAT64,
    dtypes_in,
    is_inexact,
    is_inexact_dtype,
    shape_in,
)
from optax_lossscale._programs.versions import AnyJaxpr, is_ref, name_of, open_jaxpr
from optax_lossscale._programs.walk import (
    has_shardings,
    needed_for,
    producers_in,
    programs_in,
)

# Reasons, or advice to add to a reason
_BY_DEFAULT = (
    "products at this jax_default_matmul_precision (set it to 'default', and use "
    "precision='highest' for the products that need it)"
)
_CAST_INPUTS = "cast the batch and the parameters to float32"
_USE_INSIDE = (
    "use autocast inside it, for example on the function that is passed to a solver"
)


def is_narrowed(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product that is computed in 16 bits."""
    if not is_product(eqn) or asks_for_highest(eqn):
        return False
    return set(dtypes_in([*eqn.invars[:2], eqn.outvars[0]])) == {FLOAT32}


def may_have_narrowed(eqn: JaxprEqn) -> bool:
    """Whether an equation holds programs in which products may be narrowed."""
    return _why_left_alone(eqn) is None


def has_narrowed(eqn: JaxprEqn) -> bool:
    """Whether products inside of an equation are narrowed.

    The rule of a `custom_vjp`, which JAX has not traced yet, may have some. Of a
    `custom_jvp`, only the function's own program counts.
    """
    if not may_have_narrowed(eqn):
        return False
    if name_of(eqn) == "custom_vjp_call":
        return True
    return any(map(_program_has_narrowed, programs_in(eqn)))


@cached_by_program
def _program_has_narrowed(program: AnyJaxpr) -> bool:
    return any(
        is_narrowed(eqn) or has_narrowed(eqn) for eqn in open_jaxpr(program).eqns
    )


def usual_precision() -> Any:
    """Returns the precision that a product has by default in this context."""
    vector = jax.ShapeDtypeStruct((1,), FLOAT32)
    (eqn,) = jax.make_jaxpr(lax.dot)(vector, vector).eqns
    return eqn.params["precision"]


def why_none_is_narrowed(program: AnyJaxpr) -> tuple[str, ...]:
    """Returns the reasons why no product is narrowed, with advice, each reason once.

    The tuple is empty if some product is narrowed. Products that are left alone on
    purpose give no reason: those to which the user gives HIGHEST precision or an
    algorithm, and those without an operand in float32 or float64.
    """
    outcomes = _outcomes(program, usual_precision())
    if None in outcomes:
        return ()
    return tuple(filter(None, outcomes))


@cached_by_program
def _outcomes(program: AnyJaxpr, usual: Any) -> tuple[str | None, ...]:
    """Returns the outcome of each product in a program, without duplicates.

    An outcome is None if the product is narrowed, and otherwise the reason why it is
    not. `usual` is the `usual_precision`. It is an argument because the results are
    cached and it may change from call to call.
    """
    outcomes = []
    for eqn in open_jaxpr(program).eqns:
        outcomes += _outcomes_of(eqn, usual)
    return tuple(dict.fromkeys(outcomes))


def _outcomes_of(eqn: JaxprEqn, usual: Any) -> list[str | None]:
    """Returns the outcome of a product, or those of the products in an equation."""
    if is_narrowed(eqn):
        return [None]
    if is_product(eqn):
        dtypes = dtypes_in(eqn.invars[:2])
        if {FLOAT32, FLOAT64}.isdisjoint(dtypes):
            return []
        if asks_for_highest(eqn):
            if eqn.params["precision"] == usual:
                return [_BY_DEFAULT]
            return []
        to_cast = [d for d in dtypes if d == FLOAT64 or not is_inexact_dtype(d)]
        return [f"a product with {dtype} ({_CAST_INPUTS})" for dtype in to_cast]
    inside = []
    for program in programs_in(eqn):
        inside += _outcomes(program, usual)
    if None in inside and not may_have_narrowed(eqn):
        return [f"{_why_left_alone(eqn)} ({_USE_INSIDE})"]
    return inside


def _why_left_alone(eqn: JaxprEqn) -> str | None:
    """Returns why no product inside of an equation can be narrowed; None if it can."""
    name = name_of(eqn)
    if not is_entered(eqn) and name not in ("custom_jvp_call", "custom_vjp_call"):
        return f"a {name}"
    if has_shardings(eqn):
        return "a jit with shardings"
    if eqn.params.get("symbolic_zeros"):  # the rule would see other perturbations
        return "a derivative with symbolic zeros"
    if name == "custom_vjp_call" and any(map(is_ref, eqn.invars)):
        return "a derivative that writes to a Ref"
    if name == "while" and _waits(eqn):
        return "a loop that waits for a number"
    return None


def _waits(eqn: JaxprEqn) -> bool:
    """Whether a `while` waits for a number to converge: in 16 bits, it might never end.

    A loop does not wait if integers and booleans alone decide when it ends, as with a
    count of iterations. The condition then reads only such carries and constants, and
    the body computes the next values of these carries from nothing else. A loop with a
    flag for each example of a `vmap` counts as waiting.
    """
    condition, body = map(open_jaxpr, programs_in(eqn))
    if shape_in(condition.outvars[0]):
        return True
    condition_carry = condition.invars[eqn.params["cond_nconsts"] :]
    body_carry = body.invars[eqn.params["body_nconsts"] :]
    read = needed_for(condition.outvars, producers_in(condition.eqns))
    counters = {n for n, v in enumerate(condition_carry) if v in read}
    next_counters = [body.outvars[n] for n in counters]
    read |= needed_for(next_counters, producers_in(body.eqns))
    for n, v in enumerate(body_carry):
        if v in read and n not in counters:
            return True
    inputs = [*condition.invars, *body.invars]
    return any(map(is_inexact, read.intersection(inputs)))
