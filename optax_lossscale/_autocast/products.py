"""Which products are narrowed, which programs are rewritten, and why others are left.

A product is narrowed if its operands and its result are float32, and it asks neither
for HIGHEST precision nor for an algorithm. An equation may be rewritten if its programs
can be replaced, and nothing speaks against it, as in a `while` that waits for a number
to converge. It is rewritten if, besides, its programs have something to change, or a
rule that is not seen may have. `reasons_left` gives the reasons in `autocast`'s warning
that it narrows nothing.
"""

from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from optax_lossscale._programs.cached import cached_by_program
from optax_lossscale._programs.enter import is_entered
from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import (
    FLOAT32,
    FLOAT64,
    dtypes_in,
    is_inexact,
    is_inexact_dtype,
    shape_in,
)
from optax_lossscale._programs.versions import is_ref, name_of, open_jaxpr
from optax_lossscale._programs.walk import (
    has_shardings,
    needed_for,
    producers_in,
    programs_in,
)
from optax_lossscale._programs.work import (
    asks_for_highest,
    is_product,
    multiplies_once,
)

SCOPE = "ols.autocast"
"""The name of the scope of what `autocast` runs, and of the values that it keeps."""

_NARROWED = ""  # what becomes of a product that is narrowed
_AT_DEFAULT = (
    "products at this jax_default_matmul_precision (set it to 'default', and use "
    "precision='highest' for the products that need it)"
)
_CAST = "cast the batch and the parameters to float32"
_INSIDE = "use autocast inside of it, as on the function that is passed to a solver"


def is_narrowed(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product that is computed in 16 bits."""
    return is_product(eqn) and _is_plain(eqn)


def is_outer_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `dot_general` that sums nothing, and may be replaced.

    A multiplication replaces it: see `outer_product`.
    """
    if Trait.OUTER not in traits(eqn) or eqn.params.get("out_sharding") is not None:
        return False
    return multiplies_once(eqn) and _is_plain(eqn)


def _is_plain(eqn: JaxprEqn) -> bool:
    """Whether a product takes and gives float32, and does not ask for HIGHEST."""
    dtypes = dtypes_in([*eqn.invars[:2], eqn.outvars[0]])
    return set(dtypes) == {FLOAT32} and not asks_for_highest(eqn)


def may_be_rewritten(eqn: JaxprEqn) -> bool:
    """Whether an equation holds programs whose products `autocast` may narrow."""
    return not _why_not_rewritten(eqn)


def is_rewritten(eqn: JaxprEqn) -> bool:
    """Whether an equation is rewritten: its programs are changed, or its rule may be.

    A `custom_vjp` always is, as its rule is not seen. A `custom_jvp` is only if its
    function has products.
    """
    if not may_be_rewritten(eqn):
        return False
    return Trait.VJP in traits(eqn) or any(map(_is_changed, programs_in(eqn)))


@cached_by_program
def _is_changed(program: Any) -> bool:
    """Whether a program has products to narrow or replace, or programs to rewrite."""
    return any(
        is_narrowed(eqn) or is_outer_product(eqn) or is_rewritten(eqn)
        for eqn in open_jaxpr(program).eqns
    )


def usual_precision() -> Any:
    """The precision of a product that asks for none, by the default around this call."""
    vector = jax.ShapeDtypeStruct((1,), FLOAT32)
    (eqn,) = jax.make_jaxpr(lax.dot)(vector, vector).eqns
    return eqn.params["precision"]


def reasons_left(program: Any) -> tuple[str, ...]:
    """Why no product of a program is narrowed, and what to do, each reason once.

    There is no reason if some product is narrowed, and none for a product for which the
    user asks for HIGHEST precision or an algorithm, or without operands in float32 or
    float64.
    """
    fates = _fates(program, usual_precision())
    return () if _NARROWED in fates else fates


@cached_by_program
def _fates(program: Any, usual: Any) -> tuple[str, ...]:
    """What becomes of the products of a program, each fate once.

    It is `_NARROWED`, or the reason why a product is left. `usual` is the precision of
    products that ask for none.
    """
    eqns = open_jaxpr(program).eqns
    return tuple(dict.fromkeys(fate for eqn in eqns for fate in _fates_in(eqn, usual)))


def _fates_in(eqn: JaxprEqn, usual: Any) -> list[str]:
    """What becomes of an equation that is a product, or of those in its programs."""
    if is_narrowed(eqn):
        return [_NARROWED]
    if is_product(eqn):
        dtypes = dtypes_in(eqn.invars[:2])
        if {FLOAT32, FLOAT64}.isdisjoint(dtypes):
            return []
        if asks_for_highest(eqn):
            return [_AT_DEFAULT] if eqn.params["precision"] == usual else []
        others = [d for d in dtypes if d == FLOAT64 or not is_inexact_dtype(d)]
        return [f"a product with {dtype} ({_CAST})" for dtype in others]
    inside = [fate for program in programs_in(eqn) for fate in _fates(program, usual)]
    if _NARROWED in inside and not may_be_rewritten(eqn):
        return [f"{_why_not_rewritten(eqn)} ({_INSIDE})"]
    return inside


def _why_not_rewritten(eqn: JaxprEqn) -> str:
    """Why the programs in an equation cannot be rewritten; "" if they can."""
    if not is_entered(eqn) and not traits(eqn) & (Trait.JVP | Trait.VJP):
        return f"a {name_of(eqn)}"
    if has_shardings(eqn):
        return "a jit with shardings"
    if eqn.params.get("symbolic_zeros"):  # its rule would see other perturbations
        return "a derivative with symbolic zeros"
    if Trait.VJP in traits(eqn) and any(map(is_ref, eqn.invars)):
        return "a derivative that writes to a Ref"
    if Trait.WHILE in traits(eqn) and _waits(eqn):
        return "a loop that waits for a number"
    return ""


def _waits(eqn: JaxprEqn) -> bool:
    """Whether a `while` waits for a number to converge: in 16 bits, it might never end.

    It does not if its condition is computed from integers and booleans alone, such as a
    count of rounds, and the body computes the next ones from these and from constants
    of integers and booleans. A loop with a flag for each example of a `vmap` is taken
    to wait.
    """
    condition, body = map(open_jaxpr, programs_in(eqn))
    if shape_in(condition.outvars[0]):
        return True
    of_condition = condition.invars[eqn.params["cond_nconsts"] :]
    of_body = body.invars[eqn.params["body_nconsts"] :]
    read = needed_for(condition.outvars, producers_in(condition.eqns))
    counters = {n for n, v in enumerate(of_condition) if v in read}
    next_counters = [body.outvars[n] for n in counters]
    read |= needed_for(next_counters, producers_in(body.eqns))
    reads_others = any(v in read for n, v in enumerate(of_body) if n not in counters)
    inputs = [*condition.invars, *body.invars]
    return reads_others or any(map(is_inexact, read.intersection(inputs)))
