"""Which islands the backward pass recomputes, and which of their results are kept.

An island is recomputed from the values that it reads, unless it only moves numbers, or
is part of an associative scan, which is known by its `pad` with gaps. A reduction in a
recomputed island is a residual nevertheless where recomputing it would take another
pass over a large array, for a few numbers.
"""

from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn, Var

from optax_lossscale._programs.operations import Trait, traits
from optax_lossscale._programs.values import (
    FLOAT32,
    dtype_in,
    is_inexact,
    shape_in,
    size_of,
    variables,
)

_LEAST_TERMS = 32  # of a reduction whose result is worth keeping


def is_worth_recomputing(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether equations compute floats, and are not part of an associative scan.

    Each level of an associative scan pads with gaps between numbers, and is a pass over
    memory of its own: not to recompute it saves Mamba bytes, at the cost of memory.
    Equations that only move numbers compute nothing, and their derivatives need none of
    their operands: not to recompute them saves a recommender bytes.
    """
    return any(map(_computes_floats, eqns)) and not any(map(_puts_gaps, eqns))


def kept_reductions(eqns: Sequence[JaxprEqn], stored: Iterable[Var]) -> frozenset[Var]:
    """The reductions of a region that other equations in it read, and that are kept.

    To recompute one would take another pass over its operand. Keeping them saves bytes
    in a cross-entropy over a large vocabulary, and in the batch norms of a ResNet.
    """
    largest = max(size_of(v.aval) for v in stored)
    read_here = {v for eqn in eqns for v in variables(eqn.invars)}
    reductions = {eqn.outvars[0] for eqn in eqns if _takes_a_pass(eqn, largest)}
    return frozenset(reductions & read_here)


def _computes_floats(eqn: JaxprEqn) -> bool:
    """Whether an equation computes floats, and does not only move some."""
    moves = traits(eqn) & (Trait.MOVES | Trait.PLACES)
    return not moves and is_inexact(eqn.outvars[0])


def _puts_gaps(eqn: JaxprEqn) -> bool:
    """Whether an equation pads between the numbers of its operand."""
    return any(gap for _, _, gap in eqn.params.get("padding_config", ()))


def _takes_a_pass(eqn: JaxprEqn, largest: int) -> bool:
    """Whether an equation is a reduction that takes a pass over memory for itself.

    `largest` is the size of the largest array that its region stores.
    """
    if Trait.REDUCES not in traits(eqn) or dtype_in(eqn.outvars[0]) != FLOAT32:
        return False
    operand = eqn.invars[0]
    n_before = size_of(operand.aval)
    n_left = size_of(eqn.outvars[0].aval)
    # A compiler fuses sums over rows with what is computed from them for the same rows,
    # as in the softmax of attention. To keep these sums would move more bytes.
    is_over_rows = eqn.params["axes"] == (len(shape_in(operand)) - 1,)
    is_read_once = is_over_rows and largest >= n_before
    return n_left * _LEAST_TERMS <= n_before and not is_read_once
