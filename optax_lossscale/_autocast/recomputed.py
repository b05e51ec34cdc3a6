"""Decides which islands the backward pass recomputes, and which results are saved.

The backward pass recomputes an island from the values that the island reads. Two kinds
of islands are not recomputed: those that only move elements, and those in an
associative scan, which are recognized by a `pad` that puts padding between elements.

In a recomputed island, some reductions are saved as residuals, too: those that reduce a
large array to a few elements and would need another pass over that array. An example is
the sum over the vocabulary in a cross-entropy.

What this file says of fusion, memory and traffic was read from programs compiled for an
H100 (not timed): see `store`.
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

# A reduction of fewer terms is not saved. A heuristic, which bounds the memory: a saved
# result takes at most 1/32 of what its operand takes in float32.
_FEWEST_TERMS = 32


def is_worth_recomputing(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether equations compute floats and are not part of an associative scan.

    Recomputing equations that only move elements gains nothing, because they compute
    nothing and their derivatives read no floats, only indices. In a recommender it
    costs traffic. Each level of an associative scan pads between elements and is a
    separate pass over memory. In Mamba, recomputing the scan would save memory but cost
    traffic; to choose this, wrap the scan in `jax.checkpoint`.
    """
    if any(map(_pads_between, eqns)):
        return False
    return any(map(_computes_floats, eqns))


def kept_reductions(eqns: Sequence[JaxprEqn], stored: Iterable[Var]) -> frozenset[Var]:
    """Returns the results of reductions in a region that are saved as residuals.

    To recompute such a reduction would need another pass over its operand. Only
    reductions that other equations in the region read are saved. Saving them reduces
    traffic in a cross-entropy over a large vocabulary and in a ResNet with batch norm.

    Args:
      eqns: the equations of the region.
      stored: the values that the region stores.
    """
    largest = max(size_of(v.aval) for v in stored)
    read_here = {v for eqn in eqns for v in variables(eqn.invars)}
    kept = set()
    for eqn in eqns:
        result = eqn.outvars[0]
        if result in read_here and _needs_a_pass(eqn, largest):
            kept.add(result)
    return frozenset(kept)


def _computes_floats(eqn: JaxprEqn) -> bool:
    """Whether an equation computes floats, instead of only moving them."""
    if traits(eqn) & (Trait.MOVES | Trait.PLACES):
        return False
    return is_inexact(eqn.outvars[0])


def _pads_between(eqn: JaxprEqn) -> bool:
    """Whether an equation pads between the elements of its operand."""
    padding = eqn.params.get("padding_config", ())
    return any(interior for _, _, interior in padding)


def _needs_a_pass(eqn: JaxprEqn, largest: int) -> bool:
    """Whether an equation is a reduction that needs a separate pass over memory.

    `largest` is the size of the largest array that its region stores.
    """
    result = eqn.outvars[0]
    if Trait.REDUCES not in traits(eqn):
        return False
    if dtype_in(result) != FLOAT32:
        return False
    operand = eqn.invars[0]
    n_terms = size_of(operand.aval)
    n_results = size_of(result.aval)
    # If the region also stores an array as large as the operand, a compiler fuses sums
    # over rows with what is computed from them for the same rows, as in the softmax of
    # attention. With these sums saved, attention over long sequences moved 1.28 times
    # the bytes.
    last_axis = len(shape_in(operand)) - 1
    is_over_rows = eqn.params["axes"] == (last_axis,)
    if is_over_rows and largest >= n_terms:
        return False
    return n_results * _FEWEST_TERMS <= n_terms
